"""Unfinished request bodies: limits of number, memory and time."""

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest

from bertsmith.serve.models import ServedModel
from bertsmith.serve.receiving import BodyError, BodyReceiver, IncomingBody
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import TIMEOUT
from tests.serve.model_server import run_server


def _message(content: bytes, *, more_body: bool = True) -> dict[str, Any]:
    """Return the ASGI message of a chunk."""
    return {"type": "http.request", "body": content, "more_body": more_body}


class FakeClient:
    """A client that sends chunks when the test calls ``send``."""

    def __init__(self, receiver: BodyReceiver) -> None:
        self._chunks: asyncio.Queue[Any] = asyncio.Queue()
        self.body = IncomingBody()
        self.task = asyncio.ensure_future(receiver.receive(self.body, self._chunks.get))

    async def send(self, content: bytes, *, more_body: bool = True) -> None:
        """Send a chunk and wait until it is received."""
        self._chunks.put_nowait(_message(content, more_body=more_body))
        # Let the receiver's task run.
        for _ in range(10):
            await asyncio.sleep(0)


def test_oldest_unfinished_body_is_rejected_when_there_are_too_many() -> None:
    """With a limit of two bodies, the third one displaces the first; the others are received."""

    async def scenario() -> None:
        receiver = BodyReceiver(ServeSettings(max_pending_bodies=2))
        clients = [FakeClient(receiver) for _ in range(3)]
        for client in clients:
            await client.send(b"part")
        with pytest.raises(BodyError, match="when the server needed memory") as caught:
            await clients[0].task
        assert caught.value.status == 408
        for client in clients[1:]:
            await client.send(b" and end", more_body=False)
            assert await client.task == b"part and end"

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


def test_body_that_times_out_does_not_fail_a_new_one() -> None:
    """A new body arrives in the moment in which the oldest one, which it displaces, times out."""

    async def scenario() -> None:
        receiver = BodyReceiver(ServeSettings(max_pending_bodies=1, body_timeout_seconds=0.05))
        slow = FakeClient(receiver)
        await slow.send(b"part")
        # The timer fires in the next iteration of the event loop, together with the new body.
        time.sleep(0.1)  # noqa: ASYNC251 - blocks the event loop on purpose
        fast = FakeClient(receiver)
        await fast.send(b"all", more_body=False)
        assert await fast.task == b"all"
        with pytest.raises(BodyError) as caught:
            await slow.task
        assert caught.value.status == 408

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


def test_bodies_have_a_memory_limit() -> None:
    """Unfinished bodies are dropped first, oldest first; if all are finished, the error is 429."""

    async def scenario() -> None:
        receiver = BodyReceiver(ServeSettings(max_body_bytes=60, max_total_body_bytes=100))
        slow, first = FakeClient(receiver), FakeClient(receiver)
        await slow.send(b"s" * 40)
        await first.send(b"f" * 50, more_body=False)
        assert await first.task == b"f" * 50
        second = FakeClient(receiver)
        await second.send(b"f" * 50, more_body=False)
        assert await second.task == b"f" * 50
        with pytest.raises(BodyError, match="needed memory"):
            await slow.task
        third = FakeClient(receiver)
        await third.send(b"t", more_body=False)
        with pytest.raises(BodyError, match="no memory for more bodies") as caught:
            await third.task
        assert caught.value.status == 429
        for client in (slow, first, third):
            receiver.release(client.body)
        fourth = FakeClient(receiver)
        await fourth.send(b"t", more_body=False)
        assert await fourth.task == b"t"
        for client in (second, fourth):
            receiver.release(client.body)
        assert receiver.num_bytes == 0

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


@pytest.mark.parametrize(
    ("message", "status"),
    [(_message(b"x" * 11), 413), ({"type": "http.disconnect"}, 400), (None, 408)],
)
def test_bytes_of_failed_bodies_can_be_released(message: Any, status: int) -> None:
    """Bodies that are too large, interrupted or late no longer count after ``release``."""

    async def scenario() -> None:
        settings = ServeSettings(max_body_bytes=10, body_timeout_seconds=0.01)
        receiver = BodyReceiver(settings)
        body = IncomingBody()

        async def receive() -> Any:
            if message is None:
                # The client sends nothing.
                await asyncio.Event().wait()
            return message

        with pytest.raises(BodyError) as caught:
            await receiver.receive(body, receive)
        assert caught.value.status == status
        receiver.release(body)
        assert receiver.num_bytes == 0

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))


def test_unfinished_bodies_do_not_block_other_clients(models: list[ServedModel]) -> None:
    """Eight unfinished bodies, with limits of 2 requests and 4 bodies, do not delay a client."""
    settings = ServeSettings(
        max_concurrent_requests=2, max_pending_bodies=4, body_timeout_seconds=TIMEOUT
    )
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
    with run_server(models[:1], settings) as server, contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMEOUT))
            for _ in range(8)
        ]
        for connection in slow:
            connection.sendall(head)
        for _ in range(6):
            assert server.post("/embed", {"inputs": "a hammer"}).status_code == 200
        # The oldest unfinished bodies were rejected.
        assert slow[0].recv(65536).startswith(b"HTTP/1.1 408")
