"""Run several server processes on one socket, and restart those that end unexpectedly."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Final

from bertsmith.errors import RunError
from bertsmith.serve.terminal import has_terminal

#: Exit status of a process whose models, keys or certificate cannot be used.
STARTUP_FAILURE: Final = 3
#: Time between two starts of a process, so that a process that always fails uses little CPU time.
_RESTART_SECONDS: Final = 1.0
#: Time until another attempt if a replacement cannot start.
_RETRY_SECONDS: Final = 30.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Runs a server on a listening socket until a signal stops it.
RunServer = Callable[[socket.socket], None]


class Supervisor:
    """Starts server processes and forwards signals to them."""

    def __init__(
        self,
        run_server: RunServer,
        sock: socket.socket,
        num_processes: int,
        *,
        log: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        """Prepare the processes.

        Args:
            run_server: called in each process; must be importable by new processes.
            sock: the listening socket. The system gives each connection to one of the processes.
            num_processes: number of processes.
            log: prints a message.
            on_exit: called with the id of each process that has ended.
        """
        self._run_server = run_server
        self._sock = sock
        self._num_processes = num_processes
        self._log = log
        self._on_exit = on_exit
        # A forked process would inherit the state of locks and threads.
        self._context = multiprocessing.get_context("spawn")
        #: Running processes and the times at which they started, in seconds.
        self._processes: dict[BaseProcess, float] = {}
        #: Running processes that replace others.
        self._replacements: set[BaseProcess] = set()
        #: Times at which replacements start, in seconds.
        self._restart_times: list[float] = []
        self._is_stopping = False
        self._signals: list[signal.Signals] = []
        self._has_terminal = has_terminal()

    def run(self) -> None:
        """Run the processes until SIGTERM or Ctrl-C stops them.

        Raises:
            RunError: a process cannot start.
        """
        has_failed = False
        with self._capture_signals():
            while len(self._processes) < self._num_processes:
                self._start_process()
            while self._processes or (self._restart_times and not self._is_stopping):
                self._start_replacements()
                wait([process.sentinel for process in self._processes], timeout=0.1)
                while self._signals:
                    self._forward_signal(self._signals.pop(0))
                for process in [item for item in self._processes if item.exitcode is not None]:
                    has_failed |= self._handle_exit(process)
        if has_failed:
            raise RunError("a server process cannot start: its message is above; correct the error")

    def _start_process(self) -> BaseProcess:
        process = self._context.Process(target=_run_process, args=(self._run_server, self._sock))
        process.start()
        self._processes[process] = time.monotonic()
        return process

    def _start_replacements(self) -> None:
        """Start the replacements that are due."""
        if self._is_stopping:
            return
        now = time.monotonic()
        num_due = sum(due <= now for due in self._restart_times)
        self._restart_times = [due for due in self._restart_times if due > now]
        self._replacements |= {self._start_process() for _ in range(num_due)}

    def _handle_exit(self, process: BaseProcess) -> bool:
        """Schedule the replacement of a process that has ended.

        Returns:
            Whether the server cannot start. If only a replacement cannot start, for example because
            a file was changed since, the other processes continue.
        """
        started_at = self._processes.pop(process)
        is_replacement = process in self._replacements
        self._replacements.discard(process)
        self._on_exit(process.pid or 0)
        if self._is_stopping:
            return False
        if process.exitcode != STARTUP_FAILURE:
            self._log(
                f"a server process ended with status {process.exitcode}; starting another one"
            )
            self._restart_times.append(started_at + _RESTART_SECONDS)
            return False
        if is_replacement and self._processes:
            self._log(
                "a new server process cannot start: its message is above; correct the error; the "
                f"next attempt is in {_RETRY_SECONDS:g} seconds"
            )
            self._restart_times.append(time.monotonic() + _RETRY_SECONDS)
            return False
        self._stop(signal.SIGTERM)
        return True

    def _forward_signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes; SIGHUP stops them if the terminal was closed."""
        if number == signal.SIGHUP and not (self._has_terminal and not has_terminal()):
            self._send(number)
        else:
            self._stop(signal.SIGTERM if number == signal.SIGHUP else number)

    def _stop(self, number: signal.Signals) -> None:
        self._is_stopping = True
        # New connections are refused when the processes have closed the socket, too.
        self._sock.close()
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    @contextmanager
    def _capture_signals(self) -> Iterator[None]:
        """Collect signals for the loop of ``run``; signals that are ignored remain ignored."""

        def collect(number: int, _: FrameType | None) -> None:
            self._signals.append(signal.Signals(number))

        previous = {
            number: signal.signal(number, collect)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _run_process(run_server: RunServer, sock: socket.socket) -> None:
    """Run a server in a new process."""
    # Ctrl-C in a terminal reaches only the supervisor, which forwards it.
    os.setpgid(0, 0)
    # Until the server handles signals, Ctrl-C ends the process silently, and SIGHUP has no effect.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, _ignore_signal)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    run_server(sock)


def _ignore_signal(_: int, __: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, the server replaces this handler."""


def _stop_with_parent() -> None:
    """Stop this process when the supervisor was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
