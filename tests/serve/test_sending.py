"""Clients that do not read their responses: limits of time and memory."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bertsmith.serve.deadline import Deadline, DeadlineExceededError
from bertsmith.serve.models import ServedModel
from bertsmith.serve.response_memory import MIN_COUNTED_BYTES, ResponseMemory, ResponseReservation
from bertsmith.serve.sending import MIN_PROGRESS_BYTES, ResponseMonitor
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.vectors import compute_token_matrices
from bertsmith.use.vector_settings import VectorSettings
from tests.serve.model_pause import TIMEOUT, wait_until
from tests.serve.model_server import (
    SENTENCES,
    get_middleware,
    run_server,
    send_request_without_reading,
)

#: Lower bound of the response in bytes; socket buffers are smaller.
_MIN_RESPONSE_BYTES = 10 * 2**20


class FakeConnection:
    """A connection whose client reads when the test calls ``read``."""

    def __init__(self, num_unsent_bytes: int) -> None:
        self.num_unsent_bytes = num_unsent_bytes
        self.is_aborted = False
        self._is_sent = asyncio.Event()

    def count_unsent_bytes(self) -> int:
        """Return the number of unsent bytes."""
        return self.num_unsent_bytes

    def is_write_buffer_full(self) -> bool:
        """Return whether any bytes are unsent."""
        return self.num_unsent_bytes > 0

    async def drain(self) -> None:
        """Wait until all bytes are sent."""
        await self._is_sent.wait()

    def abort(self) -> None:
        """Close the connection."""
        self.is_aborted = True
        self.read(self.num_unsent_bytes)

    @property
    def is_disconnected(self) -> bool:
        """Whether the connection was closed."""
        return self.is_aborted

    @contextmanager
    def call_on_disconnect(self, function: Callable[[], None]) -> Iterator[None]:
        """The client does not disconnect."""
        yield

    def read(self, num_bytes: int) -> None:
        """Let the client read a number of bytes."""
        self.num_unsent_bytes -= num_bytes
        if not self.num_unsent_bytes:
            self._is_sent.set()


class FakeClock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


def test_clients_that_do_not_read_are_disconnected() -> None:
    """Clients that read nothing or only a few bytes are disconnected; a steady reader is not."""

    async def scenario() -> None:
        clock = FakeClock()
        monitor = ResponseMonitor(
            ServeSettings(send_timeout_seconds=10.0),
            ResponseMemory(2**30),
            clock,
            check_interval_seconds=1000.0,
        )
        size = 10 * MIN_PROGRESS_BYTES
        stalled, trickling, steady = (FakeConnection(size) for _ in range(3))
        tasks = [
            asyncio.ensure_future(monitor.drain(connection))
            for connection in (stalled, trickling, steady)
        ]
        await asyncio.sleep(0)
        for _ in range(10):
            assert not steady.is_aborted
            trickling.read(1)
            steady.read(MIN_PROGRESS_BYTES)
            # Two steps without progress exceed the timeout of 10 seconds. The steady client ends in
            # the last step, after which even a long time does not disconnect it.
            clock.now += 1000.0 if steady.num_unsent_bytes == 0 else 6.0
            monitor._checked_at = float("-inf")
            monitor.abort_slow_connections()
        assert await asyncio.gather(*tasks) == [False, False, True]
        assert stalled.is_aborted
        assert trickling.is_aborted
        assert not steady.is_aborted

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


def test_responses_wait_for_memory() -> None:
    """A third response waits until the first one was sent; small responses do not wait."""
    memory = ResponseMemory(2 * MIN_COUNTED_BYTES)
    first, second, third, small = (ResponseReservation(memory) for _ in range(4))
    first.reserve(MIN_COUNTED_BYTES, Deadline(TIMEOUT))
    # A larger response than the maximum needs all of it, until its size is known.
    with pytest.raises(DeadlineExceededError):
        second.reserve(10**9, Deadline(0.01))
    assert not memory.is_full
    second.reserve(MIN_COUNTED_BYTES, Deadline(TIMEOUT))
    is_admitted = threading.Event()

    def reserve_third() -> None:
        third.reserve(MIN_COUNTED_BYTES, Deadline(TIMEOUT))
        is_admitted.set()

    threading.Thread(target=reserve_third, daemon=True).start()
    wait_until(lambda: memory.is_full)
    small.reserve(MIN_COUNTED_BYTES - 1, Deadline(TIMEOUT))
    assert not is_admitted.is_set()
    first.close()
    assert is_admitted.wait(TIMEOUT)
    # A response of a request that has ended is not counted.
    second.close()
    first.reserve(MIN_COUNTED_BYTES, Deadline(TIMEOUT))
    assert first.num_bytes == 0


def test_stalled_client_is_disconnected_if_others_wait_for_memory() -> None:
    """The client that stopped reading first makes room; the others stay connected."""

    async def scenario() -> None:
        clock = FakeClock()
        memory = ResponseMemory(MIN_COUNTED_BYTES)
        monitor = ResponseMonitor(ServeSettings(), memory, clock, check_interval_seconds=2.0)
        first, second = (FakeConnection(60) for _ in range(2))
        tasks: list[asyncio.Future[Any]] = []
        for connection in (first, second):
            tasks.append(asyncio.ensure_future(monitor.drain(connection)))
            await asyncio.sleep(0)
            clock.now += 2.0
        monitor.abort_slow_connections()
        assert not first.is_aborted
        ResponseReservation(memory).reserve(MIN_COUNTED_BYTES, Deadline(TIMEOUT))
        waiting = asyncio.to_thread(
            ResponseReservation(memory).reserve, MIN_COUNTED_BYTES, Deadline(1.0)
        )
        tasks.append(asyncio.ensure_future(waiting))
        while not memory.is_full:  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.01)
        clock.now += 2.0
        monitor.abort_slow_connections()
        assert (first.is_aborted, second.is_aborted) == (True, False)
        second.read(60)
        was_read = await asyncio.gather(*tasks, return_exceptions=True)
        assert was_read[:2] == [False, True]

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


@pytest.mark.parametrize("path", ["/embed_all", "/v1/embeddings"])
def test_large_responses_are_streamed(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A streamed response equals a buffered one, and arrives in several chunks."""
    body = {"input" if path.startswith("/v1") else "inputs": SENTENCES * 10}
    with run_server(models[:1]) as server:
        buffered = server.post(path, body)
        assert "content-length" in buffered.headers
        monkeypatch.setattr("bertsmith.serve.embeddings._MAX_BUFFERED_NUMBERS", 100)
        monkeypatch.setattr("bertsmith.serve.execution._CHUNK_BYTES", 100)
        streamed = server.post(path, body)
        assert streamed.headers["transfer-encoding"] == "chunked"
        assert streamed.json() == buffered.json()
        assert streamed.headers["content-type"] == "application/json"


def test_large_sparse_responses_are_counted_and_streamed(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/embed_sparse reserves memory for its vectors, and sends them in several chunks."""
    reserved: list[int] = []
    reserve = ResponseReservation.reserve

    def record(self: ResponseReservation, num_bytes: int, deadline: Deadline) -> None:
        reserved.append(num_bytes)
        reserve(self, num_bytes, deadline)

    monkeypatch.setattr(ResponseReservation, "reserve", record)
    with run_server(models[:1]) as server:
        buffered = server.post("/embed_sparse", {"inputs": SENTENCES})
        assert "content-length" in buffered.headers
        monkeypatch.setattr("bertsmith.serve.sparse._MAX_BUFFERED_ENTRIES", 100)
        monkeypatch.setattr("bertsmith.serve.execution._CHUNK_BYTES", 100)
        streamed = server.post("/embed_sparse", {"inputs": SENTENCES})
    assert streamed.headers["transfer-encoding"] == "chunked"
    assert streamed.json() == buffered.json()
    # A token id and a weight per entry. The second reservation of each request is ignored.
    assert reserved[::2] == [12 * sum(map(len, buffered.json()))] * 2


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        ("/attention", SENTENCES[0]),
        ("/fill", "the [MASK] worked"),
        ("/similarity", ["the smith"] * 100),
        ("/tokenize", SENTENCES),
    ],
)
def test_responses_in_memory_are_counted(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, path: str, inputs: Any
) -> None:
    """A request reserves memory for its response until the response was sent."""
    monkeypatch.setattr("bertsmith.serve.response_memory.MIN_COUNTED_BYTES", 1)
    reserved: list[int] = []
    close = ResponseReservation.close

    def record(self: ResponseReservation) -> None:
        reserved.append(self.num_bytes)
        close(self)

    monkeypatch.setattr(ResponseReservation, "close", record)
    with run_server(models[:1]) as server:
        response = server.post(path, {"inputs": inputs})
        assert response.status_code == 200
        wait_until(lambda: bool(reserved))
        memory: ResponseMemory = get_middleware(server)._response_memory
        wait_until(lambda: memory._num_bytes == 0)
    # Similarities reserve the maximum, because their size is not known in advance.
    assert reserved[0] >= len(response.content)
    assert path == "/similarity" or reserved[0] == len(response.content)


def test_second_reservation_has_no_effect() -> None:
    """A request that has reserved memory does not wait for more, which could block all requests."""
    memory = ResponseMemory(2 * MIN_COUNTED_BYTES)
    reservation = ResponseReservation(memory)
    for num_bytes in (MIN_COUNTED_BYTES, 2 * MIN_COUNTED_BYTES):
        reservation.reserve(num_bytes, Deadline(TIMEOUT))
        assert memory._num_bytes == MIN_COUNTED_BYTES
    reservation.close()
    assert memory._num_bytes == 0


@pytest.mark.parametrize("texts", [["?!" * 10], ["?!" * 100, "a"], ["the smith"]])
def test_reserved_memory_is_that_of_a_token_per_character(
    models: list[ServedModel], texts: list[str]
) -> None:
    """Each punctuation mark is a token; a text has at most 61 tokens, of 26 numbers each."""
    reserved: list[int] = []
    service = Service(models[:1])
    deadline = Deadline(
        TIMEOUT,
        reserve_response=lambda num_bytes, _: reserved.append(num_bytes),
        shrink_response=reserved.append,
    )
    matrices = compute_token_matrices(service, None, texts, VectorSettings(), deadline)
    service.close()
    max_tokens = sum(min(len(text) + 2, 61) for text in texts)
    assert reserved == [4 * 26 * max_tokens, sum(matrix.nbytes for matrix in matrices)]
    assert (reserved[0] == reserved[1]) == ("?" in texts[0])


def test_unread_responses_have_a_memory_limit() -> None:
    """Beyond the limit, as few clients as possible are disconnected.

    Those that stopped reading first are disconnected first.
    """

    async def scenario() -> None:
        clock = FakeClock()
        monitor = ResponseMonitor(
            ServeSettings(max_unsent_bytes=100),
            ResponseMemory(100),
            clock,
            check_interval_seconds=2.0,
        )
        first, second, third = (FakeConnection(60) for _ in range(3))
        tasks = []
        for connection in (first, second, third):
            tasks.append(asyncio.ensure_future(monitor.drain(connection)))
            await asyncio.sleep(0)
            clock.now += 2.0
        first.read(10)
        monitor.abort_slow_connections()
        # 50, 60 and 60 bytes are unsent; the first client has just read.
        assert (first.is_aborted, second.is_aborted, third.is_aborted) == (False, True, True)
        first.read(50)
        assert await asyncio.gather(*tasks) == [True, False, False]

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


def _read_all(connection: socket.socket) -> int:
    """Read until the connection closes; return the number of bytes."""
    size = 0
    while chunk := connection.recv(2**20):
        size += len(chunk)
    return size


def test_request_is_active_until_its_response_is_read(models: list[ServedModel]) -> None:
    """A request counts as concurrent until its client has read the whole response."""
    with run_server(
        models[:1], ServeSettings(max_concurrent_requests=1, request_timeout_seconds=TIMEOUT)
    ) as server:
        with send_request_without_reading(server) as connection:
            assert server.post("/embed", {"inputs": "a"}).status_code == 429
            assert _read_all(connection) > _MIN_RESPONSE_BYTES
        wait_until(lambda: server.post("/embed", {"inputs": "a"}).status_code == 200)


def test_disconnected_client_no_longer_counts(models: list[ServedModel]) -> None:
    """A slow reader is disconnected after ``send_timeout_seconds``, and others are answered."""
    settings = ServeSettings(
        max_concurrent_requests=1, request_timeout_seconds=TIMEOUT, send_timeout_seconds=0.2
    )
    with (
        run_server(models[:1], settings) as server,
        send_request_without_reading(server) as connection,
    ):
        wait_until(lambda: server.post("/embed", {"inputs": "a"}).status_code == 200)
        # The client still gets what the socket buffers hold.
        assert 0 < _read_all(connection) < _MIN_RESPONSE_BYTES
