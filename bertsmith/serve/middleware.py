"""What stands before every endpoint: key, size, time, how many at once; ids, log and metrics.

No text of a request is logged.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from bertsmith.serve.auth import ApiKey
from bertsmith.serve.errors import error_response
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.parsing import UNKNOWN_SHARE_HEADER
from bertsmith.serve.receiving import Body, BodyError, BodyReceiver, Message, Receive
from bertsmith.serve.sending import Sender
from bertsmith.serve.settings import ServeSettings

Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

#: The page's streams, each open until the last pending call of its session ends.
_LISTENING = ("/gradio_api/queue/data",)
#: What tells that the server lives is told without a key, and however many ask.
_OPEN = ("/health", "/ready")
#: Where a request's ``_Request`` stands in its scope.
_REQUEST = "bertsmith.request"
#: Where the connection stands among the extensions of a scope, see ``sending.Connection``.
CONNECTION_KEY = "bertsmith.connection"
_LOG = logging.getLogger("bertsmith.serve")


class RequestMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: App, *, settings: ServeSettings, metrics: Metrics, key: ApiKey | None = None,
        origins: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """key: what clients must show; None for none. origins: others that may ask (CORS)."""
        self._app, self._settings, self._metrics, self._key = app, settings, metrics, key
        self._handle: App = self._through
        if origins:
            # Around refusals too: without these headers a browser hides them from its page.
            self._handle = CORSMiddleware(
                self._through, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
                expose_headers=[UNKNOWN_SHARE_HEADER],
            )  # fmt: skip
        #: Being answered, and open pages that listen, which may last for hours.
        self._active = {"requests": 0, "pages": 0}
        self._receiver, self._sender = BodyReceiver(settings), Sender(settings)
        #: Set when the server stops: streams to open pages would hold it up.
        self.shutdown_started = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request = _Request(scope, headers, send, self._sender, self._metrics)
        scope[_REQUEST] = request
        try:
            await self._handle(scope, receive, request.send)
        except Exception:
            # It is logged and told by now, and comes up again; here it would cost the connection,
            # with the client's next request on it.
            if not request.status:
                raise
        finally:
            request.size = request.body.num_bytes
            self._receiver.release(request.body)
            request.told()

    async def _through(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request: _Request = scope[_REQUEST]
        refused = self._refused(scope, request)
        if refused is None and scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            try:
                content = await self._receiver.receive(request.body, receive)
            except BodyError as error:
                refused = error_response(error.status, str(error), _retry_after(error.status))
            else:
                receive = _replay(content, receive)
                del content
                if full := self._too_many(scope, request):
                    await full(scope, receive, send)
                    return
        if refused is not None:
            # What of the body was not read stays in the connection.
            refused.headers["Connection"] = "close"
            await refused(scope, receive, send)
            return
        self._active[request.kind] += 1
        try:
            if scope["method"] == "GET":
                await self._streaming(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            self._active[request.kind] -= 1

    async def _streaming(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Let a request through whose answer may have no end of its own: the server's end is it."""
        request: _Request = scope[_REQUEST]
        working = asyncio.ensure_future(self._app(scope, receive, send))
        stopping = asyncio.ensure_future(self.shutdown_started.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and request.streams:
                working.cancel()
            await working
        except asyncio.CancelledError:
            if not self.shutdown_started.is_set():
                raise
        finally:
            stopping.cancel()
            working.cancel()

    def _refused(self, scope: MutableMapping[str, Any], request: "_Request") -> Response | None:
        """Return the answer to what is not let in by its header."""
        settings, headers = self._settings, request.headers
        if self._key is not None and not self._lets_in(self._key, scope, headers):
            return self._key.unauthorized_response(headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return error_response(400, "the header Content-Length is no number")
        if int(length) > settings.body_bytes:
            most = settings.body_bytes
            return error_response(
                413, f"the body is larger than {most:,} bytes; send fewer texts at once"
            )
        return self._too_many(scope, request)

    def _too_many(self, scope: MutableMapping[str, Any], request: "_Request") -> Response | None:
        """Return the answer to one request more than may be answered at once."""
        limits = {"requests": self._settings.requests, "pages": self._settings.pages}
        most = limits[request.kind]
        if self._active[request.kind] < most or _is_open(scope):
            return None
        what = "pages are open" if request.kind == "pages" else "requests are being answered"
        return error_response(429, f"{most:,} {what}; ask again in a second", _retry_after(429))

    def _lets_in(
        self, key: ApiKey, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]
    ) -> bool:
        return _is_open(scope) or key.matches(scope["method"], headers)


class _Request:
    """One request on its way: its id, what was sent back, and the line that tells of it."""

    def __init__(
        self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes], send: Send,
        sender: Sender, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._scope, self._send, self._sender, self._metrics = scope, send, sender, metrics
        self._name, self.headers = _id_of(headers), headers
        self._began = time.perf_counter()
        self.status = 0
        #: Of the body.
        self.size = 0
        self.body = Body()
        listens = scope["method"] == "GET" and scope["path"].startswith(_LISTENING)
        self.kind = "pages" if listens else "requests"
        #: Whether what is sent back has no end of its own.
        self.streams = False
        #: Whether the connection was ended because the client did not read.
        self._is_aborted = False

    async def send(self, message: Message) -> None:
        """Send on, with the request's id; return when the client has read nearly all of it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            self.streams = any(b"text/event-stream" in value for _, value in headers)
            headers.append((b"x-request-id", self._name.encode()))
            message = {**message, "headers": headers}
        await self._send(message)
        # Other servers, as in tests, do not tell of their connections.
        connection = self._scope.get("extensions", {}).get(CONNECTION_KEY)
        if message["type"] == "http.response.body" and connection is not None:
            self._is_aborted |= not await self._sender.drain(connection)

    def told(self) -> None:
        """Write the line of the log, and count."""
        seconds = time.perf_counter() - self._began
        route = getattr(self._scope.get("route"), "path", "")
        self._metrics.count_request(route, self.status, seconds)
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._name,
            "method": self._scope["method"],
            "path": self._scope["path"][:200],
            "status": self.status,
            "seconds": round(seconds, 4),
            "bytes": self.size,
        }
        if self._is_aborted:
            line["aborted"] = "the client did not read the answer"
        _LOG.info(json.dumps(line))


def _replay(content: bytes, receive: Receive) -> Receive:
    """Return what gives a body that is received to the app, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": content}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _retry_after(status: int) -> dict[str, str]:
    return {"Retry-After": "1"} if status == 429 else {}


def _is_open(scope: MutableMapping[str, Any]) -> bool:
    # With a body it is no question whether the server lives.
    return scope["path"] in _OPEN and scope["method"] in ("GET", "HEAD")


def _id_of(headers: dict[bytes, bytes]) -> str:
    """Return the id that the client gave, if it is a plain one, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
