"""Queue of the page's function calls, limited in number, with results that expire."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bertsmith.errors import BertsmithError
from bertsmith.serve.deadline import BusyError
from bertsmith.serve.errors import log_failure
from bertsmith.serve.page.library import gr

#: Jobs that run concurrently; the server batches their sequences.
NUM_THREADS = 8
#: Maximum number of queued and running jobs.
MAX_PENDING = 64
#: Maximum number of finished jobs with an unread result, and seconds until a result expires.
MAX_RESULTS = 64
RESULT_SECONDS = 60.0
#: Proxies close connections that are silent for a minute.
_HEARTBEAT_SECONDS = 15.0


@dataclass(eq=False)
class Job:
    """One call of a page function.

    Attributes:
        session: session whose reader gets the result; None if the caller waits for it.
        job_id: unique id.
        running: whether the call has started.
        finished: set once the job has a ``value`` or an ``error``.
        value: result of the call.
        error: error message for the visitor.
    """

    session: str | None
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    running: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    value: Any = None
    error: str | None = None


class JobQueue:
    """Runs page functions on a thread pool. Methods must be called on the event loop.

    Arguments and results are dropped once the result is read or has expired.
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
        #: Unfinished jobs, including running ones whose reader has left.
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        #: Jobs of sessions by id, oldest first, until their result is read.
        self._jobs: dict[str, Job] = {}
        #: Event that wakes the newest reader of each session.
        self._readers: dict[str, asyncio.Event] = {}

    @property
    def num_pending(self) -> int:
        """Number of queued and running jobs."""
        return len(self._tasks)

    @property
    def num_results(self) -> int:
        """Number of finished jobs with an unread result."""
        return sum(job.finished.is_set() for job in self._jobs.values())

    @property
    def num_readers(self) -> int:
        """Number of sessions with a reader."""
        return len(self._readers)

    def submit(self, call: Callable[[], Any], session: str | None = None) -> Job:
        """Queue a call and return its job.

        Raises:
            BusyError: the queue is full.
        """
        if self.num_pending >= self._max_pending:
            raise BusyError(
                f"the page is busy: {self.num_pending} requests are pending; retry", 1.0
            )
        job = Job(session)
        task = asyncio.get_running_loop().create_task(self._run(job, call))
        self._tasks[job] = task
        task.add_done_callback(partial(self._finish, job))
        if session is not None:
            self._jobs[job.job_id] = job
            self._wake(session)
        return job

    async def results(self, session: str) -> AsyncIterator[Job | None]:
        """Yield a session's jobs as they finish, and None as a heartbeat, until there are none.

        A newer reader of the same session replaces this one. When the reader leaves, queued jobs of
        the session are dropped.
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
                elif not await _wait_for_event(wake):
                    yield None
        finally:
            if self._readers.get(session) is wake:
                del self._readers[session]
                self._drop(session)

    def close(self) -> None:
        """Drop queued jobs; running ones finish."""
        for job, task in list(self._tasks.items()):
            if not job.running:
                task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, job: Job, call: Callable[[], Any]) -> None:
        async with self._slots:
            # Running jobs are not cancelled: the thread would continue although its slot is free.
            job.running = True
            loop = asyncio.get_running_loop()
            job.value, job.error = await loop.run_in_executor(self._threads, _call_safely, call)

    def _finish(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._tasks[job]
        if task.cancelled() or task.exception() is not None:
            job.error = "the server is shutting down"
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


async def _wait_for_event(event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(_HEARTBEAT_SECONDS):
            return await event.wait()
    except TimeoutError:
        return False


def _call_safely(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return (value, None), or (None, error message for the visitor)."""
    try:
        return call(), None
    except gr.Error as error:
        return None, str(error.message)
    except BertsmithError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - reported to the visitor
        log_failure("a page function", error)
        return None, "internal server error; see the server's log"
