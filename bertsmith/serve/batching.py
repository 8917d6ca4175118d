"""Packs what many clients ask into batches for one model thread: by tokens, fairly, within limits.

It never knows HTTP, nor what is computed.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from bertsmith.errors import BertsmithError

#: Answers the payloads of a batch, in their order.
Compute = Callable[[list[Any]], Sequence[Any]]
#: Tokens a second before any were computed.
_FIRST_RATE = 4000.0
#: What the newest batch counts in the rate.
_NEWEST = 0.2


class BusyError(BertsmithError):
    """The queue is full. ``seconds``: after which it is worth to ask again."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class LateError(BertsmithError):
    """There was no answer within the time of a request."""


class GoneError(BertsmithError):
    """The client went away before there was an answer."""


class StoppingError(BertsmithError):
    """The server is being stopped and takes nothing new."""


class LargeError(BertsmithError):
    """One request asks for more than it may."""


class Patience:
    """How long one request waits, and its end before that if the client goes away."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` from now on."""
        self.deadline = time.monotonic() + seconds
        self.gone = False
        self._waiting: Future[Any] | None = None

    def waits_for(self, future: Future[Any]) -> None:
        """Remember what is cancelled if the client goes away."""
        self._waiting = future
        if self.gone:
            future.cancel()

    def cancel(self) -> None:
        """Give up, from any thread."""
        self.gone = True
        if self._waiting is not None:
            self._waiting.cancel()


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
    """One thread that computes; any thread may ask.

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
        told: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """``wait``: seconds that a lone unit waits. ``told``: of units, tokens, seconds of each."""
        self._batch_tokens, self._queue_tokens = batch_tokens, queue_tokens
        self._call_tokens, self._wait, self._told = call_tokens, wait, told
        self._queues: dict[Hashable, list[_Unit]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open = True
        self._rate = _FIRST_RATE
        #: Tokens that wait.
        self.waiting = 0
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the model thread runs and takes work."""
        return self._open and self._thread.is_alive()

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
        self._thread.join(seconds)

    def _work(self) -> None:
        with torch.inference_mode():
            while (batch := self._next()) is not None:
                live = [unit for unit in batch if _wanted(unit)]
                if live:
                    self._compute(live)

    def _next(self) -> list[_Unit] | None:
        """Wait for work and take a batch; None when there will be no more."""
        with self._changed:
            idle = not self._queues
            while not self._queues and self._open:
                self._changed.wait()
            if not self._queues:
                return None
            if idle and self._open and self.waiting < self._batch_tokens:
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
        return batch

    def _compute(self, batch: list[_Unit]) -> None:
        # One key may stand for calls with computations of their own; they are all alike.
        compute, began = batch[0].asked.compute, time.monotonic()
        try:
            answers: Sequence[Any] = compute([unit.payload for unit in batch])
        except Exception as error:  # noqa: BLE001 - told to those who asked
            if len(batch) > 1:
                # Only the one that cannot be computed fails.
                for unit in batch:
                    self._compute([unit])
                return
            _fail(batch[0].asked, error)
            return
        seconds = time.monotonic() - began
        tokens = sum(unit.tokens for unit in batch)
        self._rate += _NEWEST * (tokens / max(seconds, 1e-6) - self._rate)
        for unit, answer in zip(batch, answers, strict=True):
            unit.asked.answers[unit.place] = answer
            unit.asked.left -= 1
            if not unit.asked.left and unit.asked.future.set_running_or_notify_cancel():
                unit.asked.future.set_result(unit.asked.answers)
        if self._told is not None:
            self._told(len(batch), tokens, seconds)


def waited(future: Future[list[Any]], patience: Patience) -> list[Any]:
    """Return the answers, within the time there is; raises LateError or GoneError."""
    try:
        return future.result(max(patience.deadline - time.monotonic(), 0.0))
    except TimeoutError:
        future.cancel()
        raise late() from None
    except CancelledError:
        raise GoneError("the client went away") from None


def late() -> LateError:
    """Return the error of a request whose time is over."""
    return LateError("there was no answer in time; ask for less at once, or later")


def _wanted(unit: _Unit) -> bool:
    """Tell whether somebody still waits for a unit."""
    future = unit.asked.future
    if future.done():
        return False
    if time.monotonic() > unit.asked.deadline:
        _fail(unit.asked, late())
        return False
    return True


def _fail(asked: _Asked, error: Exception) -> None:
    if not asked.future.done() and asked.future.set_running_or_notify_cancel():
        asked.future.set_exception(error)
