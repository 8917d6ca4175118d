"""Dynamic batching: pack the sequences of concurrent calls into batches with a token budget."""

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bertsmith.runtime.thread_pool import set_local_num_threads
from bertsmith.serve.deadline import (
    SHUTDOWN_MESSAGE,
    BusyError,
    Deadline,
    DisconnectedError,
    RequestTooLargeError,
    ShuttingDownError,
)
from bertsmith.serve.fair_queue import BatchFunction, Call, QueuedSequence, TokenDemand
from bertsmith.serve.scheduling import CallScheduler


@dataclass(frozen=True)
class TracedCall:
    """A call with tracing that has sequences in a batch.

    Attributes:
        trace_context: context of the request's spans.
        wait_seconds: time in the queue; None if an earlier batch had the call's first sequence.
    """

    trace_context: Any
    wait_seconds: float | None


@dataclass(frozen=True)
class ComputedBatch:
    """Figures of a computed batch, for metrics and traces.

    Attributes:
        key: key of its calls.
        num_sequences: number of sequences.
        num_tokens: tokens of all sequences, without padding.
        seconds: duration of the computation.
        wait_seconds: time in the queue of each call whose first sequence is in the batch.
        traced_calls: calls with tracing.
    """

    key: Hashable
    num_sequences: int
    num_tokens: int
    seconds: float
    wait_seconds: list[float]
    traced_calls: list[TracedCall]


#: Called after each batch.
BatchCallback = Callable[[ComputedBatch], None]


class Batcher:
    """Computes the sequences of concurrent calls in batches, on one or more threads.

    ``CallScheduler`` describes which calls are accepted, and ``FairQueue`` their order.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        max_call_tokens: int,
        max_wait_seconds: float,
        num_threads: int = 1,
        on_batch: BatchCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            max_batch_tokens: maximum tokens per batch. A longer sequence is computed alone.
            max_queue_tokens: maximum tokens in the queue.
            max_call_tokens: maximum tokens per call.
            max_wait_seconds: time to wait for other calls to fill a batch.
            num_threads: number of batches computed concurrently; they share the CPU cores.
            on_batch: called after each batch, for metrics.
            clock: returns the time in seconds; deadlines use the same clock.
        """
        self._clock = clock
        self._max_batch_tokens = max_batch_tokens
        self._max_call_tokens = max_call_tokens
        self._max_wait_seconds = max_wait_seconds
        self._on_batch = on_batch
        self._scheduler = CallScheduler(
            max_batch_tokens=max_batch_tokens, max_queue_tokens=max_queue_tokens, clock=clock
        )
        #: Guards all fields; notified when sequences are queued and when the batcher is closed.
        self._condition = threading.Condition()
        self._is_open = True
        #: Whether a thread has ended with an exception; also after the batcher is closed.
        self.has_dead_thread = False
        self._num_cores = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._run_thread, name=f"model-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_tokens(self) -> int:
        """Tokens in the queue."""
        return self._scheduler.queued_tokens

    @property
    def is_alive(self) -> bool:
        """Whether the batcher accepts calls and all of its threads run."""
        return self._is_open and not self.has_dead_thread

    def submit(
        self,
        key: Hashable,
        compute_batch: BatchFunction,
        payloads: Sequence[tuple[int, Any]],
        deadline: Deadline,
    ) -> Future[list[Any]]:
        """Queue a call and return the future of its results.

        Args:
            key: sequences of different calls share a batch only if the keys of the calls are equal.
            compute_batch: computes the results of a batch; calls with equal keys must pass
                equivalent functions.
            payloads: (number of tokens, payload) of each sequence.
            deadline: the call's deadline, after which the future raises DeadlineExceededError.

        Raises:
            RequestTooLargeError: the call has too many tokens.
            BusyError: the queue is full, the call would not be answered in time, or the client has
                used its tokens.
            ShuttingDownError: the batcher is closed.
            DisconnectedError: the client has already disconnected.
        """
        num_tokens = sum(length for length, _ in payloads)
        if num_tokens > self._max_call_tokens:
            raise RequestTooLargeError(
                f"the limit is {self._max_call_tokens:,} tokens per request, got {num_tokens:,}; "
                "split the request"
            )
        deadline.check_connection()
        deadline.charge_tokens(num_tokens)
        call = Call(
            key,
            deadline.client,
            compute_batch,
            deadline.expires_at,
            [max(length, 1) for length, _ in payloads],
            [payload for _, payload in payloads],
            self._clock(),
            deadline.trace_context,
        )
        if not payloads:
            call.future.set_result([])
            return call.future
        with self._condition:
            if not self._is_open:
                raise ShuttingDownError(SHUTDOWN_MESSAGE)
            call.future.add_done_callback(partial(_refund_if_rejected, deadline, num_tokens))
            try:
                # A call of a client that has disconnected meanwhile must not evict other calls.
                deadline.check_connection()
                self._scheduler.add(call)
            except (BusyError, DisconnectedError) as error:
                call.fail(error)
                raise
            call.future.add_done_callback(partial(self._remove_call, weakref.ref(call)))
            self._condition.notify()
            # If the client has just disconnected, this cancels the call at once.
            deadline.cancel_on_disconnect(call.future)
        return call.future

    def reserve(self, demand: TokenDemand) -> None:
        """Reserve room in the queue for a request that will be tokenized, until ``release``.

        Raises:
            BusyError: a call with the estimated tokens would be rejected.
        """
        with self._condition:
            self._scheduler.reserve(demand)

    def release(self, demand: TokenDemand) -> None:
        """End a reservation; nothing happens if it has already ended."""
        with self._condition:
            self._scheduler.release(demand)

    def close(self, timeout_seconds: float) -> None:
        """Reject new calls, and wait up to ``timeout_seconds`` until queued calls are computed."""
        with self._condition:
            self._is_open = False
            self._condition.notify_all()
        end = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _remove_call(self, call_reference: "weakref.ref[Call]", _: Future[list[Any]]) -> None:
        """Remove the remaining sequences of a call that was answered, failed or cancelled.

        The future of a call keeps this callback. With a reference to the call, the results would
        remain in memory until a garbage collection.
        """
        call = call_reference()
        if call is None:
            # The queue refers to its calls, so the call is not in the queue.
            return
        with self._condition:
            self._scheduler.remove(call)

    def _run_thread(self) -> None:
        """Compute batches until the batcher is closed and the queue is empty."""
        try:
            with torch.inference_mode():
                while self._run_batch():
                    pass
        except BaseException:
            self.has_dead_thread = True
            raise

    def _run_batch(self) -> bool:
        """Wait for a batch and compute it; return False once there are no more batches.

        No variable refers to the batch after the return, because a thread can wait for the next
        batch for a long time.
        """
        batch = self._wait_for_batch()
        if batch is None:
            return False
        try:
            # Concurrent batches share the cores; a lone batch uses all of them.
            num_batches = self._scheduler.num_running_batches
            set_local_num_threads(max(self._num_cores // num_batches, 1))
            self._compute_batch(batch)
        finally:
            with self._condition:
                self._scheduler.end_batch(batch)
        return True

    def _wait_for_batch(self) -> list[QueuedSequence] | None:
        """Wait for a batch; return None once the batcher is closed and the queue is empty."""
        scheduler = self._scheduler
        with self._condition:
            while True:
                while not scheduler.has_calls():
                    self._condition.wait_for(lambda: scheduler.has_calls() or not self._is_open)
                    if not scheduler.has_calls():
                        return None
                    # The loop checks the queue again: another thread may empty it meanwhile.
                    self._condition.wait_for(
                        lambda: (
                            scheduler.queued_tokens >= self._max_batch_tokens or not self._is_open
                        ),
                        self._max_wait_seconds,
                    )
                batch = scheduler.start_batch()
                if scheduler.has_calls():
                    self._condition.notify()
                if batch:
                    return batch

    def _compute_batch(self, batch: list[QueuedSequence]) -> None:
        """Compute a batch and store its results. If it fails, retry its sequences one by one."""
        # Calls with equal keys have equivalent functions, so the first one is used.
        compute_batch = batch[0].call.compute_batch
        concurrency_at_start = self._scheduler.num_running_batches
        started_at = self._clock()
        try:
            results: Sequence[Any] = compute_batch([sequence.payload for sequence in batch])
        except Exception as error:  # noqa: BLE001 - forwarded to the caller's future
            if len(batch) > 1:
                # Only the calls of the failing sequences get the error.
                for sequence in batch:
                    if not sequence.call.future.done():
                        self._compute_batch([sequence])
                return
            with self._condition:
                batch[0].call.fail(error)
            return
        seconds = self._clock() - started_at
        with self._condition:
            self._scheduler.measure_speed(batch, seconds, concurrency_at_start)
        self._store_results(batch, results)
        if self._on_batch is not None:
            self._on_batch(_describe_batch(batch, started_at, seconds))

    def _store_results(self, batch: list[QueuedSequence], results: Sequence[Any]) -> None:
        """Store the results in the calls, and answer the calls that are complete."""
        # Another thread may be storing results of the same call.
        with self._condition:
            for sequence, result in zip(batch, results, strict=True):
                call = sequence.call
                call.results[sequence.index] = result
                call.num_sequences_left -= 1
                if call.num_sequences_left or call.future.done():
                    continue
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(call.results)


def _refund_if_rejected(deadline: Deadline, num_tokens: int, future: "Future[Any]") -> None:
    """Refund the tokens of a call that was rejected or evicted before any of it was computed."""
    if not future.cancelled() and isinstance(future.exception(), BusyError | DisconnectedError):
        deadline.refund_tokens(num_tokens)


def _describe_batch(
    batch: list[QueuedSequence], started_at: float, seconds: float
) -> ComputedBatch:
    """Return the figures of a batch."""
    waits = {
        item.call: started_at - item.call.queued_at
        for item in batch
        if item.index == item.call.order[0]
    }
    traced_calls = [
        TracedCall(call.trace_context, waits.get(call))
        for call in dict.fromkeys(item.call for item in batch)
        if call.trace_context is not None
    ]
    num_tokens = sum(sequence.num_tokens for sequence in batch)
    return ComputedBatch(
        batch[0].call.key, len(batch), num_tokens, seconds, list(waits.values()), traced_calls
    )
