"""How a server begins to listen."""

import resource
import signal
import socket

import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve import server as running
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


def test_of_two_servers_of_one_port_the_second_ends() -> None:
    """Both can bind it; who listens second is told, and does not wait for clients in vain."""
    first = bind_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    second, third = bind_socket("127.0.0.1", port), bind_socket("127.0.0.1", port)
    start_listening(first)
    message = f"cannot listen at 127.0.0.1, port {port}: Address already in use; give another"
    with pytest.raises(SettingsError, match=message):
        start_listening(second)
    guard = RequestMiddleware(lambda *_: None, settings=ServeSettings(), metrics=Metrics())  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=message):
        serve_until_signal(guard, ServeSettings(), third)
    socket.create_connection(("127.0.0.1", port), 60).close()
    first.close()


def test_sighup_is_handled_unless_it_is_ignored() -> None:
    """A terminal that closes ends the server as SIGTERM does; under nohup nothing changes."""
    guard = RequestMiddleware(lambda *_: None, settings=ServeSettings(), metrics=Metrics())  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, handler)
            own = create_server(guard, create_config(ServeSettings()))
            with own.capture_signals():
                signal.raise_signal(signal.SIGHUP)
                assert own.should_exit == (handler is signal.SIG_DFL)
                own._captured_signals.clear()
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what the system allows, and never lowered."""
    limits = {"soft": 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(soft=pair[0]))
    running._raise_file_limit()
    assert limits["soft"] == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**6, 10**6))
    running._raise_file_limit()
    assert limits["soft"] == 4096
