"""The job queue of the page: limits of pending jobs and of results."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from bertsmith.errors import InputError
from bertsmith.serve.deadline import BusyError
from tests.serve.model_server import wait_until

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from bertsmith.serve.page.jobs import NUM_THREADS, Job, JobQueue


@pytest.fixture
def resume() -> Iterator[threading.Event]:
    """An event that running jobs wait for."""
    event = threading.Event()
    yield event
    event.set()


async def read_all(results: AsyncIterator[Job | None]) -> list[Any]:
    """Return the values of all jobs of a session."""
    return [job.value for job in [job async for job in results] if job is not None]


def test_results_are_read_once() -> None:
    """A reader gets each result of its session, and the queue is empty afterwards."""

    async def scenario() -> None:
        jobs = JobQueue()
        for value in range(3):
            jobs.submit(partial(int, value), "a")
        jobs.submit(lambda: "other", "b")
        assert sorted(await read_all(jobs.results("a"))) == [0, 1, 2]
        assert await read_all(jobs.results("a")) == []
        assert await read_all(jobs.results("b")) == ["other"]
        assert (jobs.num_pending, jobs.num_results, jobs.num_readers) == (0, 0, 0)
        jobs.close()

    asyncio.run(scenario())


def test_pending_jobs_are_limited(resume: threading.Event) -> None:
    """Jobs with and without a session share one limit; beyond it, BusyError is raised."""

    async def scenario() -> None:
        jobs = JobQueue(max_pending=4)
        for number in range(4):
            jobs.submit(resume.wait, "session" if number % 2 else None)
        with pytest.raises(BusyError, match="4 requests are pending"):
            jobs.submit(resume.wait)
        resume.set()
        await wait_until(lambda: jobs.num_pending == 0)
        jobs.submit(resume.wait)
        jobs.close()

    asyncio.run(scenario())


def test_unread_results_are_limited() -> None:
    """Only the newest results are kept, whatever the number of sessions and jobs."""

    async def scenario() -> None:
        jobs = JobQueue(max_results=5)
        for number in range(40):
            job = jobs.submit(lambda: "x" * 1000, f"session-{number % 20}")
            await job.finished.wait()
        assert jobs.num_results == 5
        assert await read_all(jobs.results("session-0")) == []
        assert len(await read_all(jobs.results("session-19"))) == 1
        jobs.close()

    asyncio.run(scenario())


def test_unread_results_expire() -> None:
    """An unread result is dropped after ``result_seconds``."""

    async def scenario() -> None:
        jobs = JobQueue(result_seconds=0.0)
        job = jobs.submit(lambda: 1, "session")
        await job.finished.wait()
        await wait_until(lambda: jobs.num_results == 0)
        jobs.close()

    asyncio.run(scenario())


def test_newer_reader_replaces_the_older_one(resume: threading.Event) -> None:
    """A session has one reader, so the number of readers is limited."""

    async def scenario() -> None:
        jobs = JobQueue()
        jobs.submit(resume.wait, "session")
        first = asyncio.create_task(read_all(jobs.results("session")))
        await wait_until(lambda: jobs.num_readers == 1)
        second = asyncio.create_task(read_all(jobs.results("session")))
        assert await first == []
        assert jobs.num_readers == 1
        resume.set()
        assert await second == [True]
        assert jobs.num_readers == 0
        jobs.close()

    asyncio.run(scenario())


def test_queued_jobs_are_dropped_when_the_reader_leaves(resume: threading.Event) -> None:
    """Running jobs occupy their threads until they end; queued jobs do not start."""
    started: list[int] = []

    def call(number: int) -> None:
        started.append(number)
        resume.wait()

    async def scenario() -> None:
        jobs = JobQueue()
        for number in range(NUM_THREADS + 3):
            jobs.submit(partial(call, number), "session")
        await wait_until(lambda: len(started) == NUM_THREADS)
        reader = asyncio.create_task(read_all(jobs.results("session")))
        await wait_until(lambda: jobs.num_readers == 1)
        reader.cancel()
        await wait_until(lambda: jobs.num_pending == NUM_THREADS)
        resume.set()
        await wait_until(lambda: jobs.num_pending == 0)
        assert sorted(started) == list(range(NUM_THREADS))
        assert (jobs.num_results, jobs.num_readers) == (0, 0)
        jobs.close()

    asyncio.run(scenario())


def test_close_fails_queued_jobs(resume: threading.Event) -> None:
    """A caller that waits for a queued job gets an error."""

    async def scenario() -> None:
        jobs = JobQueue()
        queued = [jobs.submit(resume.wait) for _ in range(NUM_THREADS + 1)][-1]
        await wait_until(lambda: jobs.num_pending == NUM_THREADS + 1)
        await asyncio.sleep(0)
        jobs.close()
        await queued.finished.wait()
        assert queued.error == "the server is shutting down"
        resume.set()

    asyncio.run(scenario())


def test_errors_are_logged_without_the_input(caplog: pytest.LogCaptureFixture) -> None:
    """Unexpected errors are logged by type and traceback; BertsmithErrors go to the visitor."""
    user_input = "my secret"

    def fail() -> None:
        raise ValueError(user_input)

    def reject() -> None:
        raise InputError("no [MASK] in 'my text'")

    async def scenario() -> None:
        jobs = JobQueue()
        failed, rejected = jobs.submit(fail), jobs.submit(reject)
        await failed.finished.wait()
        await rejected.finished.wait()
        assert failed.error == "internal server error; see the server's log"
        assert rejected.error == "no [MASK] in 'my text'"
        jobs.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())
    assert "ValueError" in caplog.text
    assert "in fail" in caplog.text
    assert user_input not in caplog.text
    assert "my text" not in caplog.text
