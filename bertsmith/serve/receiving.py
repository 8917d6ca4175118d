"""Receives request bodies within limits of size, time, number and memory.

A client that never finishes its body must not keep others out: when there are too many unfinished
bodies, the oldest one is refused. The body of a healthy client arrives within milliseconds.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from bertsmith.serve.settings import ServeSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class BodyError(Exception):
    """A body was not received. ``status``: of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Body:
    """A request body. ``num_bytes`` count against the server's memory until it is released."""

    num_bytes: int = 0
    chunks: list[bytes] = field(default_factory=list)
    timeout: asyncio.Timeout | None = None
    is_dropped: bool = False


class BodyReceiver:
    """Receives the bodies of all requests of a server; used on its event loop only."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._max_bytes = max(settings.bodies_bytes, settings.body_bytes)
        #: In the order in which they began.
        self._unfinished: dict[Body, None] = {}
        #: Of all bodies that are not released.
        self.num_bytes = 0

    async def receive(self, body: Body, receive: Receive) -> bytes:
        """Return the bytes of a request's body; release ``body`` afterwards, also after an error.

        Raises:
            BodyError: the body is too large, too slow or incomplete, or there is no memory for it.
        """
        if len(self._unfinished) >= self._settings.bodies:
            self._drop_oldest()
        self._unfinished[body] = None
        try:
            async with asyncio.timeout(self._settings.body_seconds) as body.timeout:
                while await self._receive_chunk(body, receive):
                    pass
        except TimeoutError:
            raise self._too_slow(body) from None
        finally:
            self._unfinished.pop(body, None)
            body.timeout = None
        content, body.chunks = b"".join(body.chunks), []
        return content

    def release(self, body: Body) -> None:
        """Stop counting a body's bytes: its request is answered, or refused."""
        self.num_bytes -= body.num_bytes
        body.num_bytes, body.chunks = 0, []

    async def _receive_chunk(self, body: Body, receive: Receive) -> bool:
        """Receive one chunk; return whether there are more."""
        message = await receive()
        if body.is_dropped:
            raise self._too_slow(body)
        if message["type"] != "http.request":
            raise BodyError(400, "the body ended early")
        chunk = message.get("body", b"")
        body.chunks.append(chunk)
        body.num_bytes += len(chunk)
        self.num_bytes += len(chunk)
        most = self._settings.body_bytes
        if body.num_bytes > most:
            raise BodyError(
                413, f"the body is larger than {most:,} bytes; send fewer texts at once"
            )
        while self.num_bytes > self._max_bytes:
            # Bodies of requests that are being answered stay; this one may be the oldest.
            if not self._drop_oldest() or body.is_dropped:
                raise BodyError(
                    429, "the server has no memory for more bodies; ask again in a second"
                )
        return bool(message.get("more_body"))

    def _drop_oldest(self) -> bool:
        """Refuse the body that has been unfinished for longest; return whether there is one."""
        if not self._unfinished:
            return False
        body = next(iter(self._unfinished))
        del self._unfinished[body]
        body.is_dropped = True
        self.release(body)
        if body.timeout is not None:
            body.timeout.reschedule(asyncio.get_running_loop().time())
        return True

    def _too_slow(self, body: Body) -> BodyError:
        if body.is_dropped:
            return BodyError(
                408, "the body was not complete when the server needed room for others; send it "
                "again, without a pause"
            )  # fmt: skip
        seconds = self._settings.body_seconds
        return BodyError(408, f"the body was not there within {seconds:g} seconds")
