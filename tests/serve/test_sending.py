"""Clients that do not read their answers: bounded in time and memory, and counted."""

import asyncio
import json
import socket

from bertsmith.serve.models import ServedModel
from bertsmith.serve.sending import MIN_PROGRESS, Sender
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import TIMEOUT, wait_until
from tests.serve.model_server import RunningServer, run_server

#: Of the answer that clients do not read; systems hold less.
_MIN_SIZE = 10 * 2**20


class FakeConnection:
    """A connection whose client reads when the test says so."""

    def __init__(self, num_unsent: int) -> None:
        self.unsent, self.is_aborted = num_unsent, False
        self._is_sent = asyncio.Event()

    def num_unsent(self) -> int:
        """Return the bytes that are unsent."""
        return self.unsent

    def is_sending(self) -> bool:
        """Return whether any are."""
        return self.unsent > 0

    async def drain(self) -> None:
        """Wait until none is."""
        await self._is_sent.wait()

    def abort(self) -> None:
        """End."""
        self.is_aborted = True
        self.read(self.unsent)

    def read(self, num_bytes: int) -> None:
        """Have the client read."""
        self.unsent -= num_bytes
        if not self.unsent:
            self._is_sent.set()


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """So is one that reads next to nothing; one that reads steadily gets a large answer."""

    async def run() -> None:
        clock = Clock()
        sender = Sender(ServeSettings(send_seconds=10.0), clock, interval=1000.0)
        size = 10 * MIN_PROGRESS
        still, trickle, steady = (FakeConnection(size) for _ in range(3))
        tasks = [asyncio.ensure_future(sender.drain(own)) for own in (still, trickle, steady)]
        await asyncio.sleep(0)
        for _ in range(10):
            assert not steady.is_aborted
            trickle.read(1)
            steady.read(MIN_PROGRESS)
            clock.now += 1000.0 if steady.unsent == 0 else 6.0
            sender._checked_at = float("-inf")
            sender.check()
        assert await asyncio.gather(*tasks) == [False, False, True]
        assert (still.is_aborted, trickle.is_aborted, steady.is_aborted) == (True, True, False)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT))


def test_unread_answers_have_a_bound_of_memory() -> None:
    """Beyond it those that stand still longest are cut off, and no more than need be."""

    async def run() -> None:
        clock = Clock()
        sender = Sender(ServeSettings(unsent_bytes=100), clock, interval=2.0)
        first, second, third = (FakeConnection(60) for _ in range(3))
        tasks = []
        for connection in (first, second, third):
            tasks.append(asyncio.ensure_future(sender.drain(connection)))
            await asyncio.sleep(0)
            clock.now += 2.0
        first.read(10)
        sender.check()
        # Of 50, 60 and 60 bytes; the first read just now.
        assert (first.is_aborted, second.is_aborted, third.is_aborted) == (False, True, True)
        first.read(50)
        assert await asyncio.gather(*tasks) == [True, False, False]

    asyncio.run(asyncio.wait_for(run(), TIMEOUT))


def _ask_and_do_not_read(server: RunningServer) -> socket.socket:
    """Ask for an answer far larger than the system's buffers; return the connection."""
    body = {"inputs": ["the smith worked " * 30] * 250, "layer": [0, 1, 2]}
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(TIMEOUT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = (
        "POST /embed_all HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def _read_all(connection: socket.socket) -> int:
    """Return how many bytes come until the connection ends."""
    size = 0
    while chunk := connection.recv(2**20):
        size += len(chunk)
    return size


def test_a_request_is_active_until_its_answer_is_read(models: list[ServedModel]) -> None:
    """Its place is free once the client has read everything."""
    with run_server(models[:1], ServeSettings(requests=1, seconds=TIMEOUT)) as server:
        with _ask_and_do_not_read(server) as connection:
            assert server.post("/embed", {"inputs": "a"}).status_code == 429
            assert _read_all(connection) > _MIN_SIZE
        wait_until(lambda: server.post("/embed", {"inputs": "a"}).status_code == 200)


def test_a_client_that_does_not_read_frees_its_place(models: list[ServedModel]) -> None:
    """After the time for it the connection ends and others are answered."""
    settings = ServeSettings(requests=1, seconds=TIMEOUT, send_seconds=0.2)
    with run_server(models[:1], settings) as server, _ask_and_do_not_read(server) as connection:
        wait_until(lambda: server.post("/embed", {"inputs": "a"}).status_code == 200)
        # What the system holds still comes, and then the end.
        assert 0 < _read_all(connection) < _MIN_SIZE
