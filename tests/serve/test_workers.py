"""Several server processes behind one port."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bertsmith.errors import RunError
from bertsmith.serve import supervisor as supervisor_module
from bertsmith.serve.supervisor import STARTUP_FAILURE, Supervisor
from tests.serve.model_pause import TIMEOUT, wait_until
from tests.serve.server_process import find_free_port, is_refused, run_process


def is_running(process_id: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_answer_restart_reload_and_stop(model_dirs: dict[str, Path]) -> None:
    """Two processes share a port and their metrics; a killed one is replaced; SIGTERM stops all."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"

    def read_process_id(line: str) -> int:
        return int(line.rpartition("[process ")[2].rstrip("]\n"))

    # A connection for each request, so that the requests are answered by both processes.
    def embed() -> int:
        return httpx.post(f"{url}/embed", json={"inputs": "a"}, timeout=TIMEOUT).status_code

    with run_process(model_dirs["plain"], "--port", str(port), "--workers", "2") as server:
        ids = [read_process_id(server.lines[-1])]
        ids.append(read_process_id(server.wait_for_line("serving at")))
        assert [embed() for _ in range(20)] == [200] * 20
        metrics = httpx.get(f"{url}/metrics").text
        assert 'bertsmith_sequences_total{model="plain"} 20.0' in metrics
        assert "bertsmith_waiting_tokens 0.0" in metrics
        os.kill(ids[0], signal.SIGKILL)
        server.wait_for_line("ended with status -9; starting another one")
        # The other process answers in the meantime.
        assert embed() == 200
        ids[0] = read_process_id(server.wait_for_line("serving at"))
        server.process.send_signal(signal.SIGHUP)
        for _ in ids:
            server.wait_for_line("reloaded the models")
        assert embed() == 200
        assert all(is_running(process_id) for process_id in ids)
        # A process waits for this body; meanwhile, new connections are refused.
        with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection:
            connection.sendall(
                b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
            )
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(port))
            assert any(is_running(process_id) for process_id in ids)
        assert server.stop() == 0
    assert not any(is_running(process_id) for process_id in ids)


def test_supervisor_without_a_reader_of_its_log_restarts_processes(
    model_dirs: dict[str, Path],
) -> None:
    """If stderr cannot be written, a killed process is replaced, and SIGTERM stops all."""
    with run_process(model_dirs["plain"], "--port", "0", "--workers", "2") as server:
        process_id = int(server.wait_for_line("serving at").rpartition(" ")[2].rstrip("]\n"))
        supervisor, stderr = server.process, server.process.stderr
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        before = set(children.read_text().split())
        assert stderr is not None
        stderr.close()
        os.kill(process_id, signal.SIGKILL)
        wait_until(lambda: len(set(children.read_text().split()) - before) == 1)
        supervisor.terminate()
        assert supervisor.wait(TIMEOUT) == 0


def test_worker_that_cannot_start_stops_the_server(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """An invalid key file is reported by the processes, and the command exits with 2."""
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    completed = subprocess.run(
        [sys.executable, "-m", "bertsmith", "serve", str(model_dirs["plain"]), "--port", "0",
         "--workers", "2", "--key-file", str(keys)],
        capture_output=True, text=True, timeout=2 * TIMEOUT, check=False,
    )  # fmt: skip
    assert completed.returncode == 2
    assert "there is no API key" in completed.stderr
    assert "a server process cannot start" in completed.stderr
    assert "Traceback" not in completed.stderr


class FakeProcess:
    """A process of which tests set the exit status."""

    def __init__(self, number: int) -> None:
        self.pid = number
        self.exitcode: int | None = None
        self.sentinel = number

    def start(self) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        """Return whether the process has no exit status."""
        return self.exitcode is None


class FakeSystem:
    """The processes and signals of a supervisor; ``step`` is called instead of waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Any, num_processes: int = 2) -> None:
        self.processes: list[FakeProcess] = []
        self.signals: list[tuple[int, int]] = []
        self.ended: list[int] = []
        monkeypatch.setattr(supervisor_module, "wait", lambda *_, **__: step(self))
        monkeypatch.setattr(supervisor_module, "_RESTART_SECONDS", 0.0)
        monkeypatch.setattr(os, "kill", lambda *arguments: self.signals.append(arguments))
        self.sock = socket.socket()
        self.supervisor: Any = Supervisor(
            lambda _: None, self.sock, num_processes, log=lambda _: None, on_exit=self.ended.append
        )
        vars(self.supervisor)["_context"] = self

    def Process(self, **_: Any) -> FakeProcess:  # noqa: N802 - the name in multiprocessing
        """Return a new process."""
        self.processes.append(FakeProcess(len(self.processes)))
        return self.processes[-1]

    def end(self, number: int, status: int) -> None:
        """End a process."""
        self.processes[number].exitcode = status


def test_supervisor_forwards_hangups_unless_its_terminal_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGHUP is forwarded as it is; after the terminal was closed, it stops the processes."""
    steps = iter(range(3))
    terminal = {"is_open": True}
    monkeypatch.setattr(supervisor_module, "has_terminal", lambda: terminal["is_open"])

    def step(system: FakeSystem) -> None:
        number = next(steps)
        if number == 2:
            for process in system.processes:
                process.exitcode = 0
            return
        terminal["is_open"] = number == 0
        system.supervisor._signals.append(signal.SIGHUP)

    system = FakeSystem(monkeypatch, step)
    system.supervisor.run()
    assert system.signals == [(0, 1), (1, 1), (0, 15), (1, 15)]
    assert system.ended == [0, 1]


def test_supervisor_replaces_ended_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends unexpectedly is replaced, but not after a signal has stopped it."""
    steps = iter(range(3))

    def step(system: FakeSystem) -> None:
        number = next(steps)
        if number == 0:
            system.end(1, -9)
        elif number == 1:
            assert len(system.processes) == 3
            assert system.sock.fileno() >= 0
            system.supervisor._signals.append(signal.SIGTERM)
        else:
            # While the processes answer their requests, new connections are refused.
            assert system.sock.fileno() == -1
            system.end(0, 0)
            system.end(2, -15)

    system = FakeSystem(monkeypatch, step)
    system.supervisor.run()
    assert len(system.processes) == 3
    assert system.signals == [(0, 15), (2, 15)]


def test_supervisor_stops_when_a_process_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes would fail in the same way, so that none is restarted."""
    steps = iter(range(2))

    def step(system: FakeSystem) -> None:
        system.end(next(steps), STARTUP_FAILURE)

    system = FakeSystem(monkeypatch, step)
    with pytest.raises(RunError, match="a server process cannot start"):
        system.supervisor.run()
    assert len(system.processes) == 2
    assert system.signals == [(1, 15)]


def test_replacement_that_cannot_start_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken key file that was saved later affects only new processes, which are tried again."""
    monkeypatch.setattr(supervisor_module, "_RETRY_SECONDS", 0.0)
    steps = iter(range(4))

    def step(system: FakeSystem) -> None:
        number = next(steps)
        if number == 0:
            system.end(1, -9)
        elif number == 1:
            system.end(2, STARTUP_FAILURE)
        elif number == 2:
            assert (len(system.processes), system.signals) == (4, [])
            # Now no other process is running.
            system.end(0, -9)
            system.end(3, -9)
        else:
            assert len(system.processes) == 6
            system.end(4, STARTUP_FAILURE)
            system.end(5, STARTUP_FAILURE)

    system = FakeSystem(monkeypatch, step)
    with pytest.raises(RunError, match="a server process cannot start"):
        system.supervisor.run()
    assert len(system.processes) == 6
