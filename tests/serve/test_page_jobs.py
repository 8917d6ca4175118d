"""The queue of the page: what it holds is bounded in number and in time."""

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
def gate() -> Iterator[threading.Event]:
    """An event that running jobs wait for."""
    event = threading.Event()
    yield event
    event.set()


async def read_all(results: AsyncIterator[Job | None]) -> list[Any]:
    """Return the values of all results."""
    return [job.value for job in [job async for job in results] if job is not None]


def test_results_are_read_once_and_forgotten() -> None:
    """A reader gets each result of its session, ends with the last, and leaves nothing behind."""

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


def test_pending_jobs_are_limited(gate: threading.Event) -> None:
    """Jobs with and without a session share one limit; above it they are refused."""

    async def scenario() -> None:
        jobs = JobQueue(max_pending=4)
        for number in range(4):
            jobs.submit(gate.wait, "session" if number % 2 else None)
        with pytest.raises(BusyError, match="4 requests wait"):
            jobs.submit(gate.wait)
        gate.set()
        await wait_until(lambda: jobs.num_pending == 0)
        jobs.submit(gate.wait)
        jobs.close()

    asyncio.run(scenario())


def test_unread_results_are_limited() -> None:
    """However many sessions or jobs there were, only the newest results are stored."""

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
    """A result that nobody reads is dropped after its time."""

    async def scenario() -> None:
        jobs = JobQueue(result_seconds=0.0)
        job = jobs.submit(lambda: 1, "session")
        await job.finished.wait()
        await wait_until(lambda: jobs.num_results == 0)
        jobs.close()

    asyncio.run(scenario())


def test_one_reader_a_session(gate: threading.Event) -> None:
    """A newer reader replaces the older one, so readers cannot pile up."""

    async def scenario() -> None:
        jobs = JobQueue()
        jobs.submit(gate.wait, "session")
        first = asyncio.create_task(read_all(jobs.results("session")))
        await wait_until(lambda: jobs.num_readers == 1)
        second = asyncio.create_task(read_all(jobs.results("session")))
        assert await first == []
        assert jobs.num_readers == 1
        gate.set()
        assert await second == [True]
        assert jobs.num_readers == 0
        jobs.close()

    asyncio.run(scenario())


def test_a_reader_that_leaves_drops_queued_jobs(gate: threading.Event) -> None:
    """Running jobs keep their place until they end; queued ones never start."""
    started: list[int] = []

    def call(number: int) -> None:
        started.append(number)
        gate.wait()

    async def scenario() -> None:
        jobs = JobQueue()
        for number in range(NUM_THREADS + 3):
            jobs.submit(partial(call, number), "session")
        await wait_until(lambda: len(started) == NUM_THREADS)
        reader = asyncio.create_task(read_all(jobs.results("session")))
        await wait_until(lambda: jobs.num_readers == 1)
        reader.cancel()
        await wait_until(lambda: jobs.num_pending == NUM_THREADS)
        gate.set()
        await wait_until(lambda: jobs.num_pending == 0)
        assert sorted(started) == list(range(NUM_THREADS))
        assert (jobs.num_results, jobs.num_readers) == (0, 0)
        jobs.close()

    asyncio.run(scenario())


def test_the_end_of_the_server_ends_queued_jobs(gate: threading.Event) -> None:
    """Whoever waits for a queued job is told."""

    async def scenario() -> None:
        jobs = JobQueue()
        queued = [jobs.submit(gate.wait) for _ in range(NUM_THREADS + 1)][-1]
        await wait_until(lambda: jobs.num_pending == NUM_THREADS + 1)
        await asyncio.sleep(0)
        jobs.close()
        await queued.finished.wait()
        assert queued.error == "the server is being stopped"
        gate.set()

    asyncio.run(scenario())


def test_failures_are_logged_without_what_was_typed(caplog: pytest.LogCaptureFixture) -> None:
    """The visitor is told errors of ours; for any other the log has its type and place alone."""
    typed = "my secret"

    def fail() -> None:
        raise ValueError(typed)

    def refuse() -> None:
        raise InputError("no [MASK] in 'my text'")

    async def scenario() -> None:
        jobs = JobQueue()
        failed, refused = jobs.submit(fail), jobs.submit(refuse)
        await failed.finished.wait()
        await refused.finished.wait()
        assert failed.error == "the server failed at this; its log says where"
        assert refused.error == "no [MASK] in 'my text'"
        jobs.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())
    assert "ValueError" in caplog.text
    assert "in fail" in caplog.text
    assert typed not in caplog.text
    assert "my text" not in caplog.text
