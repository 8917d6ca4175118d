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

#: Returns the result of each payload of a batch, in order.
BatchFunction = Callable[[list[Any]], Sequence[Any]]
#: Assumed tokens per second before the first measurement.
_INITIAL_TOKENS_PER_SECOND = 4000.0
#: Smoothing factor of the rate's exponential moving average, for a full batch.
_RATE_SMOOTHING = 0.2
#: Full batches needed before calls are rejected by the measured rate: the first batch of a server
#: is slower than later ones.
_MIN_MEASURED_BATCHES = 2.0
#: Share of its remaining time that a call of several batches may need at the measured rate. The
#: rest is reserved for short calls, which overtake the last sequences of such a call.
_LARGE_CALL_SHARE = 0.8


@dataclass(eq=False)
class _Call:
    """One call of ``submit``.

    Attributes:
        compute: computes a batch.
        expires_at: deadline, in seconds of the monotonic clock.
        results: result of each unit, None until it is computed.
        units_left: units that are not computed yet.
        tokens: tokens of all units.
        tokens_left: tokens of the units that are not computed yet.
        tokens_queued: tokens of the units in the queue.
        future: resolves to ``results``.
    """

    compute: BatchFunction
    expires_at: float
    results: list[Any]
    units_left: int
    tokens: int
    tokens_left: int
    tokens_queued: int
    future: Future[list[Any]] = field(default_factory=Future)


@dataclass(order=True)
class _Unit:
    """One queued sequence, ordered by scheduled time.

    Attributes:
        scheduled_at: seconds of the monotonic clock.
        number: breaks ties in the order of arrival.
        tokens: length of the sequence.
        payload: argument for ``call.compute``.
        call: the call it belongs to.
        index: index in ``call.results``.
    """

    scheduled_at: float
    number: int
    tokens: int = field(compare=False)
    payload: Any = field(compare=False)
    call: _Call = field(compare=False)
    index: int = field(compare=False)


class Batcher:
    """Computes the units (sequences) of concurrent calls in batches, on one or more threads.

    Scheduling is fair: a unit's scheduled time is its call's arrival time plus the estimated time
    of the units before it in the same call. A call with one text can therefore overtake most of an
    earlier call with thousands of texts, but cannot delay the units scheduled before it.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        max_call_tokens: int,
        max_wait_seconds: float,
        num_threads: int = 1,
        on_batch: Callable[[int, int, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            max_batch_tokens: maximum tokens per batch, counting each unit at the longest one's length;
                a longer unit gets a batch of its own.
            max_queue_tokens: maximum tokens in the queue.
            max_call_tokens: maximum tokens per call.
            max_wait_seconds: seconds to wait for a batch to fill.
            num_threads: number of batches computed concurrently; they share the CPU cores.
            on_batch: called with the units, tokens and seconds of each computed batch.
            clock: returns the time in seconds; deadlines use the same clock.
        """
        self._clock = clock
        self._max_batch_tokens, self._max_queue_tokens = max_batch_tokens, max_queue_tokens
        self._max_call_tokens, self._max_wait_seconds, self._on_batch = (
            max_call_tokens,
            max_wait_seconds,
            on_batch,
        )
        self._queues: dict[Hashable, list[_Unit]] = {}
        self._unit_numbers = itertools.count()
        self._condition = threading.Condition()
        self._is_open = True
        #: Moving average of tokens per second, over all threads.
        self._tokens_per_second = _INITIAL_TOKENS_PER_SECOND
        #: Number of full batches measured so far; smaller batches count as fractions.
        self._measured_batches = 0.0
        #: Tokens in the queue, and tokens of the batches being computed.
        self.queued_tokens, self._running_tokens = 0, 0
        #: Unanswered calls, oldest first.
        self._calls: dict[_Call, None] = {}
        self._num_cores, self._running_batches = torch.get_num_threads(), 0
        self._threads = [
            threading.Thread(target=self._run_thread, name=f"model-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether calls are accepted and all threads run."""
        return self._is_open and all(thread.is_alive() for thread in self._threads)

    def submit(
        self,
        key: Hashable,
        compute: BatchFunction,
        units: Sequence[tuple[int, Any]],
        deadline: Deadline,
    ) -> Future[list[Any]]:
        """Queue a call and return the future of its results.

        Args:
            key: units of different calls share a batch only if their keys are equal.
            compute: computes a batch of payloads; equivalent for all calls with the same key.
            units: (number of tokens, payload) of each sequence.
            deadline: the call's deadline. The future raises DeadlineExceededError after it.

        Raises:
            RequestTooLargeError: the call has too many tokens.
            BusyError: the queue is full, or the call would not be answered in time.
            ShuttingDownError: the batcher is closed.
        """
        total = sum(tokens for tokens, _ in units)
        if total > self._max_call_tokens:
            raise RequestTooLargeError(
                f"the limit is {self._max_call_tokens:,} tokens per request, got {total:,}; split the "
                "request"
            )
        call = _Call(
            compute, deadline.expires_at, [None] * len(units), len(units), total, total, total
        )
        deadline.cancel_on_disconnect(call.future)
        if not units:
            call.future.set_result([])
            return call.future
        with self._condition:
            if not self._is_open:
                raise ShuttingDownError("the server is shutting down; use another server")
            self._reject_if_overloaded(total, deadline.expires_at - self._clock())
            scheduled_at = self._clock()
            queue = self._queues.setdefault(key, [])
            # Longest first: units of similar length share batches, which limits padding.
            for index in sorted(range(len(units)), key=lambda index: -units[index][0]):
                tokens, payload = units[index]
                number = next(self._unit_numbers)
                heapq.heappush(queue, _Unit(scheduled_at, number, tokens, payload, call, index))
                scheduled_at += tokens / self._tokens_per_second
            self.queued_tokens += total
            self._calls[call] = None
            # Runs immediately if the client has disconnected in the meantime.
            call.future.add_done_callback(lambda _: self._remove_call(call))
            self._condition.notify()
        return call.future

    def submit_and_wait(
        self,
        key: Hashable,
        compute: BatchFunction,
        units: Sequence[tuple[int, Any]],
        deadline: Deadline,
    ) -> list[Any]:
        """Submit a call and wait for its results.

        Raises:
            DeadlineExceededError: there are no results at the deadline.
            DisconnectedError: the client disconnected.
            BertsmithError: as for ``submit``.
        """
        return wait_for_result(self.submit(key, compute, units, deadline), deadline)

    def close(self, timeout: float) -> None:
        """Reject new calls, finish queued ones, and join the threads for ``timeout`` seconds."""
        with self._condition:
            self._is_open = False
            self._condition.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _reject_if_overloaded(self, total: int, seconds_left: float) -> None:
        """Raise BusyError if a call of ``total`` tokens does not fit or would be late."""
        pending = self.queued_tokens + self._running_tokens
        if self.queued_tokens and self.queued_tokens + total > self._max_queue_tokens:
            seconds = self.queued_tokens / self._tokens_per_second
            raise BusyError(
                f"the queue is full: {self.queued_tokens:,} tokens are waiting; retry in "
                f"{seconds:.0f} seconds",
                seconds,
            )
        if not pending or self._measured_batches < _MIN_MEASURED_BATCHES:
            # A call without competition is always accepted: the estimated rate may be wrong.
            return
        if total > self._max_batch_tokens:
            seconds_left *= _LARGE_CALL_SHARE
        needed = (pending + total) / self._tokens_per_second
        if needed > seconds_left:
            raise self._create_busy_error(
                min(needed - seconds_left, pending / self._tokens_per_second)
            )

    def _create_busy_error(self, seconds: float) -> BusyError:
        pending = self.queued_tokens + self._running_tokens
        return BusyError(
            f"the server is busy: {pending:,} tokens are waiting or being computed, at "
            f"{self._tokens_per_second:,.0f} tokens per second; retry in {max(seconds, 1.0):.0f} seconds",
            seconds,
        )

    def _shed_load(self) -> None:
        """Reject large calls that will be late at the current rate, newest first.

        They were accepted when the rate was unknown or higher. Computing them would make other
        calls late as well.
        """
        now, pending = self._clock(), self.queued_tokens + self._running_tokens
        oldest = next(iter(self._calls), None)
        if (
            oldest is None
            or self._measured_batches < _MIN_MEASURED_BATCHES
            or now + pending / self._tokens_per_second <= oldest.expires_at
        ):
            return
        tokens_ahead = 0
        for call in list(self._calls):
            is_late = (
                now + (tokens_ahead + call.tokens_left) / self._tokens_per_second > call.expires_at
            )
            is_large = call.tokens > self._max_batch_tokens
            if tokens_ahead and is_large and is_late and call.tokens_queued:
                self._fail_call(
                    call, self._create_busy_error(tokens_ahead / self._tokens_per_second)
                )
            else:
                tokens_ahead += call.tokens_left

    def _remove_call(self, call: _Call) -> None:
        """Remove a call whose future is done: answered, failed or cancelled."""
        with self._condition:
            self.queued_tokens -= call.tokens_queued
            call.tokens_queued = 0
            self._calls.pop(call, None)

    def _run_thread(self) -> None:
        """Compute batches until the batcher is closed and the queue is empty."""
        with torch.inference_mode():
            while (batch := self._wait_for_batch()) is not None:
                tokens = sum(unit.tokens for unit in batch)
                try:
                    # Concurrent batches share the cores; a lone batch uses all of them.
                    set_local_num_threads(max(self._num_cores // self._running_batches, 1))
                    if live := [unit for unit in batch if self._is_pending(unit)]:
                        self._compute_batch(live)
                finally:
                    with self._condition:
                        self._running_batches -= 1
                        self._running_tokens -= tokens

    def _wait_for_batch(self) -> list[_Unit] | None:
        """Wait for a batch; return None once the batcher is closed and the queue is empty."""
        with self._condition:
            while True:
                while not self._queues:
                    self._condition.wait_for(lambda: self._queues or not self._is_open)
                    if not self._queues:
                        return None
                    # The outer loop checks again: another thread may empty the queue meanwhile.
                    self._condition.wait_for(
                        lambda: self.queued_tokens >= self._max_batch_tokens or not self._is_open,
                        self._max_wait_seconds,
                    )
                if batch := self._pop_batch():
                    return batch

    def _pop_batch(self) -> list[_Unit]:
        """Pop the units with the earliest scheduled times; empty if all their calls are done."""
        key = min(self._queues, key=lambda key: self._queues[key][0])
        queue, tokens, max_seqlen = self._queues[key], 0, 1
        batch: list[_Unit] = []
        while queue:
            unit = queue[0]
            if not unit.call.future.done():
                max_seqlen = max(max_seqlen, unit.tokens)
                if len(batch) >= max_batch_size(max_seqlen, self._max_batch_tokens):
                    break
                batch.append(unit)
                tokens += unit.tokens
                unit.call.tokens_queued -= unit.tokens
            heapq.heappop(queue)
        if not queue:
            del self._queues[key]
        if batch:
            self.queued_tokens -= tokens
            self._running_tokens += tokens
            self._running_batches += 1
        if self._queues:
            self._condition.notify()
        return batch

    def _compute_batch(self, batch: list[_Unit]) -> None:
        """Compute a batch and store its results. If it fails, retry unit by unit."""
        # Calls with the same key have equivalent functions, so any of them will do.
        compute, started_at = batch[0].call.compute, self._clock()
        concurrent_at_start = self._running_batches
        try:
            results: Sequence[Any] = compute([unit.payload for unit in batch])
        except Exception as error:  # noqa: BLE001 - forwarded to the caller's future
            if len(batch) > 1:
                # Only the calls of the failing units get the error.
                for unit in batch:
                    self._compute_batch([unit])
                return
            self._fail_call(batch[0].call, error)
            return
        seconds = self._clock() - started_at
        tokens = sum(unit.tokens for unit in batch)
        with self._condition:
            # Scaled to all threads by the mean number of concurrent batches.
            concurrency = (concurrent_at_start + self._running_batches) / 2
            rate = tokens / max(seconds, 1e-6) * concurrency
            # Small batches are slower per token, but a long queue produces full batches: weight
            # the measurement by how full the batch is.
            max_seqlen = max(unit.tokens for unit in batch)
            fill = min(len(batch) * max_seqlen / self._max_batch_tokens, 1.0)
            weight = fill * max(_RATE_SMOOTHING, 1 / (self._measured_batches + 1))
            self._tokens_per_second += weight * (rate - self._tokens_per_second)
            self._measured_batches += fill
        self._store_results(batch, results)
        with self._condition:
            self._shed_load()
        if self._on_batch is not None:
            self._on_batch(len(batch), tokens, seconds)

    def _store_results(self, batch: list[_Unit], results: Sequence[Any]) -> None:
        # Under the lock: another thread may be storing results of the same call.
        with self._condition:
            for unit, result in zip(batch, results, strict=True):
                call = unit.call
                call.results[unit.index] = result
                call.units_left -= 1
                call.tokens_left -= unit.tokens
                if call.units_left or call.future.done():
                    continue
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(call.results)

    def _is_pending(self, unit: _Unit) -> bool:
        """Return whether a unit's call is pending; fail the call if it is past its deadline."""
        if unit.call.future.done():
            return False
        if self._clock() > unit.call.expires_at:
            self._fail_call(unit.call, create_deadline_error())
            return False
        return True

    def _fail_call(self, call: _Call, error: Exception) -> None:
        with self._condition:
            if not call.future.done() and call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
