"""Wait until clients have read their responses; disconnect clients that do not read.

A response stays in the server's memory until the operating system has accepted all of it, which
happens as the client reads. Large responses are serialized in chunks as the client reads them.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from bertsmith.serve.response_memory import ResponseMemory
from bertsmith.serve.settings import ServeSettings

#: Key of the ``Connection`` in the extensions of an ASGI scope.
CONNECTION_KEY: Final = "bertsmith.connection"
#: Bytes of a response that a client must read within ``send_timeout_seconds``.
MIN_PROGRESS_BYTES: Final = 2**20
#: Time between two checks of how much the clients have read.
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

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""

    def call_on_disconnect(self, function: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function if the client disconnects within the block, or has disconnected."""


@dataclass(eq=False)
class _Response:
    """A response that is not completely sent.

    Attributes:
        connection: the client's connection.
        num_unsent_bytes: unsent bytes at the last check.
        last_read_at: last time at which the client had read any bytes, in seconds.
        progress_at: last time at which the client had read another ``MIN_PROGRESS_BYTES``, in
            seconds.
        unsent_at_progress: unsent bytes at ``progress_at``.
    """

    connection: Connection
    num_unsent_bytes: int
    last_read_at: float
    progress_at: float
    unsent_at_progress: int


class ResponseMonitor:
    """Waits for clients to read their responses and disconnects slow ones; not thread-safe."""

    def __init__(
        self,
        settings: ServeSettings,
        response_memory: ResponseMemory,
        clock: Callable[[], float] = time.monotonic,
        check_interval_seconds: float = _CHECK_INTERVAL_SECONDS,
    ) -> None:
        self._settings = settings
        self._response_memory = response_memory
        self._clock = clock
        self._check_interval_seconds = check_interval_seconds
        self._responses: dict[_Response, None] = {}
        self._checked_at = float("-inf")

    async def drain(self, connection: Connection) -> bool:
        """Wait until the client has read most of its response.

        Returns:
            Whether the client read it; False if the connection was aborted.
        """
        if not connection.is_write_buffer_full():
            return True
        now = self._clock()
        num_unsent_bytes = connection.count_unsent_bytes()
        response = _Response(
            connection,
            num_unsent_bytes,
            last_read_at=now,
            progress_at=now,
            unsent_at_progress=num_unsent_bytes,
        )
        self._responses[response] = None
        try:
            while connection.is_write_buffer_full():
                try:
                    async with asyncio.timeout(self._check_interval_seconds):
                        await connection.drain()
                except TimeoutError:
                    self.abort_slow_connections()
                if response not in self._responses:
                    return False
        finally:
            self._responses.pop(response, None)
        return True

    def abort_slow_connections(self) -> None:
        """Abort the connections of clients that read too slowly.

        If the unsent bytes of all responses exceed the limit, also abort the connections of clients
        that have stopped reading, until the limit is met. The client that stopped first is aborted
        first. If a request waits for memory, one such client is aborted at each check.
        """
        now = self._clock()
        if now - self._checked_at < self._check_interval_seconds / 2:
            # Every pending response calls this method; one check per interval is enough.
            return
        self._checked_at = now
        for response in list(self._responses):
            self._record_progress(response, now)
            if now - response.progress_at > self._settings.send_timeout_seconds:
                self._abort(response)
        by_last_read = sorted(self._responses, key=lambda response: response.last_read_at)
        num_unsent_bytes = sum(response.num_unsent_bytes for response in by_last_read)
        needs_memory = self._response_memory.is_full
        for response in by_last_read:
            is_over_limit = num_unsent_bytes > self._settings.max_unsent_bytes
            if now - response.last_read_at < self._check_interval_seconds or not (
                is_over_limit or needs_memory
            ):
                break
            num_unsent_bytes -= response.num_unsent_bytes
            needs_memory = False
            self._abort(response)

    def _record_progress(self, response: _Response, now: float) -> None:
        """Update how much of a response the client has read."""
        num_unsent_bytes = response.connection.count_unsent_bytes()
        if num_unsent_bytes < response.num_unsent_bytes:
            response.last_read_at = now
        response.num_unsent_bytes = num_unsent_bytes
        if response.unsent_at_progress - num_unsent_bytes >= MIN_PROGRESS_BYTES:
            response.progress_at = now
            response.unsent_at_progress = num_unsent_bytes

    def _abort(self, response: _Response) -> None:
        """Abort the connection of a response and stop waiting for the client."""
        del self._responses[response]
        response.connection.abort()
