"""Dynamic batching: pack the sequences of concurrent calls into batches with a token budget.

Calls that cannot be answered by their deadline are rejected on arrival (admission control).
Otherwise an overloaded server would spend its time on calls that all expire.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from bertsmith.runtime.inference_batches import max_batch_size
from bertsmith.runtime.thread_pool import set_local_num_threads
from bertsmith.serve.deadline import (
    BusyError,
    Deadline,
    RequestTooLargeError,
    ShuttingDownError,
    create_deadline_error,
    wait_for_result,
)

#: Takes the payloads of a batch and returns the result of each payload, in order.
BatchFunction = Callable[[list[Any]], Sequence[Any]]
#: Called after each batch with its number of sequences, number of tokens and seconds.
BatchCallback = Callable[[int, int, float], None]
#: Assumed speed of the model before the first measurement.
_INITIAL_TOKENS_PER_SECOND = 4000.0
#: Weight of a full batch in the exponential moving average of tokens per second.
_SPEED_SMOOTHING = 0.2
#: Number of full batches to measure before calls are rejected because of the measured speed. The
#: first batch of a server is slower than later ones.
_MIN_MEASURED_BATCHES = 2.0
#: A call of several batches is accepted if it needs at most this share of the time until its
#: deadline. The remaining time is reserved for short calls that overtake its last sequences.
_LARGE_CALL_SHARE = 0.8


@dataclass(eq=False)
class _Call:
    """One call of ``submit``.

    Attributes:
        compute_batch: computes the results of a batch.
        expires_at: deadline, in seconds of the monotonic clock.
        results: result of each sequence, None until it is computed.
        num_sequences_left: number of sequences that are not computed yet.
        num_tokens: tokens of all sequences.
        num_tokens_left: tokens of the sequences that are not computed yet.
        num_tokens_queued: tokens of the sequences in the queue.
        future: resolves to ``results``.
    """

    compute_batch: BatchFunction
    expires_at: float
    results: list[Any]
    num_sequences_left: int
    num_tokens: int
    num_tokens_left: int
    num_tokens_queued: int
    future: Future[list[Any]] = field(default_factory=Future)


@dataclass(order=True)
class _QueuedSequence:
    """A sequence in the queue, ordered by its scheduled time.

    Attributes:
        scheduled_at: time in seconds of the monotonic clock.
        arrival_number: orders sequences with the same scheduled time.
        num_tokens: length of the sequence.
        payload: item for ``call.compute_batch``.
        call: the call that submitted the sequence.
        index: index of the sequence's result in ``call.results``.
    """

    scheduled_at: float
    arrival_number: int
    num_tokens: int = field(compare=False)
    payload: Any = field(compare=False)
    call: _Call = field(compare=False)
    index: int = field(compare=False)


class Batcher:
    """Computes the sequences of concurrent calls in batches, on one or more threads.

    Scheduling is fair: a sequence's scheduled time is the arrival time of its call plus the
    estimated time for the sequences before it in the same call. A call with one text can therefore
    overtake most of an earlier call with thousands of texts, but cannot delay the sequences
    scheduled before it.

    Attributes:
        queued_tokens: tokens in the queue.
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
            max_batch_tokens: maximum tokens per batch, including padding: every sequence counts as
                many tokens as the longest one. A sequence that exceeds the maximum is computed
                alone.
            max_queue_tokens: maximum tokens in the queue.
            max_call_tokens: maximum tokens per call.
            max_wait_seconds: time to wait for other calls to fill a batch.
            num_threads: number of batches computed concurrently; they share the CPU cores.
            on_batch: called after each batch, for metrics.
            clock: returns the time in seconds; deadlines use the same clock.
        """
        self._clock = clock
        self._max_batch_tokens = max_batch_tokens
        self._max_queue_tokens = max_queue_tokens
        self._max_call_tokens = max_call_tokens
        self._max_wait_seconds = max_wait_seconds
        self._on_batch = on_batch
        #: For each key of ``submit``, a heap of queued sequences; empty heaps are removed.
        self._queues: dict[Hashable, list[_QueuedSequence]] = {}
        self._arrival_numbers = itertools.count()
        #: Guards all fields; notified when sequences are queued and when the batcher is closed.
        self._condition = threading.Condition()
        self._is_open = True
        #: Moving average of the speed of all threads together.
        self._tokens_per_second = _INITIAL_TOKENS_PER_SECOND
        #: Number of full batches measured so far; smaller batches count as fractions.
        self._measured_batches = 0.0
        self.queued_tokens = 0
        #: Tokens of the batches being computed.
        self._running_tokens = 0
        #: Number of batches being computed.
        self._running_batches = 0
        #: Unanswered calls, oldest first; the values are unused.
        self._calls: dict[_Call, None] = {}
        self._num_cores = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._run_thread, name=f"model-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the batcher accepts calls and all of its threads run."""
        return self._is_open and all(thread.is_alive() for thread in self._threads)

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
            BusyError: the queue is full, or the call would not be answered in time.
            ShuttingDownError: the batcher is closed.
        """
        num_tokens = sum(length for length, _ in payloads)
        if num_tokens > self._max_call_tokens:
            raise RequestTooLargeError(
                f"the limit is {self._max_call_tokens:,} tokens per request, got {num_tokens:,}; "
                "split the request"
            )
        call = _Call(
            compute_batch,
            deadline.expires_at,
            results=[None] * len(payloads),
            num_sequences_left=len(payloads),
            num_tokens=num_tokens,
            num_tokens_left=num_tokens,
            num_tokens_queued=num_tokens,
        )
        deadline.cancel_on_disconnect(call.future)
        if not payloads:
            call.future.set_result([])
            return call.future
        with self._condition:
            if not self._is_open:
                raise ShuttingDownError("the server is shutting down; use another server")
            self._reject_if_overloaded(num_tokens, deadline.expires_at - self._clock())
            self._queue_call(key, call, payloads)
            # If the client has already disconnected, this calls ``_remove_call`` at once.
            call.future.add_done_callback(lambda _: self._remove_call(call))
            self._condition.notify()
        return call.future

    def submit_and_wait(
        self,
        key: Hashable,
        compute_batch: BatchFunction,
        payloads: Sequence[tuple[int, Any]],
        deadline: Deadline,
    ) -> list[Any]:
        """Submit a call and wait for its results.

        Raises:
            DeadlineExceededError: the deadline passed before all results were computed.
            DisconnectedError: the client disconnected.
            BertsmithError: an error of ``submit``.
        """
        return wait_for_result(self.submit(key, compute_batch, payloads, deadline), deadline)

    def close(self, timeout_seconds: float) -> None:
        """Reject new calls, and wait up to ``timeout_seconds`` until queued calls are computed."""
        with self._condition:
            self._is_open = False
            self._condition.notify_all()
        end = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _queue_call(self, key: Hashable, call: _Call, payloads: Sequence[tuple[int, Any]]) -> None:
        """Add the sequences of a call to the queue of its key."""
        scheduled_at = self._clock()
        queue = self._queues.setdefault(key, [])
        # Longest first: sequences of similar length share batches, which limits padding.
        for index in sorted(range(len(payloads)), key=lambda index: -payloads[index][0]):
            num_tokens, payload = payloads[index]
            arrival_number = next(self._arrival_numbers)
            heapq.heappush(
                queue,
                _QueuedSequence(scheduled_at, arrival_number, num_tokens, payload, call, index),
            )
            scheduled_at += num_tokens / self._tokens_per_second
        self.queued_tokens += call.num_tokens
        self._calls[call] = None

    def _reject_if_overloaded(self, num_tokens: int, seconds_left: float) -> None:
        """Raise BusyError if the queue has no room for a call, or if the call would be late.

        Args:
            num_tokens: tokens of the call.
            seconds_left: time until the call's deadline.
        """
        pending_tokens = self.queued_tokens + self._running_tokens
        if self.queued_tokens and self.queued_tokens + num_tokens > self._max_queue_tokens:
            retry_seconds = self.queued_tokens / self._tokens_per_second
            raise BusyError(
                f"the queue is full: {self.queued_tokens:,} tokens are waiting; retry in "
                f"{retry_seconds:.0f} seconds",
                retry_seconds,
            )
        if not pending_tokens or self._measured_batches < _MIN_MEASURED_BATCHES:
            # An idle server accepts every call, because the estimated speed may be wrong.
            return
        if num_tokens > self._max_batch_tokens:
            seconds_left *= _LARGE_CALL_SHARE
        needed_seconds = (pending_tokens + num_tokens) / self._tokens_per_second
        if needed_seconds > seconds_left:
            pending_seconds = pending_tokens / self._tokens_per_second
            raise self._create_busy_error(min(needed_seconds - seconds_left, pending_seconds))

    def _create_busy_error(self, retry_seconds: float) -> BusyError:
        """Return the error of a call that would be late."""
        pending_tokens = self.queued_tokens + self._running_tokens
        return BusyError(
            f"the server is busy: {pending_tokens:,} tokens are waiting or being computed, at "
            f"{self._tokens_per_second:,.0f} tokens per second; retry in "
            f"{max(retry_seconds, 1.0):.0f} seconds",
            retry_seconds,
        )

    def _shed_load(self) -> None:
        """Reject large calls that will be late at the measured speed.

        Such calls were accepted when the speed was unknown or higher. Computing them would make
        other calls late as well. A call is expected to wait for all older calls that are not
        rejected.
        """
        now = self._clock()
        pending_tokens = self.queued_tokens + self._running_tokens
        oldest_call = next(iter(self._calls), None)
        if (
            oldest_call is None
            or self._measured_batches < _MIN_MEASURED_BATCHES
            or now + pending_tokens / self._tokens_per_second <= oldest_call.expires_at
        ):
            return
        tokens_ahead = 0
        for call in list(self._calls):
            needed_seconds = (tokens_ahead + call.num_tokens_left) / self._tokens_per_second
            is_late = now + needed_seconds > call.expires_at
            is_large = call.num_tokens > self._max_batch_tokens
            if tokens_ahead and is_large and is_late and call.num_tokens_queued:
                retry_seconds = tokens_ahead / self._tokens_per_second
                self._fail_call(call, self._create_busy_error(retry_seconds))
            else:
                tokens_ahead += call.num_tokens_left

    def _remove_call(self, call: _Call) -> None:
        """Stop counting a call that was answered, failed or cancelled."""
        with self._condition:
            self.queued_tokens -= call.num_tokens_queued
            call.num_tokens_queued = 0
            self._calls.pop(call, None)

    def _run_thread(self) -> None:
        """Compute batches until the batcher is closed and the queue is empty."""
        with torch.inference_mode():
            batch = self._wait_for_batch()
            while batch is not None:
                num_tokens = sum(sequence.num_tokens for sequence in batch)
                try:
                    # Concurrent batches share the cores; a lone batch uses all of them.
                    set_local_num_threads(max(self._num_cores // self._running_batches, 1))
                    pending = self._drop_ended_calls(batch)
                    if pending:
                        self._compute_batch(pending)
                finally:
                    with self._condition:
                        self._running_batches -= 1
                        self._running_tokens -= num_tokens
                batch = self._wait_for_batch()

    def _wait_for_batch(self) -> list[_QueuedSequence] | None:
        """Wait for a batch; return None once the batcher is closed and the queue is empty."""
        with self._condition:
            while True:
                while not self._queues:
                    self._condition.wait_for(lambda: self._queues or not self._is_open)
                    if not self._queues:
                        return None
                    # The loop checks the queues again: another thread may empty them meanwhile.
                    self._condition.wait_for(
                        lambda: self.queued_tokens >= self._max_batch_tokens or not self._is_open,
                        self._max_wait_seconds,
                    )
                batch = self._pop_batch()
                if batch:
                    return batch

    def _pop_batch(self) -> list[_QueuedSequence]:
        """Remove the sequences with the earliest scheduled times from a queue, up to a full batch.

        Sequences whose call has already ended are dropped, so the batch can be empty.
        """
        key, queue = min(self._queues.items(), key=lambda item: item[1][0])
        batch: list[_QueuedSequence] = []
        num_tokens = 0
        max_seqlen = 1
        while queue:
            sequence = queue[0]
            if not sequence.call.future.done():
                max_seqlen = max(max_seqlen, sequence.num_tokens)
                if len(batch) >= max_batch_size(max_seqlen, self._max_batch_tokens):
                    break
                batch.append(sequence)
                num_tokens += sequence.num_tokens
                sequence.call.num_tokens_queued -= sequence.num_tokens
            heapq.heappop(queue)
        if not queue:
            del self._queues[key]
        if batch:
            self.queued_tokens -= num_tokens
            self._running_tokens += num_tokens
            self._running_batches += 1
        if self._queues:
            self._condition.notify()
        return batch

    def _compute_batch(self, batch: list[_QueuedSequence]) -> None:
        """Compute a batch and store its results. If it fails, retry its sequences one by one."""
        # Calls with equal keys have equivalent functions, so the first one is used.
        compute_batch = batch[0].call.compute_batch
        concurrency_at_start = self._running_batches
        started_at = self._clock()
        try:
            results: Sequence[Any] = compute_batch([sequence.payload for sequence in batch])
        except Exception as error:  # noqa: BLE001 - forwarded to the caller's future
            if len(batch) > 1:
                # Only the calls of the failing sequences get the error.
                for sequence in batch:
                    self._compute_batch([sequence])
                return
            self._fail_call(batch[0].call, error)
            return
        seconds = self._clock() - started_at
        self._measure_speed(batch, seconds, concurrency_at_start)
        self._store_results(batch, results)
        with self._condition:
            self._shed_load()
        if self._on_batch is not None:
            self._on_batch(len(batch), sum(sequence.num_tokens for sequence in batch), seconds)

    def _measure_speed(
        self, batch: list[_QueuedSequence], seconds: float, concurrency_at_start: int
    ) -> None:
        """Update the moving average of tokens per second with a computed batch.

        Args:
            batch: the sequences of the batch.
            seconds: duration of the computation.
            concurrency_at_start: number of batches that were being computed at its start, including
                this one.
        """
        lengths = [sequence.num_tokens for sequence in batch]
        with self._condition:
            # Multiply the speed of this thread by the mean number of concurrent batches.
            concurrency = (concurrency_at_start + self._running_batches) / 2
            tokens_per_second = sum(lengths) / max(seconds, 1e-6) * concurrency
            # Small batches are slower per token, but a long queue produces full batches. The
            # measurement is therefore weighted by how full the batch is.
            fill_level = min(len(batch) * max(lengths) / self._max_batch_tokens, 1.0)
            weight = fill_level * max(_SPEED_SMOOTHING, 1 / (self._measured_batches + 1))
            self._tokens_per_second += weight * (tokens_per_second - self._tokens_per_second)
            self._measured_batches += fill_level

    def _store_results(self, batch: list[_QueuedSequence], results: Sequence[Any]) -> None:
        """Store the results in the calls, and answer the calls that are complete."""
        # Another thread may be storing results of the same call.
        with self._condition:
            for sequence, result in zip(batch, results, strict=True):
                call = sequence.call
                call.results[sequence.index] = result
                call.num_sequences_left -= 1
                call.num_tokens_left -= sequence.num_tokens
                if call.num_sequences_left or call.future.done():
                    continue
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(call.results)

    def _drop_ended_calls(self, batch: list[_QueuedSequence]) -> list[_QueuedSequence]:
        """Fail calls whose deadline has passed; return the sequences of the remaining calls."""
        for sequence in batch:
            if self._clock() > sequence.call.expires_at:
                self._fail_call(sequence.call, create_deadline_error())
        return [sequence for sequence in batch if not sequence.call.future.done()]

    def _fail_call(self, call: _Call, error: Exception) -> None:
        """Set an error as the result of a call, unless the call has already ended."""
        with self._condition:
            if not call.future.done() and call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
