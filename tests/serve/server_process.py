"""Run ``bertsmith serve`` in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.serve.model_pause import TIMEOUT


def find_free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_refused(port: int) -> bool:
    """Return whether connections to a port are refused."""
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT).close()
    except ConnectionRefusedError:
        return True
    return False


class ServerProcess:
    """A server process.

    Attributes:
        process: the process.
        lines: lines that ``wait_for_line`` has read from its standard error.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []

    def wait_for_line(self, text: str) -> str:
        """Read standard error up to a line with a text, and return the line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}: {self.lines}")

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(signal_number)
        _, stderr = self.process.communicate(timeout=TIMEOUT)
        self.lines += stderr.splitlines()
        return self.process.returncode


@contextmanager
def run_process(model_dir: Path, *options: str) -> Iterator[ServerProcess]:
    """Start ``bertsmith serve MODEL`` with options, wait until it serves, and end it."""
    command = [sys.executable, "-m", "bertsmith", "serve", str(model_dir), *options]
    # A child of `nohup` inherits an ignored SIGHUP, and the server leaves it ignored.
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            [*command, "--no-page", "--threads", "1", "--set", "serve.drain_seconds=0"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        signal.signal(signal.SIGHUP, previous_handler)
    server = ServerProcess(process)
    try:
        server.wait_for_line("serving at")
        yield server
    finally:
        process.kill()
        process.wait()
