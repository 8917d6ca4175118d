"""Waits until clients have read their answers; ends connections of those that do not.

A server hands an answer to the operating system piece by piece, as the client reads. Until then
the answer stays in the server's memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from bertsmith.serve.settings import ServeSettings

#: Bytes that a client must read within ``send_seconds``.
MIN_PROGRESS: Final = 2**20
#: Seconds between two looks at what a client has read.
_INTERVAL: Final = 1.0


class Connection(Protocol):
    """What the server's protocol tells of a connection."""

    def num_unsent(self) -> int:
        """Return the bytes that the operating system has not taken yet."""

    def is_sending(self) -> bool:
        """Return whether more bytes are unsent than a connection may buffer."""

    async def drain(self) -> None:
        """Wait until few bytes are unsent, or the connection has ended."""

    def abort(self) -> None:
        """End the connection and drop what is unsent."""


@dataclass(eq=False)
class _Answer:
    """An answer that is not sent. Times are those of the clock."""

    connection: Connection
    #: At the last look.
    num_unsent: int
    #: When the client last read anything.
    read_at: float
    #: When ``MIN_PROGRESS`` bytes were last read, and how many were unsent then.
    progress_at: float
    progress_unsent: int


class Sender:
    """Watches the answers of all requests of a server; used on its event loop only."""

    def __init__(
        self, settings: ServeSettings, clock: Callable[[], float] | None = None,
        interval: float = _INTERVAL,
    ) -> None:  # fmt: skip
        self._settings, self._clock, self._interval = settings, clock, interval
        self._answers: dict[_Answer, None] = {}
        self._checked_at = float("-inf")

    async def drain(self, connection: Connection) -> bool:
        """Wait until an answer is sent; return False if its connection had to be ended."""
        if not connection.is_sending():
            return True
        now, size = self._now(), connection.num_unsent()
        answer = _Answer(connection, size, now, now, size)
        self._answers[answer] = None
        try:
            while connection.is_sending():
                try:
                    async with asyncio.timeout(self._interval):
                        await connection.drain()
                except TimeoutError:
                    self.check()
                if answer not in self._answers:
                    return False
        finally:
            self._answers.pop(answer, None)
        return True

    def check(self) -> None:
        """End the connections that are too slow, and those that stand still if memory is short."""
        now = self._now()
        if now - self._checked_at < self._interval / 2:
            # Each answer that is not sent asks for it; one look for all is enough.
            return
        self._checked_at = now
        for answer in list(self._answers):
            self._update(answer, now)
            if now - answer.progress_at > self._settings.send_seconds:
                self._abort(answer)
        by_age = sorted(self._answers, key=lambda answer: answer.read_at)
        unsent = sum(answer.num_unsent for answer in by_age)
        for answer in by_age:
            if unsent <= self._settings.unsent_bytes or now - answer.read_at < self._interval:
                break
            unsent -= answer.num_unsent
            self._abort(answer)

    def _update(self, answer: _Answer, now: float) -> None:
        num_unsent = answer.connection.num_unsent()
        if num_unsent < answer.num_unsent:
            answer.read_at = now
        answer.num_unsent = num_unsent
        if answer.progress_unsent - num_unsent >= MIN_PROGRESS:
            answer.progress_at, answer.progress_unsent = now, num_unsent

    def _abort(self, answer: _Answer) -> None:
        del self._answers[answer]
        answer.connection.abort()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()
