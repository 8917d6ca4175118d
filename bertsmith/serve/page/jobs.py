"""A queue of the page's requests, bounded in number, with results that expire."""

import asyncio
import logging
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bertsmith.errors import BertsmithError
from bertsmith.serve.deadline import BusyError
from bertsmith.serve.page.library import gr

#: Jobs that run at the same time; the models batch what they compute.
NUM_THREADS = 8
#: Jobs that may be queued or running.
MAX_PENDING = 64
#: Finished jobs whose results wait for a reader, and for how many seconds.
MAX_RESULTS = 64
RESULT_SECONDS = 60.0
#: Proxies close connections that are silent for a minute.
_HEARTBEAT_SECONDS = 15.0
_LOG = logging.getLogger("bertsmith.serve")


@dataclass(eq=False)
class Job:
    """One call of a page function. Once ``finished`` is set, it has a ``value`` or an ``error``.

    session: names the reader that collects the result; None if the caller waits for it.
    error: a message for the visitor.
    """

    session: str | None
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    running: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    value: Any = None
    error: str | None = None


class JobQueue:
    """Runs page functions on a few threads. All methods belong to the event loop.

    Nothing of a call is kept once its result is read or has expired.
    """

    def __init__(
        self,
        *,
        max_pending: int = MAX_PENDING,
        max_results: int = MAX_RESULTS,
        result_seconds: float = RESULT_SECONDS,
    ) -> None:
        self._max_pending, self._max_results = max_pending, max_results
        self._result_seconds = result_seconds
        self._threads = ThreadPoolExecutor(NUM_THREADS, "page")
        self._slots = asyncio.Semaphore(NUM_THREADS)
        #: Unfinished jobs, also those whose reader is gone while they run.
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        #: Jobs with a reader by id until their result is read, oldest first.
        self._jobs: dict[str, Job] = {}
        #: Wakes the newest reader of each session.
        self._readers: dict[str, asyncio.Event] = {}

    @property
    def num_pending(self) -> int:
        """Number of jobs that are queued or running."""
        return len(self._tasks)

    @property
    def num_results(self) -> int:
        """Number of finished jobs that wait for a reader."""
        return sum(job.finished.is_set() for job in self._jobs.values())

    @property
    def num_readers(self) -> int:
        """Number of sessions with a reader."""
        return len(self._readers)

    def submit(self, call: Callable[[], Any], session: str | None = None) -> Job:
        """Queue a call and return its job.

        Raises:
            BusyError: as many jobs are pending as the queue takes.
        """
        if self.num_pending >= self._max_pending:
            raise BusyError(f"the page is busy: {self.num_pending} requests wait; try again", 1.0)
        job = Job(session)
        task = asyncio.get_running_loop().create_task(self._run(job, call))
        self._tasks[job] = task
        task.add_done_callback(partial(self._finish, job))
        if session is not None:
            self._jobs[job.job_id] = job
            self._wake(session)
        return job

    async def results(self, session: str) -> AsyncIterator[Job | None]:
        """Yield a session's jobs as they finish, and None as a heartbeat, until none is left.

        A newer reader of the same session takes over and ends this one. Queued jobs of a session
        whose reader leaves are dropped.
        """
        wake = asyncio.Event()
        replaced = self._readers.get(session)
        self._readers[session] = wake
        if replaced is not None:
            replaced.set()
        try:
            while self._readers.get(session) is wake:
                wake.clear()
                jobs = [job for job in self._jobs.values() if job.session == session]
                if not jobs:
                    return
                ready = next((job for job in jobs if job.finished.is_set()), None)
                if ready is not None:
                    del self._jobs[ready.job_id]
                    yield ready
                elif not await _is_set_in_time(wake):
                    yield None
        finally:
            if self._readers.get(session) is wake:
                del self._readers[session]
                self._drop(session)

    def close(self) -> None:
        """Drop what is queued; running calls end by themselves."""
        for job, task in list(self._tasks.items()):
            if not job.running:
                task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, job: Job, call: Callable[[], Any]) -> None:
        async with self._slots:
            # A running job is not cancelled: its thread would go on, and its slot be free.
            job.running = True
            loop = asyncio.get_running_loop()
            job.value, job.error = await loop.run_in_executor(self._threads, _outcome, call)

    def _finish(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._tasks[job]
        if task.cancelled() or task.exception() is not None:
            job.error = "the server is being stopped"
        job.finished.set()
        if job.session is None:
            return
        self._wake(job.session)
        loop = asyncio.get_running_loop()
        loop.call_later(self._result_seconds, self._jobs.pop, job.job_id, None)
        unread = [other for other in self._jobs.values() if other.finished.is_set()]
        for other in unread[: max(len(unread) - self._max_results, 0)]:
            del self._jobs[other.job_id]

    def _wake(self, session: str) -> None:
        if session in self._readers:
            self._readers[session].set()

    def _drop(self, session: str) -> None:
        for job in [job for job in self._jobs.values() if job.session == session]:
            del self._jobs[job.job_id]
            if job in self._tasks and not job.running:
                self._tasks[job].cancel()


async def _is_set_in_time(event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(_HEARTBEAT_SECONDS):
            return await event.wait()
    except TimeoutError:
        return False


def _outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return a call's value, or None and a message for the visitor."""
    try:
        return call(), None
    except gr.Error as error:
        return None, str(error.message)
    except BertsmithError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - every failure has to reach the visitor
        # Without the error's own message, which may quote what the visitor typed.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _LOG.error("a page function failed with %s:\n%s", type(error).__name__, frames)
        return None, "the server failed at this; its log says where"
