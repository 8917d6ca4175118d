"""Listens for a server, and ends it cleanly: what is under way is finished, the rest is refused."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertsmith.errors import SettingsError
from bertsmith.serve.errors import error_response
from bertsmith.serve.middleware import CONNECTION_KEY, RequestMiddleware
from bertsmith.serve.settings import ServeSettings

#: Seconds for which a thread that runs Python keeps another one waiting; Python's own are 0.005, in
#: which a model thread that only wants to begin its next product could have computed several.
_SWITCH = 0.0005
#: Connections that wait to be accepted.
_BACKLOG = 2048
_MAX_FILES = 65_536
_LARGE = "the header is larger than {:,} bytes; leave out what the server does not need"


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; SettingsError where that cannot be."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(kind)
    # A server that was stopped a moment ago still has connections that end.
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
    except OSError as error:
        own.close()
        raise _cannot_listen(host, port, error) from None
    return own


def start_listening(own: socket.socket) -> None:
    """Let clients connect to a bound socket.

    Two servers can bind the same port before either listens.

    Raises:
        SettingsError: another process listens there.
    """
    try:
        own.listen(_BACKLOG)
    except OSError as error:
        host, port = own.getsockname()[:2]
        own.close()
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot listen at {host}, port {port}: {error.strerror or error}; give another --port "
        "or --host, or stop what listens there"
    )


def serve_until_signal(app: RequestMiddleware, settings: ServeSettings, own: socket.socket) -> None:
    """Serve at a bound socket until SIGTERM, SIGHUP or Ctrl-C."""
    start_listening(own)
    _raise_file_limit()
    with _steady():
        create_server(app, create_config(settings)).run([own])


def _raise_file_limit() -> None:
    """Allow as many connections as the system lets this process have; many allow 1,024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _steady() -> Iterator[None]:
    """Keep Python from holding requests up: no search for garbage among what is there to stay.

    Models and libraries are hundreds of thousands of objects; a full collection goes through all.
    """
    gc.collect()
    gc.freeze()
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def create_server(app: RequestMiddleware, own: uvicorn.Config) -> uvicorn.Server:
    """Return a server of the app."""
    own.app = app
    return _Server(app, own)


def create_config(settings: ServeSettings) -> uvicorn.Config:
    """Return how uvicorn is to serve."""
    logging.getLogger("bertsmith.serve").setLevel(logging.INFO)

    class Patient(_Patient):
        seconds, most = settings.body_seconds, settings.header_bytes

    return uvicorn.Config(
        "", http=Patient, ws="none", log_level="warning", access_log=False,
        timeout_keep_alive=75, timeout_graceful_shutdown=int(settings.stop_seconds) or 1,
        server_header=False, lifespan="on",
        # uvicorn trusts X-Forwarded headers of all clients on this machine by default.
        proxy_headers=False,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Ends the streams to open pages first, for which it would wait."""

    def __init__(self, app: RequestMiddleware, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Finish what is under way on SIGHUP too, which the end of a terminal session sends."""
        is_main = threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            # Under nohup it is ignored, and stays so.
            if not is_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, finish, end."""
        self._app.shutdown_started.set()
        await super().shutdown(sockets)
        # It would raise the signal again; but all is done that it asked for.
        self._captured_signals.clear()


class _Patient(HttpToolsProtocol):
    """Closes a connection whose request has no whole header in time, or one that is too large."""

    seconds = 10.0
    most = 65_536
    _late: asyncio.TimerHandle | None = None
    #: Bytes of the header that the parser has told of, and of what it holds and has not told of.
    _told = _held = 0
    _heard = False

    def connection_made(self, transport: Any) -> None:
        """Wait for a header."""
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """Read on; of a header, or a trailer, that does not end only so much."""
        self._heard = False
        super().data_received(data)
        self._held = 0 if self._heard else self._held + len(data)
        if self._held > self.most and not self.transport.is_closing():
            self.send_400_response(_LARGE)

    def on_message_begin(self) -> None:
        """Wait for the header of one more request."""
        super().on_message_begin()
        self._told = 0
        self._await_header()
        extensions: dict[Any, Any] = {CONNECTION_KEY: self}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        """Count it."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it."""
        self._count(name + value)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or too large a one, and close."""
        status = 431 if self._told > self.most or msg == _LARGE else 400
        told = error_response(status, _LARGE.format(self.most) if status == 431 else msg)
        reason = HTTPStatus(status).phrase
        head = [f"HTTP/1.1 {status} {reason}", f"content-length: {len(told.body)}",
                "content-type: application/json", "connection: close", "", ""]  # fmt: skip
        self.transport.write("\r\n".join(head).encode() + bytes(told.body))
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Wait no more."""
        self._heard = True
        self._forget()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Read on."""
        self._heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Read on."""
        self._heard = True
        super().on_message_complete()

    def num_unsent(self) -> int:
        """Return the bytes that the operating system has not taken yet."""
        return self.transport.get_write_buffer_size()

    def is_sending(self) -> bool:
        """Return whether more bytes are unsent than a connection may buffer."""
        return self.flow.write_paused

    async def drain(self) -> None:
        """Wait until few bytes are unsent, or the connection has ended."""
        await self.flow.drain()

    def abort(self) -> None:
        """End the connection and drop what is unsent."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._forget()
        super().connection_lost(exc)

    def _count(self, part: bytes) -> None:
        self._told += len(part)
        if self._told > self.most:
            # The parser ends, and what comes of it is ``send_400_response``.
            raise ValueError(_LARGE)

    def _await_header(self) -> None:
        self._forget()
        self._late = self.loop.call_later(self.seconds, self._give_up)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
