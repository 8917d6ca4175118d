"""A pool of worker processes for ``prepare``; each worker runs one task at a time.

Workers are new Python processes, not forks. So they import only the modules they need, whatever the
parent process has imported, and do not import the parent's main module.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import NoReturn, Self

from bertsmith.data.worker import ShardTask, WorkerFailure
from bertsmith.errors import StoreError

#: Workers import from the same places as this process, and not from the current directory.
_WORKER_CODE = "import sys; sys.path[:] = {path!r}; from bertsmith.data.worker import main; main()"


class WorkerPool:
    """Worker processes that each run ``bertsmith.data.worker.main``.

    At its exit, the context manager waits for the current tasks and then ends the workers.
    """

    def __init__(self, max_workers: int, arguments: Sequence[str]) -> None:
        """Create the pool, without workers. A worker is started if a task finds no idle worker.

        Args:
            max_workers: Maximum number of processes.
            arguments: Arguments of every worker, after the file descriptor of its connection.
        """
        self._max_workers = max_workers
        self._arguments = arguments
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}
        self._idle: list[Connection] = []

    def submit(self, task: ShardTask) -> None:
        """Send a task to a worker; if all are busy, wait until one has finished its task.

        Raises:
            StoreError: A worker died.
            BertsmithError, OSError, MemoryError: The task of a worker failed for this reason.
            RuntimeError: The task of a worker failed for another reason.
        """
        if not self._idle:
            finished = wait(list(self._workers), 0)
            if not finished and len(self._workers) < self._max_workers:
                self._start_worker()
            else:
                self._wait_for_worker()
        # If the worker has died, ``_wait_for_worker`` raises the error later.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._idle.pop().send(task)

    def _start_worker(self) -> None:
        """Start a worker, which is idle at first."""
        connection, worker_end = Pipe()
        descriptor = worker_end.fileno()
        code = _WORKER_CODE.format(path=sys.path)
        command = [sys.executable, "-c", code, str(descriptor), *self._arguments]
        # S603 warns about untrusted input: the arguments come from this program.
        process = subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)  # noqa: S603
        worker_end.close()
        self._workers[connection] = process
        self._idle.append(connection)

    def drain(self) -> None:
        """Wait until all workers are idle; errors are those of ``submit``."""
        while len(self._idle) < len(self._workers):
            self._wait_for_worker()

    def _wait_for_worker(self) -> None:
        """Wait until a busy worker has finished its task; errors are those of ``submit``."""
        busy = [connection for connection in self._workers if connection not in self._idle]
        connection = wait(busy)[0]
        assert isinstance(connection, Connection)
        try:
            failure: WorkerFailure | None = connection.recv()
        except (EOFError, ConnectionResetError):
            raise StoreError(_describe_death(self._workers[connection].wait())) from None
        self._idle.append(connection)
        if failure is not None:
            raise_failure(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in self._workers:
            connection.close()
        for process in self._workers.values():
            process.wait()


def raise_failure(failure: WorkerFailure) -> NoReturn:
    """Raise the exception of a worker."""
    if failure.error is not None:
        raise failure.error
    raise RuntimeError(f"a worker process failed: {failure.description}")


def _describe_death(status: int) -> str:
    """Return the error message for a worker that ended with this exit status.

    Args:
        status: ``Popen.returncode``, which is negative if a signal ended the process.
    """
    if status >= 0:
        problem = f"a worker process ended with exit status {status}"
    else:
        problem = f"a worker process was ended by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        problem += "; the machine may have run out of memory: try fewer --workers"
    return f"{problem}. Run the same command again: it resumes from the finished shards"
