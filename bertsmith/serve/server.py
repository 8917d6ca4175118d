"""Run the app on uvicorn, with header limits and a graceful shutdown."""

import asyncio
import gc
import logging
import math
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from types import FrameType
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertsmith.serve.errors import create_error_response, log_failure
from bertsmith.serve.middleware import RequestMiddleware
from bertsmith.serve.proxies import ANY_PROXY, keep_last_forwarded_address
from bertsmith.serve.sending import CONNECTION_KEY
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.sockets import start_listening
from bertsmith.serve.terminal import has_terminal

#: Seconds after which a thread must release the GIL on request. With Python's default of 0.005, a
#: model thread waits longer for the GIL than a matrix multiplication takes.
_SWITCH_INTERVAL_SECONDS = 0.0005
_MAX_OPEN_FILES = 65_536
#: Seconds that a client has to answer the end of a TLS connection when the server stops.
_TLS_CLOSE_SECONDS = 0.5


def serve_until_signal(
    app: RequestMiddleware,
    config: uvicorn.Config,
    settings: ServeSettings,
    sock: socket.socket,
    reload: Callable[[], None] | None = None,
    on_started: Callable[[], None] | None = None,
) -> None:
    """Serve an app on a bound socket until SIGTERM or Ctrl-C.

    Args:
        app: the app.
        config: uvicorn's configuration, of ``create_config``.
        settings: the limits of the server.
        sock: the socket.
        reload: called in a thread on SIGHUP.
        on_started: called when the server accepts connections and handles signals.
    """
    start_listening(sock)
    _raise_file_limit()
    with _reduce_latency():
        create_server(app, config, settings, reload, on_started).run([sock])


def _raise_file_limit() -> None:
    """Raise the soft limit of open files, which is often 1,024; each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@contextmanager
def _reduce_latency() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and switch threads more often."""
    freeze_objects()
    previous_interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(previous_interval)
        gc.unfreeze()


def create_server(
    app: RequestMiddleware,
    config: uvicorn.Config,
    settings: ServeSettings | None = None,
    reload: Callable[[], None] | None = None,
    on_started: Callable[[], None] | None = None,
) -> uvicorn.Server:
    """Return a uvicorn server of an app; the arguments are those of ``serve_until_signal``."""
    config.app = app
    return _Server(config, app, settings or ServeSettings(), reload, on_started)


def create_config(settings: ServeSettings, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration, and set the level of the access log.

    ``options`` are further arguments of ``uvicorn.Config``.
    """
    logging.getLogger("bertsmith.serve").setLevel(logging.INFO)

    class ConfiguredProtocol(_LimitedProtocol):
        header_seconds = settings.body_timeout_seconds
        max_header_bytes = settings.max_header_bytes
        trusts_any_proxy = ANY_PROXY in (options.get("forwarded_allow_ips") or ())

    # ``create_server`` replaces the empty app.
    defaults: dict[str, Any] = {
        "http": ConfiguredProtocol,
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": int(settings.shutdown_timeout_seconds) or 1,
        "server_header": False,
        "lifespan": "on",
        # uvicorn trusts X-Forwarded headers of all clients on this machine by default.
        "proxy_headers": False,
    }
    return uvicorn.Config("", **{**defaults, **options})


class _Server(uvicorn.Server):
    """Server that drains on SIGTERM, reloads on SIGHUP, and exits with status 0 after a signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: RequestMiddleware,
        settings: ServeSettings,
        reload: Callable[[], None] | None,
        on_started: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._control = app.control
        self._clock: Callable[[], float] = time.monotonic
        self._drain_seconds = settings.drain_seconds
        #: Time at which draining ends, in seconds of the clock.
        self._drained_at = math.inf
        self._reload = reload
        self._has_terminal = has_terminal()
        #: Notified by SIGHUP; a second signal during a reload causes another reload.
        self._needs_reload = threading.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Also handle SIGHUP."""
        is_main = threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            # nohup ignores SIGHUP; keep it ignored.
            if not is_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            threading.Thread(target=self._reload_on_request, daemon=True).start()
            previous_handler = signal.signal(signal.SIGHUP, self._handle_hangup)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, previous_handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server; on SIGTERM, only after load balancers had time to notice."""
        is_first = not (self.should_exit or self._control.is_draining)
        self._control.is_draining = True
        if sig == signal.SIGTERM and is_first and self._drain_seconds:
            self._drained_at = self._clock() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop the server: after draining, or when a model thread is dead.

        A server that a supervisor restarts stops in the second case.
        """
        if await super().on_tick(counter) or self._clock() >= self._drained_at:
            return True
        return self._control.is_supervised and self._control.has_failed()

    async def startup(self, sockets: Any = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        if self._on_started is not None:
            self._on_started()

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening and finish running requests; cancel them after a second Ctrl-C."""
        self._control.is_draining = True
        closing = asyncio.create_task(self._end_closed_connections())
        await super().shutdown(sockets)
        closing.cancel()
        if self.force_exit:
            # After a second Ctrl-C, uvicorn would leave the requests and the app to be cancelled
            # with the event loop, which logs tracebacks.
            for task in self.server_state.tasks:
                task.cancel()
            await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
            await self.lifespan.shutdown()
        # uvicorn would raise the captured signals again, and the exit status would be a failure.
        self._captured_signals.clear()

    async def _end_closed_connections(self) -> None:
        """End connections whose clients do not answer the end of TLS, as idle clients do.

        asyncio would wait for the answer for 30 seconds, and the server with it.
        """
        while True:
            await asyncio.sleep(_TLS_CLOSE_SECONDS)
            for connection in list(self.server_state.connections):
                transport: Any = connection.transport
                if transport.is_closing() and not transport.get_write_buffer_size():
                    transport.abort()

    def _handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """Reload on SIGHUP; stop if the signal says that the server's terminal was closed."""
        if self._has_terminal and not has_terminal():
            super().handle_exit(sig, frame)
        else:
            self._needs_reload.set()

    def _reload_on_request(self) -> None:
        """Reload after each SIGHUP, in a thread of its own."""
        while self._needs_reload.wait():
            self._needs_reload.clear()
            if self._reload is None:
                continue
            try:
                self._reload()
            except Exception as error:  # noqa: BLE001 - later signals must have an effect
                log_failure("a reload", error)


def freeze_objects() -> None:
    """Exclude existing objects from garbage collection.

    Models and libraries have hundreds of thousands of objects, all of which a full garbage
    collection would visit.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class _LimitedProtocol(HttpToolsProtocol):
    """HTTP protocol with limits on the time and size of headers; a ``sending.Connection``.

    Attributes:
        header_seconds: time limit to receive a request's headers, after which the connection is
            closed.
        max_header_bytes: maximum size of the headers; larger headers get the status 431.
        trusts_any_proxy: whether X-Forwarded-For is used without a check of the proxy's address.
    """

    header_seconds = 10.0
    max_header_bytes = 65_536
    trusts_any_proxy = False
    _header_timer: asyncio.TimerHandle | None = None
    _is_disconnected = False
    #: Called when the client disconnects.
    _on_disconnect: Callable[[], None] | None = None
    #: Header bytes of the current request that the parser has reported.
    _parsed_bytes = 0
    #: Received bytes that the parser has not reported yet.
    _buffered_bytes = 0
    #: Whether the parser made progress within ``data_received``.
    _has_parsed = False
    #: Header of a request for another protocol, without the field Upgrade; None for other requests.
    _header_without_upgrade: bytes | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the header timer."""
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; send 431 if an unfinished header or trailer exceeds the limit."""
        self._has_parsed = False
        self._parse(data)
        self._buffered_bytes = 0 if self._has_parsed else self._buffered_bytes + len(data)
        if self._is_header_too_large() and not self.transport.is_closing():
            self.send_400_response("the header is too large")

    def _parse(self, data: bytes) -> None:
        """Parse received bytes; ignore the field Upgrade, which Java's HttpClient sends by default.

        The parser skips the body of a request for another protocol, such as h2c. Therefore it gets
        the header of such a request again, without the field Upgrade.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._header_without_upgrade is None:
                    # The method CONNECT.
                    return
                data = self._header_without_upgrade + data[upgrade.args[0] :]
                self._header_without_upgrade = None
                continue
            except httptools.HttpParserError:
                message = "the request is not valid HTTP"
                self.logger.warning(message)
                self.send_400_response(message)
            return

    def on_message_begin(self) -> None:
        """Restart the header timer and size for the next request of the connection."""
        # Line breaks between requests, and the rest of an answered request's body, do not end the
        # keep-alive timeout, because no other timer would close the connection after them.
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._parsed_bytes = 0
        self._start_header_timer()
        extensions: dict[Any, Any] = {CONNECTION_KEY: self}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        """Count the URL as part of the header."""
        self._count_header_bytes(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header field."""
        self._count_header_bytes(name + value)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request with 400, or a too large header with 431, and close."""
        status, message = 400, msg
        if self._is_header_too_large():
            status = 431
            message = (
                f"the header is larger than {self.max_header_bytes:,} bytes; send fewer or shorter "
                "headers"
            )
        response = create_error_response(status, message)
        phrase = HTTPStatus(status).phrase
        # Without CORS headers a browser hides the response from the script.
        cors = [f"{name}: {value}" for name, value in self._get_cors_headers().items()]
        head = [
            f"HTTP/1.1 {status} {phrase}",
            f"content-length: {len(response.body)}",
            "content-type: application/json",
            *cors,
            "connection: close",
            "",
            "",
        ]
        self.transport.write("\r\n".join(head).encode() + bytes(response.body))
        self.transport.close()

    def _get_cors_headers(self) -> dict[str, str]:
        """Return the CORS headers for the origin, if the header was read up to its Origin field."""
        origins = [value for name, value in self.headers or () if name == b"origin"]
        app = self.config.app
        if not origins or not isinstance(app, RequestMiddleware):
            return {}
        return app.get_cors_headers(origins[-1].decode("latin-1"))

    def on_headers_complete(self) -> None:
        """Stop the header timer, and the keep-alive timeout after an earlier answer."""
        # The answer may have started it after the first bytes of this pipelined request.
        self._unset_keepalive_if_required()
        self._has_parsed = True
        self._stop_header_timer()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._header_without_upgrade = self._format_header_without_upgrade()
            return
        if self.trusts_any_proxy:
            keep_last_forwarded_address(self.headers)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Record that the parser made progress."""
        self._has_parsed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the parser made progress."""
        self._has_parsed = True
        if self._header_without_upgrade is None:
            super().on_message_complete()

    def count_unsent_bytes(self) -> int:
        """Return the number of bytes in the transport's write buffer."""
        return self.transport.get_write_buffer_size()

    def is_write_buffer_full(self) -> bool:
        """Return whether the write buffer is above its high-water mark."""
        return self.flow.write_paused

    async def drain(self) -> None:
        """Wait until the write buffer is below its low-water mark, or the connection is closed."""
        await self.flow.drain()

    def abort(self) -> None:
        """Close the connection and drop unsent bytes."""
        self.transport.abort()

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return self._is_disconnected

    @contextmanager
    def call_on_disconnect(self, function: Callable[[], None]) -> Iterator[None]:
        """Call a function if the client disconnects within the block, or has disconnected."""
        if self._is_disconnected:
            function()
        # A connection runs one request at a time.
        self._on_disconnect = function
        try:
            yield
        finally:
            self._on_disconnect = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the header timer and the current request."""
        self._stop_header_timer()
        super().connection_lost(exc)
        self._is_disconnected = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    def _count_header_bytes(self, part: bytes) -> None:
        """Add a part of the header to its size; raise ValueError beyond the limit."""
        self._parsed_bytes += len(part)
        if self._is_header_too_large():
            # The error stops the parser. uvicorn then calls ``send_400_response``.
            raise ValueError("the header is too large")

    def _format_header_without_upgrade(self) -> bytes:
        """Return the header of the current request without the field Upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _is_header_too_large(self) -> bool:
        return max(self._parsed_bytes, self._buffered_bytes) > self.max_header_bytes

    def _start_header_timer(self) -> None:
        """Close the connection after ``header_seconds``, unless the timer is stopped."""
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(self.header_seconds, self._close_connection)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_connection(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
