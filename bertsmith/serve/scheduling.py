"""Decides which calls are accepted, and which batch is computed next; has no threads.

Calls that cannot be answered by their deadline are rejected on arrival (admission control).
Otherwise an overloaded server would spend its time on calls that all expire.
"""

import math
import time
from collections.abc import Callable

from bertsmith.errors import BertsmithError
from bertsmith.serve.deadline import BusyError, create_deadline_error
from bertsmith.serve.fair_queue import (
    NUM_SIZE_CLASSES,
    Call,
    FairQueue,
    QueuedSequence,
    TokenDemand,
)

#: Assumed speed of the model before the first measurement.
_INITIAL_TOKENS_PER_SECOND = 4000.0
#: Weight of a full batch in the exponential moving average of tokens per second.
_SPEED_SMOOTHING = 0.2
#: Number of full batches to measure before calls are rejected because of the measured speed. The
#: first batch of a server is slower than later ones.
_MIN_MEASURED_BATCHES = 2.0
#: A call is accepted if it needs at most this share of the time until its deadline, because the
#: speed varies.
_TIME_SHARE = 0.95
#: A call of several batches may use a smaller share of its time, and this share of the queue. The
#: remainder is reserved for short calls that overtake it.
_LARGE_CALL_SHARE = 0.9
#: Maximum share of the model that other size classes are expected to use.
_MAX_OTHER_SHARE = 0.9
#: Time after which the recently computed tokens of a size class have lost 63 % of their weight.
_RECENT_SECONDS = 10.0


class _RecentTokens:
    """Computed tokens of each size class, with exponentially decreasing weights."""

    def __init__(self) -> None:
        self._counts = [0.0] * NUM_SIZE_CLASSES
        self._counted_at = 0.0

    def add(self, size_class: int, num_tokens: int, now: float) -> None:
        """Add the tokens of a batch."""
        weight = math.exp((self._counted_at - now) / _RECENT_SECONDS)
        self._counts = [count * weight for count in self._counts]
        self._counts[size_class] += num_tokens
        self._counted_at = now

    def get_shares(self, now: float, tokens_per_second: float) -> list[float]:
        """Return the share of the model's speed that each size class has used recently."""
        weight = math.exp((self._counted_at - now) / _RECENT_SECONDS)
        return [weight * count / (tokens_per_second * _RECENT_SECONDS) for count in self._counts]


class CallScheduler:
    """The queue of a batcher with admission control; not thread-safe.

    Attributes:
        num_running_batches: number of batches being computed.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty queue.

        Args:
            max_batch_tokens: maximum tokens per batch. A longer sequence is computed alone.
            max_queue_tokens: maximum tokens in the queue.
            clock: returns the time in seconds; deadlines use the same clock.
        """
        self._clock = clock
        self._max_batch_tokens = max_batch_tokens
        self._max_queue_tokens = max_queue_tokens
        self._queue = FairQueue(max_batch_tokens)
        self._recent_tokens = _RecentTokens()
        #: Moving average of the speed of all threads together.
        self._tokens_per_second = _INITIAL_TOKENS_PER_SECOND
        #: Number of full batches measured so far; smaller batches count as fractions.
        self._measured_batches = 0.0
        #: Tokens of the batches being computed.
        self._running_tokens = 0
        self.num_running_batches = 0
        #: Requests that are being received and tokenized.
        self._reserved: dict[TokenDemand, None] = {}

    @property
    def queued_tokens(self) -> int:
        """Tokens in the queue."""
        return self._queue.num_tokens

    def has_calls(self) -> bool:
        """Return whether there are queued calls."""
        return bool(self._queue)

    def add(self, call: Call) -> None:
        """Queue a call. An overloaded server fails calls of heavier clients to make room for it.

        Raises:
            BusyError: the queue is full, or the call would not be answered in time.
        """
        replaced: list[Call] = []
        num_freed_tokens = 0
        candidates = self._queue.iter_evictable(call)
        while (error := self._find_overload(call, num_freed_tokens)) is not None:
            candidate = next(candidates, None)
            if candidate is None:
                raise error
            replaced.append(candidate)
            num_freed_tokens += candidate.num_tokens
        for candidate in replaced:
            retry_seconds = self.queued_tokens / self._tokens_per_second
            self._fail(candidate, self._create_busy_error(retry_seconds))
        call.was_idle = not (self.queued_tokens or self._running_tokens)
        self._queue.push(call)

    def reserve(self, demand: TokenDemand) -> None:
        """Reserve room for a request, until ``release``.

        Raises:
            BusyError: a call with the estimated tokens would be rejected.
        """
        num_reserved_tokens = sum(other.num_tokens for other in self._reserved)
        if self._find_overload(demand, -num_reserved_tokens) is not None:
            num_freed_tokens = -self._count_reserved_tokens(demand)
            candidates = self._queue.iter_evictable(demand)
            while (error := self._find_overload(demand, num_freed_tokens)) is not None:
                candidate = next(candidates, None)
                if candidate is None:
                    raise error
                num_freed_tokens += candidate.num_tokens
        self._reserved[demand] = None

    def release(self, demand: TokenDemand) -> None:
        """End a reservation; nothing happens if it has already ended."""
        self._reserved.pop(demand, None)

    def remove(self, call: Call) -> None:
        """Remove the remaining sequences of a call that was failed or cancelled."""
        self._queue.remove(call)

    def start_batch(self) -> list[QueuedSequence]:
        """Remove the next batch from the queue; empty if all of its calls have ended.

        Calls whose deadline has passed are failed.
        """
        batch = self._queue.pop_batch(self._can_run)
        if batch:
            num_tokens = _count_tokens(batch)
            self._recent_tokens.add(batch[0].call.size_class, num_tokens, self._clock())
            self._running_tokens += num_tokens
            self.num_running_batches += 1
        return batch

    def end_batch(self, batch: list[QueuedSequence]) -> None:
        """Stop counting a batch as running."""
        self._running_tokens -= _count_tokens(batch)
        self.num_running_batches -= 1

    def measure_speed(
        self, batch: list[QueuedSequence], seconds: float, concurrency_at_start: int
    ) -> None:
        """Update the moving average of tokens per second with a computed batch.

        Args:
            batch: the sequences of the batch.
            seconds: duration of the computation.
            concurrency_at_start: number of batches that were being computed at its start, including
                this one.
        """
        lengths = [sequence.num_tokens for sequence in batch]
        # Multiply the speed of this thread by the mean number of concurrent batches.
        concurrency = (concurrency_at_start + self.num_running_batches) / 2
        tokens_per_second = sum(lengths) / max(seconds, 1e-6) * concurrency
        # Small batches are slower per token, but a long queue produces full batches. The
        # measurement is therefore weighted by how full the batch is.
        fill_level = min(sum(lengths) / self._max_batch_tokens, 1.0)
        weight = fill_level * max(_SPEED_SMOOTHING, 1 / (self._measured_batches + 1))
        self._tokens_per_second += weight * (tokens_per_second - self._tokens_per_second)
        self._measured_batches += fill_level

    def _count_reserved_tokens(self, demand: TokenDemand) -> int:
        """Return the reserved tokens of the size class that are computed before a new request.

        Reservations of clients that send more are ignored, because the new request may replace
        their calls.
        """
        size_class = self._queue.get_size_class(demand.num_tokens)
        reserved = [
            other
            for other in self._reserved
            if self._queue.get_size_class(other.num_tokens) == size_class
        ]
        num_tokens = self._queue.count_client_tokens(size_class)
        for other in reserved:
            num_tokens[other.client] += other.num_tokens
        limit = num_tokens[demand.client] + demand.num_tokens
        return sum(other.num_tokens for other in reserved if num_tokens[other.client] <= limit)

    def _find_overload(self, call: Call | TokenDemand, num_freed_tokens: int) -> BusyError | None:
        """Return the error of a call for which there is no room or no time; None to accept it.

        Args:
            call: the call, which is not queued yet.
            num_freed_tokens: queued tokens that make room for the call. Reserved tokens, which need
                room, count as negative.
        """
        size_class = self._queue.get_size_class(call.num_tokens)
        # Calls that need one batch are in class 0.
        is_large = size_class > 0
        max_queue_tokens = self._max_queue_tokens * (_LARGE_CALL_SHARE if is_large else 1.0)
        num_queued_tokens = self.queued_tokens - num_freed_tokens
        if num_queued_tokens and num_queued_tokens + call.num_tokens > max_queue_tokens:
            retry_seconds = self.queued_tokens / self._tokens_per_second
            return BusyError(
                f"the queue is full: {self.queued_tokens:,} tokens are waiting; retry in "
                f"{max(retry_seconds, 1.0):.0f} seconds",
                retry_seconds,
            )
        num_pending_tokens = num_queued_tokens + self._running_tokens
        if not num_pending_tokens or self._measured_batches < _MIN_MEASURED_BATCHES:
            # An idle server accepts every call, because the estimated speed may be wrong.
            return None
        time_share = _LARGE_CALL_SHARE if is_large else _TIME_SHARE
        seconds_left = time_share * (call.expires_at - self._clock())
        num_class_tokens = self._queue.count_class_tokens()[size_class] - num_freed_tokens
        num_tokens = num_class_tokens + call.num_tokens
        # Each other class receives at most as many tokens.
        max_tokens = self._running_tokens + NUM_SIZE_CLASSES * num_tokens
        if max_tokens <= seconds_left * self._tokens_per_second:
            return None
        needed_tokens = self._estimate_tokens(size_class, num_tokens)
        needed_seconds = needed_tokens / self._tokens_per_second
        if needed_seconds <= seconds_left:
            return None
        pending_seconds = num_pending_tokens / self._tokens_per_second
        return self._create_busy_error(min(needed_seconds - seconds_left, pending_seconds))

    def _estimate_tokens(self, size_class: int, num_tokens: int) -> float:
        """Return the tokens of all classes that are computed until a class has received some.

        Other classes receive at most as many tokens as this class. They need their queued tokens,
        or the share of the model that they have used recently.

        Args:
            size_class: index of the class.
            num_tokens: tokens that the class receives.
        """
        shares = self._recent_tokens.get_shares(self._clock(), self._tokens_per_second)
        other_share = min(sum(shares) - shares[size_class], _MAX_OTHER_SHARE)
        estimate = float(self._running_tokens + num_tokens)
        for other, num_queued in enumerate(self._queue.count_class_tokens()):
            if other != size_class:
                num_expected = num_tokens * shares[other] / (1 - other_share)
                estimate += min(num_tokens, max(num_queued, num_expected))
        return estimate

    def _can_run(self, call: Call) -> bool:
        """Return whether a queued call can still be answered in time; fail it otherwise.

        A call with started sequences runs until its deadline, because a part of it is computed.
        """
        if call.future.done():
            self._queue.remove(call)
            return False
        seconds_left = call.expires_at - self._clock()
        if seconds_left < 0:
            self._fail(call, create_deadline_error())
            return False
        if call.num_started or call.was_idle or self._measured_batches < _MIN_MEASURED_BATCHES:
            return True
        # A short call shares a batch with the next calls of its class.
        num_class_tokens = self._queue.count_class_tokens()[call.size_class]
        num_tokens = max(call.num_tokens, min(num_class_tokens, self._max_batch_tokens))
        needed_seconds = (
            self._estimate_tokens(call.size_class, num_tokens) / self._tokens_per_second
        )
        if needed_seconds <= seconds_left:
            return True
        self._fail(call, self._create_busy_error(self.queued_tokens / self._tokens_per_second))
        return False

    def _create_busy_error(self, retry_seconds: float) -> BusyError:
        """Return the error of a call that would be late."""
        num_pending_tokens = self.queued_tokens + self._running_tokens
        return BusyError(
            f"the server is busy: {num_pending_tokens:,} tokens are waiting or being computed, at "
            f"{self._tokens_per_second:,.0f} tokens per second; retry in "
            f"{max(retry_seconds, 1.0):.0f} seconds",
            retry_seconds,
        )

    def _fail(self, call: Call, error: BertsmithError) -> None:
        """Set an error as the result of a queued call, and remove the call from the queue."""
        self._queue.remove(call)
        call.fail(error)


def _count_tokens(batch: list[QueuedSequence]) -> int:
    return sum(sequence.num_tokens for sequence in batch)
