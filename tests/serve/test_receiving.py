"""Bodies that never end: bounded in number and memory, and no healthy client is kept out."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from bertsmith.serve.models import ServedModel
from bertsmith.serve.receiving import Body, BodyError, BodyReceiver
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import TIMEOUT
from tests.serve.model_server import run_server


def _message(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": content, "more_body": more}


class Client:
    """A client whose chunks arrive when the test says so."""

    def __init__(self, receiver: BodyReceiver) -> None:
        self._chunks: asyncio.Queue[Any] = asyncio.Queue()
        self.body = Body()
        self.task = asyncio.ensure_future(receiver.receive(self.body, self._chunks.get))

    async def send(self, content: bytes, *, more: bool = True) -> None:
        """Send a chunk, and wait until it is taken."""
        self._chunks.put_nowait(_message(content, more=more))
        # The receiver runs as soon as the loop is free.
        for _ in range(10):
            await asyncio.sleep(0)


def test_of_too_many_bodies_the_oldest_is_refused() -> None:
    """The newest clients are served, and the others told to send without a pause."""

    async def run() -> None:
        receiver = BodyReceiver(ServeSettings(bodies=2))
        clients = [Client(receiver) for _ in range(3)]
        for client in clients:
            await client.send(b"part")
        with pytest.raises(BodyError, match="when the server needed room") as caught:
            await clients[0].task
        assert caught.value.status == 408
        for client in clients[1:]:
            await client.send(b" and end", more=False)
            assert await client.task == b"part and end"

    asyncio.run(asyncio.wait_for(run(), TIMEOUT))


def test_bodies_have_a_bound_of_memory() -> None:
    """The oldest unfinished body makes room; while all are being answered, 429."""

    async def run() -> None:
        receiver = BodyReceiver(ServeSettings(body_bytes=60, bodies_bytes=100))
        slow, first = Client(receiver), Client(receiver)
        await slow.send(b"s" * 40)
        await first.send(b"f" * 50, more=False)
        assert await first.task == b"f" * 50
        second = Client(receiver)
        await second.send(b"f" * 50, more=False)
        assert await second.task == b"f" * 50
        with pytest.raises(BodyError, match="needed room"):
            await slow.task
        third = Client(receiver)
        await third.send(b"t", more=False)
        with pytest.raises(BodyError, match="no memory for more bodies") as caught:
            await third.task
        assert caught.value.status == 429
        for client in (slow, first, third):
            receiver.release(client.body)
        fourth = Client(receiver)
        await fourth.send(b"t", more=False)
        assert await fourth.task == b"t"
        for client in (second, fourth):
            receiver.release(client.body)
        assert receiver.num_bytes == 0

    asyncio.run(asyncio.wait_for(run(), TIMEOUT))


@pytest.mark.parametrize(
    ("message", "status"),
    [(_message(b"x" * 11), 413), ({"type": "http.disconnect"}, 400), (None, 408)],
)
def test_a_body_ends_in_an_error(message: Any, status: int) -> None:
    """One that is too large, breaks off, or does not come in time; its bytes are released."""

    async def run() -> None:
        receiver, body = BodyReceiver(ServeSettings(body_bytes=10, body_seconds=0.01)), Body()

        async def receive() -> Any:
            return message or await asyncio.Event().wait()

        with pytest.raises(BodyError) as caught:
            await receiver.receive(body, receive)
        assert caught.value.status == status
        receiver.release(body)
        assert receiver.num_bytes == 0

    asyncio.run(asyncio.wait_for(run(), TIMEOUT))


def test_unfinished_bodies_keep_nobody_out(models: list[ServedModel]) -> None:
    """More of them than requests may be answered at once: a healthy client is served at once."""
    settings = ServeSettings(requests=2, bodies=4, body_seconds=TIMEOUT)
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
        # Those that gave way were told so.
        assert slow[0].recv(65536).startswith(b"HTTP/1.1 408")
