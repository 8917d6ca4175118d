"""Packs what many clients ask into batches for model threads: by tokens, fairly, within limits.

It never knows HTTP, nor what is computed.
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

from bertsmith.model.abreast import take
from bertsmith.serve.patience import (
    BusyError,
    LargeError,
    Patience,
    StoppingError,
    late,
    waited,
)

#: Answers the payloads of a batch, in their order.
Compute = Callable[[list[Any]], Sequence[Any]]
#: Tokens a second before any were computed.
_FIRST_RATE = 4000.0
#: What the newest batch counts in the rate.
_NEWEST = 0.2


@dataclass(eq=False)
class _Asked:
    """What one call asked for: its units' answers as they come, and the future of them all."""

    compute: Compute
    deadline: float
    answers: list[Any]
    left: int
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
        told: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """``wait``: seconds that a lone unit waits. ``told``: of units, tokens, seconds of each.

        ``at_once``: batches under way at most, each on its share of the CPU's threads.
        """
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._call_tokens, self._wait, self._told = call_tokens, wait, told
        self._queues: dict[Hashable, list[_Unit]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open = True
        self._rate = _FIRST_RATE
        #: Tokens that wait.
        self.waiting = 0
        self._cores, self._under_way = torch.get_num_threads(), 0
        self._threads = [
            threading.Thread(target=self._work, name=f"model-{number}", daemon=True)
            for number in range(at_once)
        ]
        for own in self._threads:
            own.start()

    @property
    def alive(self) -> bool:
        """Whether the model threads run and take work."""
        return self._open and all(own.is_alive() for own in self._threads)

    def submit(
        self,
        key: Hashable,
        compute: Compute,
        units: Sequence[tuple[int, Any]],
        patience: Patience,
    ) -> Future[list[Any]]:
        """Ask for the answers to units (tokens, payload); one key's are computed together.

        Raises LargeError, BusyError or StoppingError at once; the future may raise LateError.
        """
        total = sum(tokens for tokens, _ in units)
        if total > self._call_tokens:
            raise LargeError(
                f"the request has {total:,} tokens; this server takes {self._call_tokens:,} of one "
                "request: part it"
            )
        asked = _Asked(compute, patience.deadline, [None] * len(units), len(units))
        patience.waits_for(asked.future)
        if not units:
            asked.future.set_result([])
            return asked.future
        with self._changed:
            if not self._open:
                raise StoppingError("the server is being stopped; ask another one")
            if self.waiting and self.waiting + total > self._queue_tokens:
                seconds = self.waiting / self._rate
                raise BusyError(
                    f"{self.waiting:,} tokens are waiting already; ask again in {seconds:.0f} "
                    "seconds",
                    seconds,
                )
            due = time.monotonic()
            queue = self._queues.setdefault(key, [])
            for place, (tokens, payload) in enumerate(units):
                unit = _Unit(due, next(self._numbers), tokens, payload, asked, place)
                heapq.heappush(queue, unit)
                due += tokens / self._rate
            self.waiting += total
            self._changed.notify()
        return asked.future

    def run(
        self,
        key: Hashable,
        compute: Compute,
        units: Sequence[tuple[int, Any]],
        patience: Patience,
    ) -> list[Any]:
        """Ask and wait; raises what ``submit`` does, LateError, or GoneError."""
        return waited(self.submit(key, compute, units, patience), patience)

    def close(self, seconds: float) -> None:
        """Take nothing new, finish what waits, and end; after ``seconds`` in any case."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for own in self._threads:
            own.join(max(end - time.monotonic(), 0.0))

    def _work(self) -> None:
        with torch.inference_mode():
            while (batch := self._next()) is not None:
                try:
                    # A lone batch has all cores, where threads of one product wait for each other.
                    take(max(self._cores // self._under_way, 1))
                    if live := [unit for unit in batch if self._wanted(unit)]:
                        self._compute(live)
                finally:
                    with self._changed:
                        self._under_way -= 1

    def _next(self) -> list[_Unit] | None:
        """Wait for work and take a batch; None when there will be no more."""
        with self._changed:
            while not self._queues:
                self._changed.wait_for(lambda: self._queues or not self._open)
                if not self._queues:
                    return None
                # Another thread may take it meanwhile.
                self._changed.wait_for(
                    lambda: self.waiting >= self._batch_tokens or not self._open, self._wait
                )
            key = min(self._queues, key=lambda own: self._queues[own][0])
            queue, tokens = self._queues[key], 0
            batch: list[_Unit] = []
            while queue and (not batch or tokens + queue[0].tokens <= self._batch_tokens):
                batch.append(heapq.heappop(queue))
                tokens += batch[-1].tokens
            if not queue:
                del self._queues[key]
            self.waiting -= tokens
            self._under_way += 1
            if self._queues:
                self._changed.notify()
        return batch

    def _compute(self, batch: list[_Unit]) -> None:
        # One key may stand for calls with computations of their own; they are all alike.
        compute, began, beside = batch[0].asked.compute, time.monotonic(), self._under_way
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
        seconds = time.monotonic() - began
        tokens = sum(unit.tokens for unit in batch)
        with self._changed:
            # Of all threads together: as many as were computing, on average.
            rate = tokens / max(seconds, 1e-6) * (beside + self._under_way) / 2
            self._rate += _NEWEST * (rate - self._rate)
        self._answer(batch, answers)
        if self._told is not None:
            self._told(len(batch), tokens, seconds)

    def _answer(self, batch: list[_Unit], answers: Sequence[Any]) -> None:
        whole = []
        with self._changed:
            # Other units of the same call may be computed just now.
            for unit, answer in zip(batch, answers, strict=True):
                unit.asked.answers[unit.place] = answer
                unit.asked.left -= 1
                if not unit.asked.left:
                    whole.append(unit.asked)
        for asked in whole:
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_result(asked.answers)

    def _wanted(self, unit: _Unit) -> bool:
        """Tell whether somebody still waits for a unit."""
        if unit.asked.future.done():
            return False
        if time.monotonic() > unit.asked.deadline:
            self._fail(unit.asked, late())
            return False
        return True

    def _fail(self, asked: _Asked, error: Exception) -> None:
        with self._changed:
            if not asked.future.done() and asked.future.set_running_or_notify_cancel():
                asked.future.set_exception(error)
