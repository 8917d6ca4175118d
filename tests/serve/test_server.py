"""Starting a server: sockets, signals and the limit of open files."""

import resource
import signal
import socket

import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve import server as server_module
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.middleware import RequestMiddleware
from bertsmith.serve.server import (
    bind_socket,
    create_config,
    create_server,
    serve_until_signal,
    start_listening,
)
from bertsmith.serve.settings import ServeSettings


def _empty_app() -> RequestMiddleware:
    """Return the middleware of an app that handles no requests."""
    return RequestMiddleware(lambda *_: None, settings=ServeSettings(), metrics=Metrics())  # type: ignore[arg-type]


def test_second_server_on_a_port_is_an_error() -> None:
    """Two sockets can bind the same port, but only one can listen."""
    first = bind_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bind_socket("127.0.0.1", port)
    third = bind_socket("127.0.0.1", port)
    start_listening(first)
    message = f"cannot listen at 127.0.0.1, port {port}: Address already in use; give another"
    with pytest.raises(SettingsError, match=message):
        start_listening(second)
    with pytest.raises(SettingsError, match=message):
        serve_until_signal(_empty_app(), ServeSettings(), third)
    socket.create_connection(("127.0.0.1", port), 60).close()
    first.close()


def test_sighup_stops_the_server_unless_it_is_ignored() -> None:
    """SIGHUP works like SIGTERM; under nohup, which ignores SIGHUP, the server keeps running."""
    previous_handler = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, handler)
            server = create_server(_empty_app(), create_config(ServeSettings()))
            with server.capture_signals():
                signal.raise_signal(signal.SIGHUP)
                assert server.should_exit == (handler is signal.SIG_DFL)
                server._captured_signals.clear()
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def test_limit_of_open_files_is_raised_but_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised to the hard limit; a higher soft limit is unchanged."""
    limits = {"soft": 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(soft=pair[0]))
    server_module._raise_file_limit()
    assert limits["soft"] == 4096
    # A soft limit above the maximum that the server asks for.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**6, 10**6))
    server_module._raise_file_limit()
    assert limits["soft"] == 4096
