"""What a server withstands: size, time, crowds, garbage, clients that leave, its own end."""

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
from tests.serve.model_server import TEXT, RunningServer, run_server

#: Of a request for a path, with a body of so many bytes.
HEAD = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture(scope="module")
def small(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server of small limits."""
    with run_server(models[:1], ServeSettings(body_bytes=5000, texts=8, tokens=200)) as found:
        yield found


@pytest.fixture(scope="module")
def hasty(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server that waits for a header or a body only a moment."""
    with run_server(models[:1], ServeSettings(body_seconds=0.5)) as found:
        yield found


def raw(port: int, data: bytes, *, seconds: float = TIMEOUT) -> bytes:
    """Send bytes, and return all that comes back until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), seconds) as own:
        own.sendall(data)
        found = b""
        while chunk := own.recv(65536):
            found += chunk
    return found


def guard(running: RunningServer) -> Any:
    """Return the outermost app of a server."""
    return running.server.config.app


def lives(running: RunningServer) -> None:
    """Check that the server answers as before."""
    assert running.post("/embed", {"inputs": "a hammer"}).status_code == 200


def test_a_body_too_large_is_refused_unread(small: RunningServer) -> None:
    """By its header, and by its bytes where the header does not say: 413."""
    found = small.post("/embed", {"inputs": "a" * 6000})
    assert (found.status_code, found.json()["error"]["type"]) == (413, "too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"a" * 1000

    found = httpx.post(f"{small.url}/embed", content=chunks(), timeout=20)
    assert found.status_code == 413
    assert "larger than 5,000 bytes" in found.json()["error"]["message"]
    lives(small)


def test_a_hundred_megabytes(running: RunningServer) -> None:
    """Refused by its header before it is sent."""
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n"
    assert raw(running.port, head).startswith(b"HTTP/1.1 413")
    lives(running)


def test_too_many_texts_or_tokens(small: RunningServer) -> None:
    """422, with the number that is taken."""
    found = small.post("/embed", {"inputs": ["a"] * 9})
    assert "9 texts; this server takes 8" in found.json()["error"]["message"]
    found = small.post("/embed", {"inputs": ["the smith worked " * 20] * 8})
    assert found.status_code == 422
    assert "tokens; this server takes 200" in found.json()["error"]["message"]


def test_ten_thousand_texts(models: list[ServedModel], running: RunningServer) -> None:
    """Refused as the server stands; where limits allow them, answered with the right vectors."""
    texts = [TEXT[number % 5][: 6 + number % 40] for number in range(10_000)]
    found = running.post("/embed", {"inputs": texts})
    assert found.status_code == 422
    assert "10,000 texts; this server takes 1,024" in found.json()["error"]["message"]
    lives(running)
    large = ServeSettings(texts=10_000, tokens=10**6, queue_tokens=10**6, seconds=300)
    with run_server(models[:1], large) as own:
        answered = own.post("/embed", {"inputs": texts}, timeout=300)
    assert answered.status_code == 200
    vectors = np.array(answered.json(), np.float32)
    wanted = models[0].embedder.encode(texts, normalize=True)
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)


def test_a_slow_body_ends(hasty: RunningServer) -> None:
    """408 after the time for it, with the client still connected."""
    found = raw(hasty.port, HEAD % (b"/embed", 50) + b"{")
    assert found.startswith(b"HTTP/1.1 408")
    assert b"within 0.5 seconds" in found


@pytest.mark.parametrize("start", [b"", b"POST /embed HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_slow_header_ends(hasty: RunningServer, start: bytes) -> None:
    """The connection is closed by the server, with or without a first line."""
    assert raw(hasty.port, start) == b""


def test_each_header_of_a_connection_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of a header runs from its first byte to its last, again for each request."""
    protocol_class: Any = create_config(ServeSettings(body_seconds=7.0)).http
    monkeypatch.setattr(protocol_class, "_start_asgi_task", lambda *_: None)
    loop, transport = MagicMock(), MagicMock()
    transport.is_closing.return_value = False
    settings = uvicorn.Config(lambda *_: None, ws="none", log_level="warning")
    protocol = protocol_class(settings, ServerState(), {}, loop)

    def timers() -> list[Any]:
        """Return the timers that are set, each once."""
        return [call for call in loop.call_later.mock_calls if call[0] == ""]

    protocol.connection_made(transport)
    assert [call.args[0] for call in timers()] == [7.0]
    body = b'{"inputs": "a"}'
    protocol.data_received(HEAD % (b"/embed", len(body)) + body)
    timer = loop.call_later.return_value
    assert len(timers()) == 2
    assert timer.cancel.call_count == 2
    protocol.data_received(b"POST /em")
    assert len(timers()) == 3
    assert timer.cancel.call_count == 2
    timers()[-1].args[1]()
    transport.close.assert_called_once()


def test_garbage_on_the_wire(running: RunningServer) -> None:
    """Bytes that are no HTTP are answered by 400 and the end, and harm nobody."""
    assert raw(running.port, bytes(range(256)) * 4).startswith(b"HTTP/1.1 400")
    lives(running)


def test_a_crowd_is_told_to_come_again(models: list[ServedModel]) -> None:
    """A full queue: 429 with Retry-After for the rest, and right answers for those it took."""
    limits = ServeSettings(queue_tokens=100, batch_tokens=32, seconds=TIMEOUT)
    with run_server(models[:1], limits) as own, ThreadPoolExecutor(32) as pool:
        with paused_model():
            asked = [pool.submit(own.post, "/embed", {"inputs": TEXT[0]}) for _ in range(32)]
            # While nothing is computed, only refusals can come.
            wait(asked, TIMEOUT, FIRST_COMPLETED)
            early = [one.result() for one in asked if one.done()]
            assert {one.status_code for one in early} == {429}
        found = [one.result(TIMEOUT) for one in asked]
        assert {one.status_code for one in found} == {200, 429}
        assert all(int(one.headers["retry-after"]) >= 1 for one in early)
        assert "tokens are waiting" in early[0].json()["error"]["message"]


def test_too_many_requests_at_once(models: list[ServedModel]) -> None:
    """429 for the third of two; the two get their answers."""
    with (
        run_server(models[:1], ServeSettings(requests=2, seconds=TIMEOUT)) as own,
        ThreadPoolExecutor(2) as pool,
    ):
        with paused_model():
            asked = [pool.submit(own.post, "/embed", {"inputs": "a"}) for _ in range(2)]
            wait_until(lambda: guard(own)._active["requests"] == 2)
            found = own.post("/embed", {"inputs": "a"})
            assert (found.status_code, found.headers["retry-after"]) == (429, "1")
            assert "2 requests are being answered" in found.json()["error"]["message"]
            assert httpx.get(f"{own.url}/health", timeout=TIMEOUT).status_code == 200
        assert [one.result(TIMEOUT).status_code for one in asked] == [200, 200]


@pytest.mark.parametrize("path", ["/embed", "/fill"])
def test_an_answer_too_late_is_told(models: list[ServedModel], path: str) -> None:
    """504 while the model still computes; then all is well again."""
    with run_server(models[:1], ServeSettings(seconds=0.3)) as own:
        with paused_model() as hold:
            found = own.post(path, {"inputs": "a [MASK]"})
            assert (found.status_code, found.json()["error"]["type"]) == (504, "timeout")
            assert not hold.let.is_set()
        # Of three tenths of a second a busy machine may need more.
        wait_until(lambda: own.post(path, {"inputs": "a [MASK]"}).status_code == 200)


def test_tokenizing_ends_at_its_deadline(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """504 while a tokenizer is still at its first texts, and the others are never begun."""
    calls, let = [], threading.Event()

    def hold(_: Tokenizer, texts: list[str]) -> list[Any]:
        calls.append(len(texts))
        assert let.wait(TIMEOUT)
        return [([], [])] * len(texts)

    monkeypatch.setattr(Tokenizer, "encode_batch_with_offsets", hold)
    with run_server(models[:1], ServeSettings(seconds=0.3)) as own:
        found = own.post("/tokenize", {"inputs": ["a" * 70_000] * 3})
        assert (found.status_code, found.json()["error"]["type"]) == (504, "timeout")
        let.set()
    assert calls == [1]


@pytest.mark.parametrize("path", ["/embed", "/fill"])
def test_a_client_that_is_killed_frees_its_place(models: list[ServedModel], path: str) -> None:
    """Its request is over while the model is still at it, and the rest of it is not computed."""
    limits = ServeSettings(batch_tokens=8, seconds=TIMEOUT)
    with run_server(models[:1], limits) as own, paused_model() as hold:
        batcher = guard(own)._app.state.service.batcher
        body = json.dumps({"inputs": ["a hammer [MASK]"] * 100}).encode()
        with socket.create_connection(("127.0.0.1", own.port)) as gone:
            gone.sendall(HEAD % (path.encode(), len(body)) + body)
            wait_until(lambda: hold.begun.is_set() and batcher.waiting > 100)
        wait_until(lambda: not guard(own)._active["requests"])
        begun = hold.batches
        hold.let.set()
        lives(own)
        assert batcher.waiting == 0
        # One is of ``lives``.
        assert hold.batches <= begun + 1


def test_a_model_whose_files_are_gone_serves_on(folders: dict[str, Path], tmp_path: Path) -> None:
    """It was loaded, the pooler with it."""
    shutil.copytree(folders["plain"], tmp_path / "m")
    with run_server([load_served_model("m", tmp_path / "m")]) as own:
        shutil.rmtree(tmp_path / "m")
        for pooling in ("mean", "pooled"):
            found = own.post("/embed", {"inputs": "a", "pooling": pooling})
            assert found.status_code == 200
        assert own.post("/fill", {"inputs": "a [MASK]"}).status_code == 200


def test_a_failure_inside_is_told_and_logged(
    models: list[ServedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """500 without its cause, which the log has; the next request is answered."""
    with run_server(models[:1]) as own:
        whole = BertModel.hidden_states
        BertModel.hidden_states = None  # type: ignore[assignment,method-assign]
        try:
            found = own.post("/embed", {"inputs": "a"})
        finally:
            BertModel.hidden_states = whole  # type: ignore[method-assign]
        assert (found.status_code, found.json()["error"]["type"]) == (500, "internal")
        assert "NoneType" not in found.text
        assert "NoneType" in caplog.text
        lives(own)


def test_the_log_has_no_text(running: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """A line of JSON a request: what, when, how long; never what was said."""
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        running.post("/embed", {"inputs": "my secret"}, params={"q": "my secret"})
        running.post("/fill", {"inputs": "my secret without a mask"})

        def records() -> list[logging.LogRecord]:
            return [one for one in caplog.records if one.name == "bertsmith.serve"]

        # A line is written after its answer.
        wait_until(lambda: len(records()) == 2)
    lines = [json.loads(one.message) for one in records()]
    assert [(one["path"], one["status"]) for one in lines] == [("/embed", 200), ("/fill", 422)]
    assert lines[0].keys() == {"time", "id", "method", "path", "status", "seconds", "bytes"}
    assert "secret" not in caplog.text


def test_memory_stays(models: list[ServedModel]) -> None:
    """A thousand requests of all sorts leave no thread, no task and no tensor behind."""
    with run_server(models[:1]) as own:

        def ask(number: int) -> int:
            path = ("/embed", "/fill", "/pair", "/nothing")[number % 4]
            body: Any = {"inputs": ["a", "b"]} if path == "/pair" else {"inputs": "a [MASK]"}
            return own.post(path, body).status_code

        def count() -> int:
            gc.collect()
            return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(100)))
            threads, tensors = threading.active_count(), count()
            list(pool.map(ask, range(900)))
        wait_until(lambda: count() <= tensors + 5)
        wait_until(lambda: threading.active_count() <= threads + 8)


def started(model: Path, port: int, *, forward: str = "") -> "subprocess.Popen[str]":
    """Start a server in a process; ``forward``: runs before each forward pass."""
    program = (
        "import sys\n"
        "from bertsmith.model.bert import BertModel\n"
        "plain = BertModel.hidden_states\n"
        "def hidden_states(self, *arguments, **options):\n"
        f"    {forward or 'pass'}\n"
        "    return plain(self, *arguments, **options)\n"
        "BertModel.hidden_states = hidden_states\n"
        "from bertsmith.cli.main import main\n"
        "main()\n"
    )
    words = ["serve", str(model), "--port", str(port), "--no-page", "--threads", "1"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def refuses(port: int) -> bool:
    """Return whether nobody listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_what_is_under_way(folders: dict[str, Path], ending: int) -> None:
    """The answer that was asked for comes; new connections are refused; the process ends with 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = started(
        folders["plain"], port, forward="print('begun', flush=True); sys.stdin.readline()"
    )
    assert own.stdin is not None
    assert own.stdout is not None
    try:
        wait_until(lambda: not refuses(port))
        # Started by the command line, it checks names, too.
        models_url = f"http://127.0.0.1:{port}/models"
        found = httpx.get(models_url, headers={"Host": "evil.example"}, timeout=TIMEOUT)
        assert found.status_code == 400
        with ThreadPoolExecutor(1) as pool:
            url = f"http://127.0.0.1:{port}/embed"
            asked = pool.submit(httpx.post, url, json={"inputs": "a"}, timeout=TIMEOUT)
            assert own.stdout.readline() == "begun\n"
            own.send_signal(ending)
            wait_until(lambda: refuses(port))
            assert not asked.done()
            own.stdin.write("\n")
            own.stdin.flush()
            assert asked.result(TIMEOUT).status_code == 200
        _, told = own.communicate(timeout=TIMEOUT)
    finally:
        own.kill()
    assert own.returncode == 0, told
    assert "Traceback" not in told
