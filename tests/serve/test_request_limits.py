"""Limits, overload, timeouts, disconnects and shutdown of a running server."""

import gc
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from uvicorn.server import ServerState

from bertsmith.model.bert import BertModel
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.server import create_config
from bertsmith.serve.settings import ServeSettings
from bertsmith.text.wordpiece import Tokenizer
from tests.serve.model_pause import TIMEOUT, paused_model, wait_until
from tests.serve.model_server import (
    SENTENCES,
    RunningServer,
    find_fastapi_app,
    get_middleware,
    run_server,
)
from tests.serve.server_process import is_refused

#: Header of a POST request, to be formatted with the path and the length of the body.
HEADER = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture(scope="module")
def limited_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with low limits of bytes, texts and tokens."""
    settings = ServeSettings(max_body_bytes=5000, max_texts=8, max_tokens=200)
    with run_server(models[:1], settings) as server:
        yield server


@pytest.fixture(scope="module")
def short_timeout_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server that waits 0.5 seconds for a header or body."""
    with run_server(models[:1], ServeSettings(body_timeout_seconds=0.5)) as server:
        yield server


def send_bytes(port: int, data: bytes) -> bytes:
    """Send bytes; return the response when the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection:
        connection.sendall(data)
        response = b""
        while chunk := connection.recv(65536):
            response += chunk
    return response


def assert_works(server: RunningServer) -> None:
    """Check that the server still answers requests."""
    assert server.post("/embed", {"inputs": "a hammer"}).status_code == 200


def test_too_large_body_is_rejected(limited_server: RunningServer) -> None:
    """The status is 413, because of Content-Length or of the bytes received of a chunked body."""
    response = limited_server.post("/embed", {"inputs": "a" * 6000})
    assert (response.status_code, response.json()["error"]["type"]) == (413, "too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"a" * 1000

    response = httpx.post(f"{limited_server.url}/embed", content=chunks(), timeout=20)
    assert response.status_code == 413
    assert "larger than 5,000 bytes" in response.json()["error"]["message"]
    assert_works(limited_server)


def test_huge_body_is_rejected_by_its_header(server: RunningServer) -> None:
    """A Content-Length of 100 MiB gets 413 before the body is sent."""
    header = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n"
    assert send_bytes(server.port, header).startswith(b"HTTP/1.1 413")
    assert_works(server)


@pytest.mark.parametrize(("field", "status"), [(b"", 413), (b"Authorization: Bearer x\r\n", 401)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_client_that_sends_its_whole_body_gets_the_rejection(
    models: list[ServedModel], field: bytes, status: int, *, is_chunked: bool
) -> None:
    """The server reads the rest of a rejected body; otherwise the response could be lost."""
    key = "open" if status == 401 else None
    size = 2**23
    with run_server(models[:1], key=key) as server:
        head = b"POST /embed HTTP/1.1\r\nHost: x\r\n" + field
        body = b"a" * size
        if is_chunked:
            head += b"Transfer-Encoding: chunked\r\n\r\n"
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body)
        else:
            head += b"Content-Length: %d\r\n\r\n" % size
        response = send_bytes(server.port, head + body)
    assert response.startswith(b"HTTP/1.1 %d" % status)
    assert b"connection: close" in response
    assert response.count(b'"error"') == 1


def test_body_of_a_rejected_request_is_limited(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends an endless body, or none after the header, is disconnected."""
    monkeypatch.setattr("bertsmith.serve.middleware._MAX_PAUSE_SECONDS", 0.2)
    settings = ServeSettings(max_body_bytes=5000, body_timeout_seconds=2 * TIMEOUT)
    with run_server(models[:1], settings) as server:
        head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n"
        assert send_bytes(server.port, head).startswith(b"HTTP/1.1 413")
        with (
            socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection,
            pytest.raises(ConnectionError),
        ):
            connection.sendall(head + b"a" * 2**26)
        # The server does not wait for a client that waits for permission to send the body.
        monkeypatch.setattr("bertsmith.serve.middleware._MAX_PAUSE_SECONDS", 2 * TIMEOUT)
        expect = b"\r\nExpect: 100-continue\r\n\r\n"
        assert send_bytes(server.port, head.rstrip() + expect).startswith(b"HTTP/1.1 413")


def test_too_many_texts_or_tokens_are_rejected(limited_server: RunningServer) -> None:
    """The status is 422, and the message names the limit."""
    response = limited_server.post("/embed", {"inputs": ["a"] * 9})
    assert "the limit is 8 texts per request, got 9" in response.json()["error"]["message"]
    response = limited_server.post("/embed", {"inputs": ["the smith worked " * 20] * 8})
    assert response.status_code == 422
    assert "the limit is 200 tokens per request" in response.json()["error"]["message"]


def test_too_many_characters_are_rejected(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing 4 MiB of punctuation would need 2 GB, so the status is 422 without tokenizing."""
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    for path, inputs in (("/embed", "-" * 1_100_000), ("/pair", ["-" * 550_000] * 2)):
        response = server.post(path, {"inputs": inputs})
        assert response.status_code == 422
        message = response.json()["error"]["message"]
        assert "the limit is 1,048,576 characters per request, got 1,100,000" in message


def test_ten_thousand_texts_need_higher_limits(
    models: list[ServedModel], server: RunningServer
) -> None:
    """It is rejected by default; with higher limits, its vectors equal those of the embedder."""
    texts = [SENTENCES[number % 5][: 6 + number % 40] for number in range(10_000)]
    response = server.post("/embed", {"inputs": texts})
    assert response.status_code == 422
    assert "1,024 texts per request, got 10,000" in response.json()["error"]["message"]
    assert_works(server)
    settings = ServeSettings(
        max_texts=10_000, max_tokens=10**6, max_queue_tokens=10**6, request_timeout_seconds=300
    )
    with run_server(models[:1], settings) as large_server:
        response = large_server.post("/embed", {"inputs": texts}, timeout=300)
    assert response.status_code == 200
    vectors = np.array(response.json(), np.float32)
    expected = models[0].embedder.encode(texts, normalize=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_slow_body_times_out(short_timeout_server: RunningServer) -> None:
    """A client that does not finish its body gets 408 while it is still connected."""
    response = send_bytes(short_timeout_server.port, HEADER % (b"/embed", 50) + b"{")
    assert response.startswith(b"HTTP/1.1 408")
    assert b"within 0.5 seconds" in response


@pytest.mark.parametrize("start", [b"", b"POST /embed HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_slow_header_closes_the_connection(
    short_timeout_server: RunningServer, start: bytes
) -> None:
    """A client that does not finish its header gets no response."""
    assert send_bytes(short_timeout_server.port, start) == b""


def test_each_header_of_a_connection_has_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each request, the timer runs from the first to the last byte of the header."""
    protocol_class: Any = create_config(ServeSettings(body_timeout_seconds=7.0)).http
    monkeypatch.setattr(protocol_class, "_start_asgi_task", lambda *_: None)
    loop = MagicMock()
    transport = MagicMock()
    transport.is_closing.return_value = False
    config = uvicorn.Config(lambda *_: None, ws="none", log_level="warning")
    protocol = protocol_class(config, ServerState(), {}, loop)

    def started_timers() -> list[Any]:
        """Return the calls of ``loop.call_later``."""
        return [call for call in loop.call_later.mock_calls if call[0] == ""]

    # The first timer starts with the connection.
    protocol.connection_made(transport)
    assert [call.args[0] for call in started_timers()] == [7.0]
    # A request restarts the timer, and the end of its header stops it.
    body = b'{"inputs": "a"}'
    protocol.data_received(HEADER % (b"/embed", len(body)) + body)
    timer = loop.call_later.return_value
    assert len(started_timers()) == 2
    assert timer.cancel.call_count == 2
    # The timer of an unfinished header closes the connection.
    protocol.data_received(b"POST /em")
    assert len(started_timers()) == 3
    assert timer.cancel.call_count == 2
    started_timers()[-1].args[1]()
    transport.close.assert_called_once()


def test_bytes_that_are_not_http_get_400(server: RunningServer) -> None:
    """Invalid bytes get 400 and a closed connection; other clients are not affected."""
    assert send_bytes(server.port, bytes(range(256)) * 4).startswith(b"HTTP/1.1 400")
    assert_works(server)


def test_full_queue_returns_429(models: list[ServedModel]) -> None:
    """Requests beyond the queue's limit get 429 and Retry-After; the others are answered."""
    settings = ServeSettings(
        max_queue_tokens=100, max_batch_tokens=32, request_timeout_seconds=TIMEOUT
    )
    with run_server(models[:1], settings) as server, ThreadPoolExecutor(32) as pool:
        with paused_model():
            futures = [
                pool.submit(server.post, "/embed", {"inputs": SENTENCES[0]}) for _ in range(32)
            ]
            # While the model is paused, only rejections complete.
            wait(futures, TIMEOUT, FIRST_COMPLETED)
            rejections = [future.result() for future in futures if future.done()]
            assert {response.status_code for response in rejections} == {429}
        responses = [future.result(TIMEOUT) for future in futures]
        assert {response.status_code for response in responses} == {200, 429}
        assert all(int(response.headers["retry-after"]) >= 1 for response in rejections)
        assert "tokens are waiting" in rejections[0].json()["error"]["message"]


def test_too_many_concurrent_requests_return_429(models: list[ServedModel]) -> None:
    """With a limit of two, the third request is rejected and the first two are answered."""
    with (
        run_server(
            models[:1], ServeSettings(max_concurrent_requests=2, request_timeout_seconds=TIMEOUT)
        ) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        with paused_model():
            futures = [pool.submit(server.post, "/embed", {"inputs": "a"}) for _ in range(2)]
            wait_until(lambda: get_middleware(server)._concurrency.num_active == 2)
            response = server.post("/embed", {"inputs": "a"})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert "2 requests are running" in response.json()["error"]["message"]
            assert httpx.get(f"{server.url}/health", timeout=TIMEOUT).status_code == 200
        assert [future.result(TIMEOUT).status_code for future in futures] == [200, 200]


@pytest.mark.parametrize("path", ["/embed", "/fill"])
def test_late_response_is_504(models: list[ServedModel], path: str) -> None:
    """A request times out while the model computes; a later request is answered."""
    with run_server(models[:1], ServeSettings(request_timeout_seconds=0.3)) as server:
        with paused_model() as pause:
            response = server.post(path, {"inputs": "a [MASK]"})
            assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout")
            assert not pause.resume.is_set()
        # On a busy machine, even a request to a running model can take longer than 0.3 seconds.
        wait_until(lambda: server.post(path, {"inputs": "a [MASK]"}).status_code == 200)


def test_tokenization_stops_at_the_deadline(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request times out within the first group of texts, and later groups are skipped."""
    group_sizes: list[int] = []
    resume = threading.Event()

    def encode_paused(_: Tokenizer, texts: list[str]) -> list[Any]:
        group_sizes.append(len(texts))
        assert resume.wait(TIMEOUT)
        return [([], [])] * len(texts)

    monkeypatch.setattr(Tokenizer, "encode_batch_with_offsets", encode_paused)
    with run_server(models[:1], ServeSettings(request_timeout_seconds=0.3)) as server:
        response = server.post("/tokenize", {"inputs": ["a" * 70_000] * 3})
        assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout")
        resume.set()
    assert group_sizes == [1]


@pytest.mark.parametrize("path", ["/embed", "/fill"])
def test_disconnect_cancels_the_request(models: list[ServedModel], path: str) -> None:
    """The request ends while the model computes, and its queued sequences are not computed."""
    settings = ServeSettings(max_batch_tokens=8, request_timeout_seconds=TIMEOUT)
    with run_server(models[:1], settings) as server, paused_model() as pause:
        batcher = find_fastapi_app(get_middleware(server)).state.service.batcher
        body = json.dumps({"inputs": ["a hammer [MASK]"] * 100}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(HEADER % (path.encode(), len(body)) + body)
            # All model threads have taken their batch, so none of them starts another one.
            num_batches = len(batcher._threads)
            wait_until(lambda: pause.num_batches == num_batches and batcher.queued_tokens > 100)
        wait_until(lambda: not get_middleware(server)._concurrency.num_active)
        pause.resume.set()
        assert_works(server)
        assert batcher.queued_tokens == 0
        # ``assert_works`` computes one batch.
        assert pause.num_batches <= num_batches + 1


def test_model_files_may_be_deleted_after_loading(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """All weights are in memory after loading, including those of the pooler."""
    shutil.copytree(model_dirs["plain"], tmp_path / "m")
    with run_server([load_served_model("m", tmp_path / "m")]) as server:
        shutil.rmtree(tmp_path / "m")
        for pooling in ("mean", "pooled"):
            response = server.post("/embed", {"inputs": "a", "pooling": pooling})
            assert response.status_code == 200
        assert server.post("/fill", {"inputs": "a [MASK]"}).status_code == 200


def test_internal_error_is_logged_but_not_sent(
    models: list[ServedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the type and traceback of the exception, and the 500 response has neither."""
    with run_server(models[:1]) as server:
        hidden_states = BertModel.iter_hidden_states
        BertModel.iter_hidden_states = None  # type: ignore[assignment,method-assign]
        try:
            response = server.post("/embed", {"inputs": "a"})
        finally:
            BertModel.iter_hidden_states = hidden_states  # type: ignore[method-assign]
        assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")
        for message in ("TypeError", "'NoneType' object is not callable"):
            assert message not in response.text
        assert "an endpoint failed with TypeError" in caplog.text
        assert "'NoneType' object is not callable" not in caplog.text
        assert_works(server)


def test_access_log_has_no_request_texts(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one JSON line per request, without the query string and body."""
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        server.post("/embed", {"inputs": "my secret"}, params={"q": "my secret"})
        server.post("/fill", {"inputs": "my secret without a mask"})

        def records() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.name == "bertsmith.serve"]

        # The line is written after the response is sent.
        wait_until(lambda: len(records()) == 2)
    lines = [json.loads(record.message) for record in records()]
    assert [(line["path"], line["status"]) for line in lines] == [("/embed", 200), ("/fill", 422)]
    keys = {"time", "id", "client", "method", "path", "status", "seconds", "bytes"}
    assert lines[0].keys() == keys
    assert lines[0]["client"] == "127.0.0.1"
    assert "secret" not in caplog.text


def test_requests_leak_no_threads_or_tensors(models: list[ServedModel]) -> None:
    """After 1,000 requests, there are about as many threads and tensors as after 100."""
    with run_server(models[:1]) as server:

        def post(number: int) -> int:
            path = ("/embed", "/fill", "/pair", "/nothing")[number % 4]
            body: Any = {"inputs": ["a", "b"]} if path == "/pair" else {"inputs": "a [MASK]"}
            return server.post(path, body).status_code

        def count_tensors() -> int:
            gc.collect()
            return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(post, range(100)))
            num_threads, num_tensors = threading.active_count(), count_tensors()
            list(pool.map(post, range(900)))
        wait_until(lambda: count_tensors() <= num_tensors + 5)
        wait_until(lambda: threading.active_count() <= num_threads + 8)


def start_process(
    model_dir: Path, port: int, *, before_forward: str = "pass"
) -> "subprocess.Popen[str]":
    """Start ``bertsmith serve``; ``before_forward`` is a statement run before forward passes."""
    program = (
        "import sys\n"
        "from bertsmith.model.bert import BertModel\n"
        "original = BertModel.iter_hidden_states\n"
        "def hidden_states(self, *args, **kwargs):\n"
        f"    {before_forward}\n"
        "    return original(self, *args, **kwargs)\n"
        "BertModel.iter_hidden_states = hidden_states\n"
        "from bertsmith.cli.main import main\n"
        "main()\n"
    )
    args = ["serve", str(model_dir), "--port", str(port), "--no-page", "--threads", "1"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_shuts_down_gracefully(model_dirs: dict[str, Path], signal_number: int) -> None:
    """The running request is answered, new connections are refused, and the exit status is 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start_process(
        model_dirs["plain"],
        port,
        before_forward="print('started', flush=True); sys.stdin.readline()",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        wait_until(lambda: not is_refused(port))
        # The command line enables the check of the Host header.
        models_url = f"http://127.0.0.1:{port}/models"
        response = httpx.get(models_url, headers={"Host": "evil.example"}, timeout=TIMEOUT)
        assert response.status_code == 400
        with ThreadPoolExecutor(1) as pool:
            url = f"http://127.0.0.1:{port}/embed"
            future = pool.submit(httpx.post, url, json={"inputs": "a"}, timeout=TIMEOUT)
            assert process.stdout.readline() == "started\n"
            process.send_signal(signal_number)
            wait_until(lambda: is_refused(port))
            assert not future.done()
            process.stdin.write("\n")
            process.stdin.flush()
            assert future.result(TIMEOUT).status_code == 200
        _, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
