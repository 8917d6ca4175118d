"""Listens for a server, and ends it cleanly: what is under way is finished, the rest is refused.

It never knows an endpoint.
"""

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertsmith.errors import SettingsError
from bertsmith.serve.guard import Guard
from bertsmith.serve.settings import ServeSettings


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; SettingsError where that cannot be."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(kind)
    # A server that was stopped a moment ago still has connections that end.
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
    except OSError as error:
        own.close()
        raise SettingsError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; give another --port "
            "or --host, or stop what listens there"
        ) from None
    return own


def listen(app: Guard, settings: ServeSettings, own: socket.socket) -> None:
    """Serve at a bound socket until SIGTERM or Ctrl-C."""
    server(app, config(settings)).run([own])


def server(app: Guard, own: uvicorn.Config) -> uvicorn.Server:
    """Return a server of the app."""
    own.app = app
    return _Server(app, own)


def config(settings: ServeSettings) -> uvicorn.Config:
    """Return how uvicorn is to serve."""
    logging.getLogger("bertsmith.serve").setLevel(logging.INFO)

    class Patient(_Patient):
        seconds = settings.body_seconds

    return uvicorn.Config(
        "", http=Patient, ws="none", log_level="warning", access_log=False,
        timeout_keep_alive=75, timeout_graceful_shutdown=int(settings.stop_seconds) or 1,
        server_header=False, lifespan="on",
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Ends the streams to open pages first, for which it would wait."""

    def __init__(self, app: Guard, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, finish, end."""
        self._app.stopping.set()
        await super().shutdown(sockets)
        # It would raise the signal again; but all is done that it asked for.
        self._captured_signals.clear()


class _Patient(HttpToolsProtocol):
    """Closes a connection whose request has no whole header in time."""

    seconds = 10.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a header."""
        super().connection_made(transport)
        self._await_header()

    def on_message_begin(self) -> None:
        """Wait for the header of one more request."""
        super().on_message_begin()
        self._await_header()

    def on_headers_complete(self) -> None:
        """Wait no more."""
        self._forget()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._forget()
        super().connection_lost(exc)

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
