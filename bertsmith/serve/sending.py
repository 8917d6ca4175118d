"""Wait until clients have read their responses; disconnect clients that do not read.

A response stays in the server's memory until the operating system has accepted all of it, which
happens as the client reads.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from bertsmith.serve.settings import ServeSettings

#: Bytes that a client must read in every ``send_timeout_seconds``.
MIN_PROGRESS_BYTES: Final = 2**20
#: Seconds between two checks of a client's progress.
_CHECK_INTERVAL_SECONDS: Final = 1.0


class Connection(Protocol):
    """A client connection, as the server's protocol implements it."""

    def count_unsent_bytes(self) -> int:
        """Return the number of bytes that the operating system has not accepted yet."""

    def is_write_buffer_full(self) -> bool:
        """Return whether the unsent bytes exceed the write buffer's limit."""

    async def drain(self) -> None:
        """Wait until the unsent bytes are below the limit, or the connection is closed."""

    def abort(self) -> None:
        """Close the connection and drop unsent bytes."""


@dataclass(eq=False)
class _Response:
    """A response that is not completely sent.

    Attributes:
        connection: the client's connection.
        num_unsent_bytes: unsent bytes at the last check.
        read_at: time at which the client last read anything, in seconds.
        progress_at: time at which the client had last read ``MIN_PROGRESS_BYTES`` bytes, in seconds.
        progress_unsent: unsent bytes at that time.
    """

    connection: Connection
    num_unsent_bytes: int
    read_at: float
    progress_at: float
    progress_unsent: int


class ResponseMonitor:
    """Watches the responses to all requests of a server; not thread-safe."""

    def __init__(
        self, settings: ServeSettings, clock: Callable[[], float] | None = None,
        interval: float = _CHECK_INTERVAL_SECONDS,
    ) -> None:  # fmt: skip
        self._settings, self._clock, self._interval = settings, clock, interval
        self._responses: dict[_Response, None] = {}
        self._checked_at = float("-inf")

    async def drain(self, connection: Connection) -> bool:
        """Wait until a response is sent; return False if its connection was aborted."""
        if not connection.is_write_buffer_full():
            return True
        now, size = self._now(), connection.count_unsent_bytes()
        response = _Response(connection, size, now, now, size)
        self._responses[response] = None
        try:
            while connection.is_write_buffer_full():
                try:
                    async with asyncio.timeout(self._interval):
                        await connection.drain()
                except TimeoutError:
                    self.check()
                if response not in self._responses:
                    return False
        finally:
            self._responses.pop(response, None)
        return True

    def check(self) -> None:
        """Abort slow connections; and stalled ones, while unsent bytes exceed the limit."""
        now = self._now()
        if now - self._checked_at < self._interval / 2:
            # Every pending response calls this; one check per interval is enough.
            return
        self._checked_at = now
        for response in list(self._responses):
            self._update(response, now)
            if now - response.progress_at > self._settings.send_timeout_seconds:
                self._abort(response)
        by_last_read = sorted(self._responses, key=lambda response: response.read_at)
        unsent = sum(response.num_unsent_bytes for response in by_last_read)
        for response in by_last_read:
            if unsent <= self._settings.max_unsent_bytes or now - response.read_at < self._interval:
                break
            unsent -= response.num_unsent_bytes
            self._abort(response)

    def _update(self, response: _Response, now: float) -> None:
        num_unsent_bytes = response.connection.count_unsent_bytes()
        if num_unsent_bytes < response.num_unsent_bytes:
            response.read_at = now
        response.num_unsent_bytes = num_unsent_bytes
        if response.progress_unsent - num_unsent_bytes >= MIN_PROGRESS_BYTES:
            response.progress_at, response.progress_unsent = now, num_unsent_bytes

    def _abort(self, response: _Response) -> None:
        del self._responses[response]
        response.connection.abort()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()
