"""ASGI middleware: security headers, authentication, limits, CORS, request ids, log and metrics.

The log never contains request texts.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serve.admission import EarlyAdmission
from bertsmith.serve.clients import (
    CLIENT_KEY,
    HEALTH_PATHS,
    RECORD_TOKENS_KEY,
    RESPONSE_KEY,
    TOKEN_BUCKET_KEY,
    TRACE_KEY,
    ConcurrencyLimit,
    get_address_group,
    get_client_address,
    get_path,
)
from bertsmith.serve.control import ServerControl
from bertsmith.serve.deadline import SHUTDOWN_MESSAGE, BusyError
from bertsmith.serve.errors import create_busy_response, create_error_response
from bertsmith.serve.keys import FailedLogins, KeyRing, NamedKey
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.page import is_page_path
from bertsmith.serve.parsing import TRUNCATED_HEADER, UNKNOWN_SHARE_HEADER
from bertsmith.serve.receiving import BodyError, BodyReceiver, IncomingBody
from bertsmith.serve.response_memory import ResponseMemory, ResponseReservation
from bertsmith.serve.sending import CONNECTION_KEY, ResponseMonitor
from bertsmith.serve.settings import ServeSettings

if TYPE_CHECKING:
    from bertsmith.serve.tracing import Tracing

#: Key of the ``_Request`` in an ASGI scope.
_REQUEST_KEY = "bertsmith.request"
#: Time to wait for the next part of a rejected body before the connection is closed.
_MAX_PAUSE_SECONDS = 2.0
_LOG = logging.getLogger("bertsmith.serve")


class RequestMiddleware:
    """ASGI middleware that admits, rejects, logs and counts every request of an app.

    Attributes:
        control: state of the server that signal handlers change.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServeSettings,
        metrics: Metrics,
        admission: EarlyAdmission,
        keys: KeyRing | None = None,
        origins: Sequence[str] = (),
        has_page: bool = False,
        control: ServerControl | None = None,
        failed_logins: FailedLogins | None = None,
        tracing: "Tracing | None" = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Wrap an app.

        Args:
            app: the ASGI app.
            settings: the limits of the server.
            metrics: counts the requests.
            admission: rejects requests of an overloaded server before their body is received.
            keys: keys of which clients must send one; None for no authentication.
            origins: origins of other sites whose scripts may send requests (CORS).
            has_page: whether the app has a web page. Its files need no key, because the page asks
                for the key.
            control: state of the server that signal handlers change.
            failed_logins: counts wrong keys; None for a counter of its own.
            tracing: creates the spans of requests; None for no tracing.
            sleep: waits a number of seconds, before the response to a wrong key.
        """
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._admission = admission
        self._keys = keys
        self._failed_logins = failed_logins or FailedLogins()
        self._tracing = tracing
        self._sleep = sleep
        self.control = control or ServerControl()
        self._has_page = has_page
        self._handle: ASGIApp = self._handle_request
        self._cors: CORSMiddleware | None = None
        if origins:
            # Rejections need CORS headers too: without them a browser hides them from scripts.
            self._cors = CORSMiddleware(
                self._handle_request,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[
                    UNKNOWN_SHARE_HEADER,
                    TRUNCATED_HEADER,
                    "Retry-After",
                    "X-Request-Id",
                ],
            )
            self._handle = self._cors
        self._concurrency = ConcurrencyLimit(settings.max_concurrent_requests)
        self._receiver = BodyReceiver(settings)
        self._response_memory = ResponseMemory(settings.max_unsent_bytes)
        self._response_monitor = ResponseMonitor(settings, self._response_memory)

    @property
    def num_running_requests(self) -> int:
        """Number of requests being answered, without those whose body is being received."""
        return self._concurrency.num_active

    def get_cors_headers(self, origin: str) -> dict[str, str]:
        """Return the CORS headers of a response that is sent without this middleware."""
        if self._cors is None or not self._cors.is_allowed_origin(origin):
            return {}
        allowed = "*" if self._cors.allow_all_origins else origin
        return {"Access-Control-Allow-Origin": allowed, "Vary": "Origin"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request = _Request(scope, headers, send, self._response_monitor, self._metrics)
        scope[_REQUEST_KEY] = request
        scope[CLIENT_KEY] = get_address_group(request.address)
        span = None
        if self._tracing is not None and not _is_health_check(scope):
            span = self._tracing.start_request(scope["method"], scope["path"], headers)
            scope[TRACE_KEY] = self._tracing.create_context(span)
        try:
            await self._handle(scope, receive, request.send)
        except Exception:
            # The error handlers have already logged the exception and sent a response, but
            # Starlette raises the exception again. Raising it here would close the connection and
            # lose a pipelined request.
            if not request.status:
                raise
        except asyncio.CancelledError:
            if not self.control.is_draining:
                raise
            # The server stops without waiting for this request.
            if not request.status:
                await _reject(
                    create_error_response(503, SHUTDOWN_MESSAGE), scope, receive, request.send
                )
        finally:
            request.body_size = request.body.num_bytes
            self._receiver.release(request.body)
            request.log()
            if self._tracing is not None and span is not None:
                self._tracing.end_request(span, scope["method"], request.route, request.status)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit or reject a request, receive its body, and run the app."""
        request: _Request = scope[_REQUEST_KEY]
        rejection = await self._authorize(scope, request) or self._check_header(scope, request)
        if rejection is not None:
            await self._reject_unread(rejection, scope, receive, send)
        elif scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            await self._run_app(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a request by the size of its body, receive the body, and run the app."""
        request: _Request = scope[_REQUEST_KEY]
        length = request.headers.get(b"content-length")
        try:
            if length is None:
                # The size of a chunked body is known when it is complete.
                receive = await self._receive_body(request, receive)
            num_bytes = request.body.num_bytes if length is None else int(length)
            path = get_path(scope)
            with self._admission.admit(scope[CLIENT_KEY], path, num_bytes) as record_tokens:
                scope[RECORD_TOKENS_KEY] = record_tokens
                if length is not None:
                    receive = await self._receive_body(request, receive)
                await self._run_if_room(scope, receive, send)
        except BodyError as error:
            rejection = create_error_response(
                error.status, str(error), _create_retry_headers(error.status)
            )
            await self._reject_unread(rejection, scope, receive, send)
        except BusyError as error:
            if length is None:
                await create_busy_response(error)(scope, receive, send)
            else:
                await self._reject_early(error, scope, receive, send)

    async def _receive_body(self, request: "_Request", receive: Receive) -> Receive:
        """Receive the body of a request; return an ASGI receive function that returns it again.

        Only that function refers to the body, which is freed once the app has read it.
        """
        return _replay(await self._receiver.receive(request.body, receive), receive)

    async def _run_if_room(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app unless too many requests are running."""
        # Other requests may have started while the body was received.
        overload_response = self._check_concurrency(scope)
        if overload_response is not None:
            await overload_response(scope, receive, send)
        else:
            await self._run_app(scope, receive, send)

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = scope[RESPONSE_KEY] = ResponseReservation(self._response_memory)
        with self._concurrency.count(scope[CLIENT_KEY]), contextlib.closing(reservation):
            await self._app(scope, receive, send)

    async def _reject_early(
        self, error: BusyError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Reject a request of an overloaded server without keeping its body.

        The body is read before the response, because closing a connection with unread data can
        destroy the response. A client that waits for permission to send the body gets the response
        at once.
        """
        request: _Request = scope[_REQUEST_KEY]
        response = create_busy_response(error)
        if request.awaits_permission or not await self._receiver.discard(receive):
            response.headers["Connection"] = "close"
        await response(scope, receive, send)

    async def _reject_unread(
        self, rejection: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Reject a request whose body is not completely read, and close the connection.

        The rest of the body is read after the response, because closing a connection with unread
        data can destroy the response.
        """
        request: _Request = scope[_REQUEST_KEY]
        has_body = not (request.body.is_complete or request.awaits_permission)

        async def send_before_body(message: Message) -> None:
            if has_body and message["type"] == "http.response.body":
                await send({**message, "more_body": True})
                await self._receiver.discard(receive, _MAX_PAUSE_SECONDS)
                message = {"type": "http.response.body"}
            await send(message)

        await _reject(rejection, scope, receive, send_before_body)

    def _check_header(self, scope: Scope, request: "_Request") -> Response | None:
        """Return the response that rejects a request because of its header; None to admit it."""
        headers = request.headers
        if scope["method"] == "POST" and self._is_foreign(headers):
            return create_error_response(
                403,
                "the request comes from the page of another site; start the server with --cors "
                "ORIGIN to allow it",
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return create_error_response(400, "the header Content-Length is not a number")
        limit = self._settings.max_body_bytes
        if int(length) > limit:
            return create_error_response(
                413, f"the body is larger than {limit:,} bytes; send fewer texts per request"
            )
        return self._check_concurrency(scope)

    def _check_concurrency(self, scope: Scope) -> Response | None:
        """Return a 429 response if too many requests are running, else None."""
        if self._concurrency.has_room(scope[CLIENT_KEY]) or _is_health_check(scope):
            return None
        return create_error_response(
            429,
            f"the server is busy: {self._concurrency.num_active:,} requests are running; retry in "
            "a second",
            _create_retry_headers(429),
        )

    def _is_foreign(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether a browser sent a request for another site that has no permission (CORS).

        That site could not read the response, but the server would compute it.
        """
        if headers.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
            return False
        origin = headers.get(b"origin", b"").decode("latin-1")
        return self._cors is None or not self._cors.is_allowed_origin(origin)

    async def _authorize(self, scope: Scope, request: "_Request") -> Response | None:
        """Return the response to a request without a valid key, or beyond its limit; else None."""
        if self._keys is None:
            return None
        key = self._keys.find(scope["method"], request.headers)
        if key is None:
            is_page = self._has_page and is_page_path(get_path(scope))
            if _is_health_check(scope) or (is_page and scope["method"] in ("GET", "HEAD")):
                return None
            if b"authorization" in request.headers:
                await self._sleep(self._failed_logins.record(scope[CLIENT_KEY]))
            return self._keys.create_unauthorized_response(request.headers)
        request.key_name = key.name
        if len(self._keys) > 1:
            scope[CLIENT_KEY] = f"key {key.name}"
        scope[TOKEN_BUCKET_KEY] = key.tokens
        return None if _is_health_check(scope) else _check_request_rate(key)


def _check_request_rate(key: NamedKey) -> Response | None:
    """Return a 429 response if a key has used its requests, else None."""
    seconds = 0.0 if key.requests is None else key.requests.take(1)
    if key.requests is None or not seconds:
        return None
    return create_error_response(
        429,
        f"the limit of this API key is {key.requests.per_minute:,.0f} requests per minute; retry "
        f"in {math.ceil(seconds)} seconds",
        {"Retry-After": str(math.ceil(seconds))},
    )


class _Request:
    """State of one request, for the access log and metrics.

    Attributes:
        address: IP address of the client.
        key_name: name of the API key of the request; None without a valid key.
        headers: request headers with lower-case names.
        status: HTTP status of the response; 0 until it starts.
        body: the body being received.
        body_size: bytes of the body, set when the request ends.
    """

    def __init__(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        send: Send,
        response_monitor: ResponseMonitor,
        metrics: Metrics,
    ) -> None:
        self._scope = scope
        self.address = get_client_address(scope)
        self.key_name: str | None = None
        self._send = send
        self._response_monitor = response_monitor
        self._metrics = metrics
        self._id = _choose_request_id(headers)
        self.headers = headers
        self._started_at = time.perf_counter()
        self.status = 0
        self.body_size = 0
        self.body = IncomingBody()
        #: Whether the connection was aborted because the client did not read the response.
        self._is_aborted = False

    async def send(self, message: Message) -> None:
        """Send a message, and wait until the client has read most of it.

        The request's id is added to the response headers.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            headers.append((b"x-request-id", self._id.encode()))
            message = {**message, "headers": headers}
        await self._send(message)
        # Other ASGI servers, such as test clients, do not provide the connection.
        connection = self._scope.get("extensions", {}).get(CONNECTION_KEY)
        if message["type"] == "http.response.body" and connection is not None:
            was_read = await self._response_monitor.drain(connection)
            self._is_aborted = self._is_aborted or not was_read

    @property
    def awaits_permission(self) -> bool:
        """Whether the client waits for permission to send the body (Expect: 100-continue)."""
        return b"expect" in self.headers

    @property
    def route(self) -> str:
        """Path of the endpoint; empty for a rejected request or an unknown path."""
        return getattr(self._scope.get("route"), "path", "")

    def log(self) -> None:
        """Write the access log line and count the request."""
        seconds = time.perf_counter() - self._started_at
        self._metrics.count_request(self.route, self.status, seconds)
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._id,
            "client": self.address,
            "method": self._scope["method"],
            "path": self._scope["path"][:200],
            "status": self.status,
            "seconds": round(seconds, 4),
            "bytes": self.body_size,
        }
        if self.key_name is not None:
            line["key"] = self.key_name
        if self._is_aborted:
            line["aborted"] = "the client did not read the response"
        _LOG.info(orjson.dumps(line).decode())


async def _reject(rejection: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a response, after which the connection is closed."""
    rejection.headers["Connection"] = "close"
    await rejection(scope, receive, send)


def _replay(content: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that first returns a body that was already received."""
    messages: list[Message] = [{"type": "http.request", "body": content}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _create_retry_headers(status: int) -> dict[str, str]:
    """Return the Retry-After header for status 429, and no headers for any other status."""
    return {"Retry-After": "1"} if status == 429 else {}


def _is_health_check(scope: Scope) -> bool:
    """Return whether a request is a health probe."""
    # Requests with a body use memory, so they are limited like all others.
    return get_path(scope) in HEALTH_PATHS and scope["method"] in ("GET", "HEAD")


def _choose_request_id(headers: dict[bytes, bytes]) -> str:
    """Return the client's request id if it is printable ASCII, else a new one."""
    client_id = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(client_id) <= 128 and client_id.isascii() and client_id.isprintable():
        return client_id
    return uuid.uuid4().hex
