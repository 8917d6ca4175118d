"""Starting a server: sockets, signals and the limit of open files."""

import asyncio
import resource
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve import server as server_module
from bertsmith.serve import terminal
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.middleware import RequestMiddleware
from bertsmith.serve.server import create_config, create_server, serve_until_signal
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.sockets import bind_socket, bind_unix_socket, start_listening
from bertsmith.serve.terminal import ignore_hangups
from tests.serve.model_pause import wait_until


def _empty_app() -> RequestMiddleware:
    """Return the middleware of an app that handles no requests."""
    return RequestMiddleware(
        lambda *_: None,  # type: ignore[arg-type]
        settings=ServeSettings(),
        metrics=Metrics(),
        admission=None,  # type: ignore[arg-type]
    )


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
    settings = ServeSettings()
    with pytest.raises(SettingsError, match=message):
        serve_until_signal(_empty_app(), create_config(settings), settings, third)
    socket.create_connection(("127.0.0.1", port), 60).close()
    first.close()


def test_sighup_reloads_unless_it_is_ignored() -> None:
    """SIGHUP calls the reload function; under nohup, which ignores SIGHUP, nothing happens."""
    previous_handler = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, handler)
            reloaded = threading.Event()
            settings = ServeSettings()
            config = create_config(settings)
            server = create_server(_empty_app(), config, settings, reloaded.set)
            with server.capture_signals():
                signal.raise_signal(signal.SIGHUP)
                assert reloaded.wait(60 if handler is signal.SIG_DFL else 0) == (
                    handler is signal.SIG_DFL
                )
                assert not server.should_exit
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def test_failed_reload_does_not_disable_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of the reload function is logged, and the next SIGHUP reloads."""
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    calls: Queue[None] = Queue()

    def reload() -> None:
        calls.put(None)
        raise ValueError

    try:
        server = create_server(_empty_app(), create_config(ServeSettings()), reload=reload)
        with server.capture_signals():
            for _ in range(2):
                signal.raise_signal(signal.SIGHUP)
                calls.get(timeout=60)
            wait_until(lambda: caplog.text.count("a reload failed with ValueError") == 2)
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def test_server_stops_when_its_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing terminal sends SIGHUP to its processes, which then have no terminal."""
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        monkeypatch.setattr(server_module, "has_terminal", lambda: True)
        server = create_server(_empty_app(), create_config(ServeSettings()))
        with server.capture_signals():
            monkeypatch.setattr(server_module, "has_terminal", lambda: False)
            signal.raise_signal(signal.SIGHUP)
            assert server.should_exit
            server._captured_signals.clear()
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


@pytest.mark.parametrize("has_terminal", [True, False])
def test_sighup_before_the_start_is_ignored_unless_the_terminal_is_closed(
    monkeypatch: pytest.MonkeyPatch, has_terminal: bool
) -> None:
    """A closed terminal ends the command; a server without a terminal ignores the signal."""
    hangups: list[int] = []
    previous_handler = signal.signal(signal.SIGHUP, lambda number, _: hangups.append(number))
    try:
        monkeypatch.setattr(terminal, "has_terminal", lambda: has_terminal)
        with ignore_hangups():
            signal.raise_signal(signal.SIGHUP)
            assert not hangups
            monkeypatch.setattr(terminal, "has_terminal", lambda: False)
            signal.raise_signal(signal.SIGHUP)
            assert len(hangups) == has_terminal
        # nohup ignores SIGHUP; it remains ignored.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ignore_hangups():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def test_server_drains_before_it_stops() -> None:
    """After SIGTERM, the server runs for ``drain_seconds`` without being ready."""
    app = _empty_app()
    settings = ServeSettings(drain_seconds=5.0)
    server: Any = create_server(app, create_config(settings), settings)

    def state_at(now: float) -> tuple[bool, bool]:
        """Return whether the server stops, and whether it is ready."""
        server._clock = lambda: now
        return asyncio.run(server.on_tick(1)), not app.control.is_draining

    assert state_at(100.0) == (False, True)
    server.handle_exit(signal.SIGTERM, None)
    assert state_at(104.9) == (False, False)
    assert state_at(105.0) == (True, False)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_drain_time(signal_number: signal.Signals) -> None:
    """Ctrl-C, or a second SIGTERM, stops the server at once."""
    settings = ServeSettings(drain_seconds=1000.0)
    server = create_server(_empty_app(), create_config(settings), settings)
    server.handle_exit(signal.SIGTERM, None)
    assert not asyncio.run(server.on_tick(1))
    server.handle_exit(signal_number, None)
    assert asyncio.run(server.on_tick(1))


@pytest.mark.parametrize("state", ["loading", "listening", "without a lock"])
def test_unix_socket_of_a_running_server_is_not_replaced(tmp_path: Path, state: str) -> None:
    """This also holds while the server loads its models, and for servers of earlier versions."""
    path = tmp_path / "server.sock"
    with bind_unix_socket(path) as sock:
        if state != "loading":
            start_listening(sock)
        if state == "without a lock":
            (tmp_path / ".server.sock.lock").unlink()
        inode = path.stat().st_ino
        with (
            pytest.raises(SettingsError, match="another server uses it"),
            bind_unix_socket(path),
        ):
            pass
        assert path.stat().st_ino == inode


def test_unix_socket_of_a_stopped_server_is_replaced_or_removed(tmp_path: Path) -> None:
    """A crashed server leaves its file, which is replaced; a server that fails removes its file."""
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with suppress(KeyboardInterrupt), bind_unix_socket(path):
        assert path.stat().st_mode & 0o777 == 0o660
        raise KeyboardInterrupt
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "message"), [("missing/server.sock", "No such file"), ("text", "already in use")]
)
def test_unusable_path_of_a_unix_socket_is_an_error(
    tmp_path: Path, name: str, message: str
) -> None:
    """A folder that does not exist is an error, and a file that is not a socket is not removed."""
    (tmp_path / "text").write_text("a")
    with (
        pytest.raises(SettingsError, match=f"cannot create the socket: .*{message}"),
        bind_unix_socket(tmp_path / name),
    ):
        pass
    assert (tmp_path / "text").read_text() == "a"


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
