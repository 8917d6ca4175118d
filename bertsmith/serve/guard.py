"""What stands before every endpoint: key, size, time, how many at once; ids, log and metrics.

It never reads what a body says, and no text is logged.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from bertsmith.serve.faults import fault
from bertsmith.serve.keys import Key
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.settings import ServeSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

#: Where the page's streams are, each open for as long as somebody looks at the page.
_LISTENING = ("/gradio_api/heartbeat/", "/gradio_api/queue/data")
#: What tells that the server lives is told without a key, and however many ask.
_OPEN = ("/health", "/ready")
_LOG = logging.getLogger("bertsmith.serve")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: App, *, settings: ServeSettings, metrics: Metrics, key: Key | None = None,
        cors: bool = False,
    ) -> None:  # fmt: skip
        """key: what clients must show; None for none. cors: whether other origins may ask."""
        self._app, self._settings, self._metrics, self._key = app, settings, metrics, key
        self._cors = cors
        #: Being answered, and open pages that listen, which may last for hours.
        self._active = {"requests": 0, "pages": 0}
        #: Set when the server stops: streams to open pages would hold it up.
        self.stopping = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request = _Request(scope, send, _id_of(headers), self._metrics)
        listens = scope["method"] == "GET" and scope["path"].startswith(_LISTENING)
        kind = "pages" if listens else "requests"
        self._active[kind] += 1
        try:
            await self._through(scope, headers, receive, request, kind)
        except Exception:
            # It is logged and told by now, and comes up again; here it would cost the connection,
            # with the client's next request on it.
            if not request.status:
                raise
        finally:
            self._active[kind] -= 1
            request.told()

    async def _through(
        self,
        scope: MutableMapping[str, Any],
        headers: dict[bytes, bytes],
        receive: Receive,
        request: "_Request",
        kind: str,
    ) -> None:
        refused = self._refused(scope, headers, kind)
        if refused is None and scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            refused, receive = await self._read(receive, request)
        if refused is not None:
            # What of the body was not read stays in the connection.
            refused.headers["Connection"] = "close"
            await refused(scope, receive, request.send)
            return
        if scope["method"] != "GET":
            await self._app(scope, receive, request.send)
            return
        await self._streaming(scope, receive, request)

    async def _streaming(
        self, scope: MutableMapping[str, Any], receive: Receive, request: "_Request"
    ) -> None:
        """Let a request through whose answer may have no end of its own: the server's end is it."""
        working = asyncio.ensure_future(self._app(scope, receive, request.send))
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and request.streams:
                working.cancel()
            await working
        except asyncio.CancelledError:
            if not self.stopping.is_set():
                raise
        finally:
            stopping.cancel()
            working.cancel()

    def _refused(
        self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes], kind: str
    ) -> Response | None:
        """Return the answer to what is not let in by its header."""
        settings = self._settings
        if self._key is not None and not self._lets_in(self._key, scope, headers):
            return self._key.refusal(headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return fault(400, "the header Content-Length is no number")
        if int(length) > settings.body_bytes:
            return self._too_large()
        most = settings.pages if kind == "pages" else settings.requests
        if self._active[kind] > most and not _is_open(scope):
            what = "pages are open" if kind == "pages" else "requests are being answered"
            return fault(429, f"{most:,} {what}; ask again in a second", {"Retry-After": "1"})
        return None

    def _lets_in(
        self, key: Key, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]
    ) -> bool:
        # Browsers ask without a key whether they may ask with one, which CORS answers.
        asks_first = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        free = _is_open(scope) or (asks_first and self._cors)
        return free or key.fits(scope["method"], headers)

    def _too_large(self) -> Response:
        most = self._settings.body_bytes
        return fault(413, f"the body is larger than {most:,} bytes; send fewer texts at once")

    async def _read(self, receive: Receive, request: "_Request") -> tuple[Response | None, Receive]:
        """Read the body within size and time; return what gives it to the app."""
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        # Gone before the body was whole: there is nobody to answer.
                        return fault(400, "the body ended early"), receive
                    chunks.append(message.get("body", b""))
                    request.size += len(chunks[-1])
                    if request.size > self._settings.body_bytes:
                        return self._too_large(), receive
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            seconds = self._settings.body_seconds
            return fault(408, f"the body was not there within {seconds:g} seconds"), receive
        whole: list[Message] = [{"type": "http.request", "body": b"".join(chunks)}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return None, again


class _Request:
    """One request on its way: its id, what was sent back, and the line that tells of it."""

    def __init__(
        self, scope: MutableMapping[str, Any], send: Send, name: str, metrics: Metrics
    ) -> None:
        self._scope, self._send, self._name, self._metrics = scope, send, name, metrics
        self._began = time.perf_counter()
        self.status = 0
        self.size = 0
        #: Whether what is sent back has no end of its own.
        self.streams = False

    async def send(self, message: Message) -> None:
        """Send on, with the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            self.streams = any(b"text/event-stream" in value for _, value in headers)
            headers.append((b"x-request-id", self._name.encode()))
            message = {**message, "headers": headers}
        await self._send(message)

    def told(self) -> None:
        """Write the line of the log, and count."""
        seconds = time.perf_counter() - self._began
        route = getattr(self._scope.get("route"), "path", "")
        self._metrics.request(route, self.status, seconds)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._name,
            "method": self._scope["method"],
            "path": self._scope["path"][:200],
            "status": self.status,
            "seconds": round(seconds, 4),
            "bytes": self.size,
        }
        _LOG.info(json.dumps(line))


def _is_open(scope: MutableMapping[str, Any]) -> bool:
    # With a body it is no question whether the server lives.
    return scope["path"] in _OPEN and scope["method"] in ("GET", "HEAD")


def _id_of(headers: dict[bytes, bytes]) -> str:
    """Return the id that the client gave, if it is a plain one, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
