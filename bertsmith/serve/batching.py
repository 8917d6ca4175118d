"""Packs what many clients ask into batches for model threads: by tokens, fairly, within limits.

Calls that could not be answered by their deadline are refused when they come. Otherwise an
overloaded server would work on all of them a little, and answer none in time.
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

from bertsmith.runtime.thread_pool import set_local_num_threads
from bertsmith.serve.deadline import (
    BusyError,
    Deadline,
    RequestTooLargeError,
    ShuttingDownError,
    deadline_exceeded,
    wait_for_result,
)

#: Answers the payloads of a batch, in their order.
Compute = Callable[[list[Any]], Sequence[Any]]
#: Tokens a second before any were computed.
_FIRST_RATE = 4000.0
#: What the newest full batch counts in the rate.
_NEWEST = 0.2
#: Full batches after which the rate is measured well enough to refuse calls by it; the first one
#: takes longer than others.
_MIN_BATCHES = 2.0
#: Of its time, what a call of several batches may need by the measured rate. Short calls that come
#: later have their turns before its last ones.
_LARGE_CALL_SHARE = 0.8


@dataclass(eq=False)
class _Asked:
    """What one call asked for: its units' answers as they come, and the future of them all."""

    compute: Compute
    deadline: float
    answers: list[Any]
    left: int
    #: Of all units, of those that are not computed, and of those that wait.
    tokens: int
    tokens_left: int
    tokens_waiting: int
    future: Future[list[Any]] = field(default_factory=Future)


@dataclass(order=True)
class _Unit:
    """One sequence that waits. ``due``: when its turn is, in seconds of the monotonic clock."""

    due: float
    number: int
    tokens: int = field(compare=False)
    payload: Any = field(compare=False)
    asked: _Asked = field(compare=False)
    place: int = field(compare=False)


class Batcher:
    """A thread or more that compute; any thread may ask.

    Each unit has a turn: the time at which it came, later by as long as the units before it in the
    same call take. So a call of thousands of texts lets a call of one text in between, and still
    has its own turns, which nothing that comes later can take.
    """

    def __init__(
        self,
        *,
        batch_tokens: int,
        queue_tokens: int,
        call_tokens: int,
        wait: float,
        at_once: int = 1,
        on_batch: Callable[[int, int, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wait``: seconds that a lone unit waits. ``on_batch``: of units, tokens, seconds of each.

        ``at_once``: batches under way at most, each on its share of the CPU's threads. ``clock``:
        seconds, on which the deadlines of calls are.
        """
        self._clock = clock
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._call_tokens, self._wait, self._told = call_tokens, wait, on_batch
        self._queues: dict[Hashable, list[_Unit]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open = True
        self._rate = _FIRST_RATE
        #: Full batches, or parts of them, of which the rate is.
        self._measured = 0.0
        #: Tokens that wait, and tokens of batches under way.
        self.waiting, self._computing = 0, 0
        #: Calls that have no answer yet, the oldest first.
        self._calls: dict[_Asked, None] = {}
        self._cores, self._under_way = torch.get_num_threads(), 0
        self._threads = [
            threading.Thread(target=self._work, name=f"model-{number}", daemon=True)
            for number in range(at_once)
        ]
        for own in self._threads:
            own.start()

    @property
    def is_alive(self) -> bool:
        """Whether the model threads run and take work."""
        return self._open and all(own.is_alive() for own in self._threads)

    def submit(
        self,
        key: Hashable,
        compute: Compute,
        units: Sequence[tuple[int, Any]],
        patience: Deadline,
    ) -> Future[list[Any]]:
        """Ask for the answers to units (tokens, payload); one key's are computed together.

        Raises LargeError, BusyError or StoppingError at once; the future may raise LateError.
        """
        total = sum(tokens for tokens, _ in units)
        if total > self._call_tokens:
            raise RequestTooLargeError(
                f"the request has {total:,} tokens; this server takes {self._call_tokens:,} of one "
                "request: part it"
            )
        asked = _Asked(
            compute, patience.expires_at, [None] * len(units), len(units), total, total, total
        )
        patience.cancel_on_disconnect(asked.future)
        if not units:
            asked.future.set_result([])
            return asked.future
        with self._changed:
            if not self._open:
                raise ShuttingDownError("the server is being stopped; ask another one")
            self._refuse_late(total, patience.expires_at - self._clock())
            due = self._clock()
            queue = self._queues.setdefault(key, [])
            for place, (tokens, payload) in enumerate(units):
                unit = _Unit(due, next(self._numbers), tokens, payload, asked, place)
                heapq.heappush(queue, unit)
                due += tokens / self._rate
            self.waiting += total
            self._calls[asked] = None
            # At once if the client went away meanwhile.
            asked.future.add_done_callback(lambda _: self._release(asked))
            self._changed.notify()
        return asked.future

    def run(
        self,
        key: Hashable,
        compute: Compute,
        units: Sequence[tuple[int, Any]],
        patience: Deadline,
    ) -> list[Any]:
        """Ask and wait; raises what ``submit`` does, LateError, or GoneError."""
        return wait_for_result(self.submit(key, compute, units, patience), patience)

    def close(self, seconds: float) -> None:
        """Take nothing new, finish what waits, and end; after ``seconds`` in any case."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for own in self._threads:
            own.join(max(end - time.monotonic(), 0.0))

    def _refuse_late(self, total: int, seconds_left: float) -> None:
        """Raise BusyError for a call of ``total`` tokens that would not be answered in time."""
        ahead = self.waiting + self._computing
        if self.waiting and self.waiting + total > self._queue_tokens:
            seconds = self.waiting / self._rate
            raise BusyError(
                f"{self.waiting:,} tokens are waiting already; ask again in {seconds:.0f} seconds",
                seconds,
            )
        if not ahead or self._measured < _MIN_BATCHES:
            # A call that is alone gets its chance: the rate may be wrong.
            return
        if total > self._batch_tokens:
            seconds_left *= _LARGE_CALL_SHARE
        needed = (ahead + total) / self._rate
        if needed > seconds_left:
            raise self._busy(min(needed - seconds_left, ahead / self._rate))

    def _busy(self, seconds: float) -> BusyError:
        ahead = self.waiting + self._computing
        return BusyError(
            f"the server is busy: {ahead:,} tokens are waiting or being computed, at "
            f"{self._rate:,.0f} a second; ask again in {max(seconds, 1.0):.0f} seconds",
            seconds,
        )

    def _shed(self) -> None:
        """Refuse the newest large calls that by a newly measured rate cannot be answered in time.

        The rate was not known when they came, or is lower now. Their time would be lost for all.
        """
        now, ahead = self._clock(), self.waiting + self._computing
        oldest = next(iter(self._calls), None)
        if (
            oldest is None
            or self._measured < _MIN_BATCHES
            or now + ahead / self._rate <= oldest.deadline
        ):
            return
        ahead = 0
        for call in list(self._calls):
            is_late = now + (ahead + call.tokens_left) / self._rate > call.deadline
            is_large = call.tokens > self._batch_tokens
            if ahead and is_large and is_late and call.tokens_waiting:
                self._fail(call, self._busy(ahead / self._rate))
            else:
                ahead += call.tokens_left

    def _release(self, asked: _Asked) -> None:
        """Forget a call that has its answer, an error, or nobody who waits for it."""
        with self._changed:
            self.waiting -= asked.tokens_waiting
            asked.tokens_waiting = 0
            self._calls.pop(asked, None)

    def _work(self) -> None:
        with torch.inference_mode():
            while (batch := self._next()) is not None:
                tokens = sum(unit.tokens for unit in batch)
                try:
                    # A lone batch has all cores, where threads of one product wait for each other.
                    set_local_num_threads(max(self._cores // self._under_way, 1))
                    if live := [unit for unit in batch if self._wanted(unit)]:
                        self._compute(live)
                finally:
                    with self._changed:
                        self._under_way -= 1
                        self._computing -= tokens

    def _next(self) -> list[_Unit] | None:
        """Wait for work and take a batch; None when there will be no more."""
        with self._changed:
            while True:
                while not self._queues:
                    self._changed.wait_for(lambda: self._queues or not self._open)
                    if not self._queues:
                        return None
                    # Another thread may take it meanwhile.
                    self._changed.wait_for(
                        lambda: self.waiting >= self._batch_tokens or not self._open, self._wait
                    )
                if batch := self._take():
                    return batch

    def _take(self) -> list[_Unit]:
        """Take the batch whose turn it is; [] where nobody waits for its units any more."""
        key = min(self._queues, key=lambda own: self._queues[own][0])
        queue, tokens = self._queues[key], 0
        batch: list[_Unit] = []
        while queue and (not batch or tokens + queue[0].tokens <= self._batch_tokens):
            unit = heapq.heappop(queue)
            if unit.asked.future.done():
                continue
            batch.append(unit)
            tokens += unit.tokens
            unit.asked.tokens_waiting -= unit.tokens
        if not queue:
            del self._queues[key]
        if batch:
            self.waiting -= tokens
            self._computing += tokens
            self._under_way += 1
        if self._queues:
            self._changed.notify()
        return batch

    def _compute(self, batch: list[_Unit]) -> None:
        # One key may stand for calls with computations of their own; they are all alike.
        compute, began, beside = batch[0].asked.compute, self._clock(), self._under_way
        try:
            answers: Sequence[Any] = compute([unit.payload for unit in batch])
        except Exception as error:  # noqa: BLE001 - told to those who asked
            if len(batch) > 1:
                # Only the one that cannot be computed fails.
                for unit in batch:
                    self._compute([unit])
                return
            self._fail(batch[0].asked, error)
            return
        seconds = self._clock() - began
        tokens = sum(unit.tokens for unit in batch)
        with self._changed:
            # Of all threads together: as many as were computing, on average.
            rate = tokens / max(seconds, 1e-6) * (beside + self._under_way) / 2
            # Small batches take longer by the token; those of a long queue are full.
            fill = min(tokens / self._batch_tokens, 1.0)
            self._rate += fill * max(_NEWEST, 1 / (self._measured + 1)) * (rate - self._rate)
            self._measured += fill
        self._answer(batch, answers)
        with self._changed:
            self._shed()
        if self._told is not None:
            self._told(len(batch), tokens, seconds)

    def _answer(self, batch: list[_Unit], answers: Sequence[Any]) -> None:
        with self._changed:
            # Other units of the same call may be computed just now.
            for unit, answer in zip(batch, answers, strict=True):
                asked = unit.asked
                asked.answers[unit.place] = answer
                asked.left -= 1
                asked.tokens_left -= unit.tokens
                if asked.left or asked.future.done():
                    continue
                if asked.future.set_running_or_notify_cancel():
                    asked.future.set_result(asked.answers)

    def _wanted(self, unit: _Unit) -> bool:
        """Tell whether somebody still waits for a unit."""
        if unit.asked.future.done():
            return False
        if self._clock() > unit.asked.deadline:
            self._fail(unit.asked, deadline_exceeded())
            return False
        return True

    def _fail(self, asked: _Asked, error: Exception) -> None:
        with self._changed:
            if not asked.future.done() and asked.future.set_running_or_notify_cancel():
                asked.future.set_exception(error)
