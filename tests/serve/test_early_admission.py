"""Requests of an overloaded server are rejected before they are received and tokenized."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from bertsmith.serve.admission import RecentRequests
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
    """The smallest estimate of recent requests counts; unknown clients have no estimate."""
    now = [0.0]
    requests = RecentRequests(lambda: now[0])
    requests.record("a", "/embed", 100, 50)
    now[0] = 6.0
    requests.record("a", "/embed", 100, 20)
    assert requests.estimate("a", "/embed", 100) == 20
    requests.record("a", "/embed", 100, 40)
    assert requests.estimate("a", "/embed", 100) == 20
    assert requests.estimate("a", "/fill", 100) == 0
    assert requests.estimate("b", "/embed", 100) == 0
    now[0] = 17.0
    assert requests.estimate("a", "/embed", 100) == 0


@pytest.mark.parametrize("exponent", [0, 1, 2])
@pytest.mark.parametrize("num_bytes", [30, 100, 1000])
def test_estimate_is_a_lower_bound(exponent: int, num_bytes: int) -> None:
    """This holds for a fixed cost (attention), a linear one (embed) and a quadratic one."""
    requests = RecentRequests()
    requests.record("a", "/path", 100, 100**exponent)
    assert requests.estimate("a", "/path", num_bytes) <= num_bytes**exponent


def test_large_request_is_not_rejected_for_tokens_that_it_may_not_have() -> None:
    """A body of 4 MB may be invalid, or its text truncated, so it counts as much as recent ones."""
    requests = RecentRequests()
    requests.record("a", "/embed", 100, 50)
    assert requests.estimate("a", "/embed", 4_000_000) == 50


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


@pytest.mark.parametrize("transfer", ["content-length", "expect", "chunked"])
def test_busy_server_rejects_before_tokenizing(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, transfer: str
) -> None:
    """The second large request gets 429 and is not tokenized; its body is read, unless it waits.

    The connection can be used again after the body was read. The size of a chunked body is known
    when it was read.
    """
    waits_for_permission = transfer == "expect"
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
    second_request = request if waits_for_permission else request + body
    if transfer == "chunked":
        chunked_head = request.replace(
            b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked"
        )
        second_request = chunked_head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
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
        connections[1].sendall(second_request)
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
