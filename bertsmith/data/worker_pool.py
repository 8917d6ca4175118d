"""The worker processes of ``prepare``: one task each at a time, in processes of their own.

It never knows what a task is. The workers are fresh Python processes and no forks: they load
only what they need, whatever the caller has loaded, and need nothing of the caller's main module.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from bertsmith.errors import StoreError

_START = "import sys; from {module} import main; main()"


class WorkerPool:
    """Some workers that each run ``module.main`` with a connection and ``arguments``.

    Leaving the block lets every worker finish its task, then ends it.
    """

    def __init__(self, count: int, module: str, arguments: Sequence[str]) -> None:
        """``count``: the most workers; each is started when a task has no idle worker."""
        self._max_workers = count
        self._module = module
        self._arguments = arguments
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}
        self._idle: list[Connection] = []

    def submit(self, task: Any) -> Any:
        """Give a task to a worker, waiting for an idle one; return what that answered before.

        The answer is None if the worker had no task before.
        """
        answer = None
        if not self._idle:
            answered = wait(list(self._workers), 0)
            if not answered and len(self._workers) < self._max_workers:
                self._start()
            else:
                answer = self._receive()
        # Of a worker that has died, the answer that never comes will tell.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._idle.pop().send(task)
        return answer

    def _start(self) -> None:
        """Start a worker, idle."""
        connection, other_end = Pipe()
        number = other_end.fileno()
        code = _START.format(module=self._module)
        command = [sys.executable, "-c", code, str(number), *self._arguments]
        # The arguments are this program's own, and there is no shell.
        process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)  # noqa: S603
        other_end.close()
        self._workers[connection] = process
        self._idle.append(connection)

    def drain(self) -> list[Any]:
        """Wait until no worker has a task; return what they answered."""
        answers = []
        while len(self._idle) < len(self._workers):
            answers.append(self._receive())
        return answers

    def _receive(self) -> Any:
        """Return the first answer of those that work; it is idle then."""
        busy = [connection for connection in self._workers if connection not in self._idle]
        connection = wait(busy)[0]
        assert isinstance(connection, Connection)
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            raise StoreError(_death(self._workers[connection].wait())) from None
        self._idle.append(connection)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._workers:
            connection.close()
        for process in self._workers.values():
            process.wait()


def _death(status: int) -> str:
    how = f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    hint = "; the machine may have run out of memory: try fewer --workers" if status == -9 else ""
    return (
        f"a worker process was ended {how}{hint}. Run the same command again: "
        "it goes on from the finished shards"
    )
