"""Receive request bodies within limits of size, time, number and memory.

Slow clients must not block others (Slowloris attack): with too many unfinished bodies, the oldest
one is rejected. The body of a healthy client arrives within milliseconds.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Receive

from bertsmith.serve.settings import ServeSettings

#: Maximum size of a discarded body, in multiples of the maximum size of a body.
_MAX_DISCARDED_BODIES: Final = 16


class BodyError(Exception):
    """A body was not received.

    Attributes:
        status: HTTP status of the response.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class IncomingBody:
    """A request body that is being received.

    Attributes:
        num_bytes: received bytes, which count against the server's memory limit until ``release``.
        chunks: received parts of the body.
        timeout: time limit while the body is received.
        is_complete: whether the last part was received.
        is_dropped: whether the body was rejected to make room for others.
    """

    num_bytes: int = 0
    chunks: list[bytes] = field(default_factory=list)
    timeout: asyncio.Timeout | None = None
    is_complete: bool = False
    is_dropped: bool = False


class BodyReceiver:
    """Receives the bodies of all requests of a server; not thread-safe.

    Attributes:
        num_bytes: bytes of all bodies that are not released.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._max_bytes = max(settings.max_total_body_bytes, settings.max_body_bytes)
        #: Bodies being received, oldest first.
        self._unfinished: dict[IncomingBody, None] = {}
        self.num_bytes = 0

    async def receive(self, body: IncomingBody, receive: Receive) -> bytes:
        """Return the bytes of a request's body.

        Call ``release`` when the request has ended, also after an error.

        Args:
            body: the state of the body, with no bytes received yet.
            receive: ASGI function that returns the next message of the request.

        Raises:
            BodyError: the body is too large, too slow or incomplete, or the memory limit is
                reached.
        """
        if len(self._unfinished) >= self._settings.max_pending_bodies:
            self._drop_oldest()
        self._unfinished[body] = None
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds) as body.timeout:
                has_more = True
                while has_more:
                    has_more = await self._receive_chunk(body, receive)
        except TimeoutError:
            raise self._create_timeout_error(body) from None
        finally:
            self._unfinished.pop(body, None)
            body.timeout = None
        content = b"".join(body.chunks)
        body.chunks = []
        return content

    async def discard(self, receive: Receive, max_pause_seconds: float | None = None) -> bool:
        """Receive the body of a rejected request without keeping it, within limits.

        Args:
            receive: ASGI function that returns the next message of the request.
            max_pause_seconds: time limit for each part of the body, in addition to the limit for
                the whole body; None for no such limit.

        Returns:
            Whether the body is complete, so that the connection can be used again.
        """
        num_bytes = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds):
                while num_bytes <= _MAX_DISCARDED_BODIES * self._settings.max_body_bytes:
                    async with asyncio.timeout(max_pause_seconds):
                        message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return bool(message["type"] == "http.request")
        except TimeoutError:
            pass
        return False

    def release(self, body: IncomingBody) -> None:
        """Stop counting the bytes of a body, because its request has ended."""
        self.num_bytes -= body.num_bytes
        body.num_bytes = 0
        body.chunks = []

    async def _receive_chunk(self, body: IncomingBody, receive: Receive) -> bool:
        """Receive one chunk of a body; return whether more chunks follow."""
        message = await receive()
        if body.is_dropped:
            raise self._create_timeout_error(body)
        if message["type"] != "http.request":
            raise BodyError(400, "the body is incomplete: the client disconnected")
        body.is_complete = not message.get("more_body")
        chunk = message.get("body", b"")
        body.chunks.append(chunk)
        body.num_bytes += len(chunk)
        self.num_bytes += len(chunk)
        limit = self._settings.max_body_bytes
        if body.num_bytes > limit:
            raise BodyError(
                413, f"the body is larger than {limit:,} bytes; send fewer texts per request"
            )
        while self.num_bytes > self._max_bytes:
            # Only unfinished bodies can be dropped; one of them is ``body`` itself.
            if not self._drop_oldest() or body.is_dropped:
                raise BodyError(429, "the server has no memory for more bodies; retry in a second")
        return not body.is_complete

    def _drop_oldest(self) -> bool:
        """Reject the oldest unfinished body; return whether there was one."""
        if not self._unfinished:
            return False
        body = next(iter(self._unfinished))
        del self._unfinished[body]
        body.is_dropped = True
        self.release(body)
        # A timeout that has expired ends the body by itself, and cannot be rescheduled.
        if body.timeout is not None and not body.timeout.expired():
            body.timeout.reschedule(asyncio.get_running_loop().time())
        return True

    def _create_timeout_error(self, body: IncomingBody) -> BodyError:
        """Return the error of a body that was dropped, or not received in time."""
        if body.is_dropped:
            return BodyError(
                408,
                "the body was incomplete when the server needed memory for other requests; "
                "send it again without pauses",
            )
        seconds = self._settings.body_timeout_seconds
        return BodyError(
            408, f"the body was not received within {seconds:g} seconds; send it faster"
        )
