"""Requests of an overloaded server are rejected before they are received and tokenized."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from bertsmith.serve.admission import TokenRates
from bertsmith.serve.deadline import BusyError
from bertsmith.serve.fair_queue import TokenDemand
from bertsmith.serve.models import ServedModel
from bertsmith.serve.receiving import BodyReceiver
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.vectors import submit_embeddings
from tests.serve.model_pause import TIMEOUT, paused_model, wait_until
from tests.serve.model_server import run_server
from tests.serve.test_scheduling import create_call, create_scheduler


def test_tokens_are_estimated_from_recent_requests_of_the_same_client() -> None:
    """The fewest tokens per byte of recent requests count; unknown clients have no estimate."""
    now = [0.0]
    rates = TokenRates(lambda: now[0])
    rates.record("a", "/embed", 0.5)
    now[0] = 6.0
    rates.record("a", "/embed", 0.2)
    assert rates.estimate("a", "/embed", 100) == 20
    rates.record("a", "/embed", 0.4)
    assert rates.estimate("a", "/embed", 100) == 20
    assert rates.estimate("a", "/fill", 100) == 0
    assert rates.estimate("b", "/embed", 100) == 0
    now[0] = 17.0
    assert rates.estimate("a", "/embed", 100) == 0


def test_reservations_count_until_they_are_released() -> None:
    """Two requests of the same client that are being tokenized do not both get the last room."""
    now = [0.0]
    scheduler = create_scheduler(now, max_queue_tokens=1000)
    scheduler.add(create_call("a", *[100] * 3))
    first, second = (TokenDemand("a", 400, 30.0) for _ in range(2))
    scheduler.reserve(first)
    with pytest.raises(BusyError):
        scheduler.reserve(second)
    scheduler.release(first)
    scheduler.reserve(second)


@pytest.mark.parametrize("num_queued", [1, 8])
def test_flood_of_one_client_does_not_reject_others_early(num_queued: int) -> None:
    """A client with less in the queue is admitted, although the flooding client is rejected.

    It makes no difference whether the flooding client's requests are queued or being tokenized.
    """
    scheduler = create_scheduler([0.0])
    for _ in range(num_queued):
        scheduler.add(create_call("flood", *[100] * 3))
    for _ in range(9 - num_queued):
        scheduler.reserve(TokenDemand("flood", 300, 30.0))
    for num_tokens in (5, 100, 300):
        demand = TokenDemand("other", num_tokens, 30.0)
        scheduler.reserve(demand)
        scheduler.release(demand)
    with pytest.raises(BusyError) as caught:
        scheduler.reserve(TokenDemand("flood", 300, 30.0))
    assert caught.value.retry_after > 0


@pytest.mark.parametrize("waits_for_permission", [False, True])
def test_busy_server_rejects_before_tokenizing(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, *, waits_for_permission: bool
) -> None:
    """The second large request gets 429 and is not tokenized; its body is read, unless it waits.

    The connection can be used again after the body was read.
    """
    num_submitted = 0
    submit = submit_embeddings

    def counting_submit(*args: Any, **options: Any) -> Any:
        nonlocal num_submitted
        num_submitted += 1
        return submit(*args, **options)

    monkeypatch.setattr("bertsmith.serve.embeddings.submit_embeddings", counting_submit)
    body = b'{"inputs": [' + b", ".join([b'"the smith and the hammer"'] * 50) + b"]}"
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    if waits_for_permission:
        head += "Expect: 100-continue\r\n"
    request = f"POST /embed HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode()
    settings = ServeSettings(max_queue_tokens=400, max_batch_tokens=64)
    with (
        run_server(models[:1], settings) as server,
        paused_model() as pause,
        contextlib.ExitStack() as stack,
    ):
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMEOUT))
            for _ in range(3)
        ]
        connections[0].sendall(request + body)
        assert pause.started.wait(TIMEOUT)
        connections[1].sendall(request if waits_for_permission else request + body)
        response = connections[1].recv(65536)
        assert response.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: " in response
        assert (b"\r\nconnection: close" in response) == waits_for_permission
        assert num_submitted == 1
        # A request of one word has room in the queue.
        word = request.replace(str(len(body)).encode(), b"15").replace(b"100-continue", b"")
        connections[2 if waits_for_permission else 1].sendall(word + b'{"inputs": "a"}')
        wait_until(lambda: num_submitted == 2)


def test_body_of_a_rejected_request_has_a_time_limit() -> None:
    """A client that does not send its body does not keep its connection."""

    async def scenario() -> None:
        receiver = BodyReceiver(ServeSettings(body_timeout_seconds=0.01))
        messages = [{"type": "http.request", "body": b"x", "more_body": True}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        assert not await receiver.discard(receive)
        messages.append({"type": "http.request", "body": b"x", "more_body": False})
        assert await receiver.discard(receive)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT))
