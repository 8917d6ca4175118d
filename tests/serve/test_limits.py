"""What a server withstands: size, time, crowds, garbage, clients that leave, its own end.

These tests never compare vectors closely.
"""

import contextlib
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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bertsmith.model.bert import BertModel
from bertsmith.serve.models import Served, served
from bertsmith.serve.settings import ServeSettings
from tests.serve.little import TEXT, Running, listening

#: Of a request for a path, with a body of so many bytes.
HEAD = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture(scope="module")
def small(models: list[Served]) -> Iterator[Running]:
    """A server of small limits."""
    limits = ServeSettings(body_bytes=5000, texts=8, tokens=200, body_seconds=0.5)
    with listening(models[:1], limits) as found:
        yield found


def raw(port: int, data: bytes, *, seconds: float = 10) -> bytes:
    """Send bytes, and return all that comes back until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), seconds) as own:
        own.sendall(data)
        found = b""
        while chunk := own.recv(65536):
            found += chunk
    return found


def lives(running: Running) -> None:
    """Check that the server answers as before."""
    assert running.post("/embed", {"inputs": "a hammer"}).status_code == 200


@contextlib.contextmanager
def slow(seconds: float) -> Iterator[None]:
    """Have every forward pass take so long."""
    whole = BertModel.hidden_states

    def waiting(self: BertModel, *given: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return whole(self, *given, **more)

    BertModel.hidden_states = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        BertModel.hidden_states = whole  # type: ignore[method-assign]


def test_a_body_too_large_is_refused_unread(small: Running) -> None:
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


def test_a_hundred_megabytes(running: Running) -> None:
    """Refused by its header before it is sent."""
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n"
    assert raw(running.port, head).startswith(b"HTTP/1.1 413")
    lives(running)


def test_too_many_texts_or_tokens(small: Running) -> None:
    """422, with the number that is taken."""
    found = small.post("/embed", {"inputs": ["a"] * 9})
    assert "9 texts; this server takes 8" in found.json()["error"]["message"]
    found = small.post("/embed", {"inputs": ["the smith worked " * 20] * 8})
    assert found.status_code == 422
    assert "tokens; this server takes 200" in found.json()["error"]["message"]


def test_ten_thousand_texts(models: list[Served], running: Running) -> None:
    """Refused as the server stands; where limits allow them, answered with the right vectors."""
    texts = [TEXT[number % 5][: 6 + number % 40] for number in range(10_000)]
    found = running.post("/embed", {"inputs": texts})
    assert found.status_code == 422
    assert "10,000 texts; this server takes 1,024" in found.json()["error"]["message"]
    lives(running)
    large = ServeSettings(texts=10_000, tokens=10**6, queue_tokens=10**6, seconds=300)
    with listening(models[:1], large) as own:
        answered = own.post("/embed", {"inputs": texts}, timeout=300)
    assert answered.status_code == 200
    vectors = np.array(answered.json(), np.float32)
    wanted = models[0].embedder.encode(texts, normalize=True)
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)


def test_a_slow_body_ends(small: Running) -> None:
    """408 after the time for it."""
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
    began = time.monotonic()
    assert raw(small.port, head).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 5
    lives(small)


@pytest.mark.parametrize("start", [b"", b"POST /embed HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_slow_header_ends(small: Running, start: bytes) -> None:
    """The connection is closed after the time for it, with or without a first line."""
    began = time.monotonic()
    assert raw(small.port, start) == b""
    assert 0.3 < time.monotonic() - began < 5
    # A second request of the same connection has the same time.
    body = b'{"inputs": "a"}'
    found = raw(small.port, HEAD % (b"/embed", len(body)) + body + b"POST /em")
    assert found.startswith(b"HTTP/1.1 200")
    lives(small)


def test_garbage_on_the_wire(running: Running) -> None:
    """Bytes that are no HTTP are answered by 400 and the end, and harm nobody."""
    assert raw(running.port, bytes(range(256)) * 4).startswith(b"HTTP/1.1 400")
    lives(running)


def test_a_crowd_is_told_to_come_again(models: list[Served]) -> None:
    """A full queue: 429 with Retry-After for the rest, and right answers for those it took."""
    limits = ServeSettings(queue_tokens=100, batch_tokens=32)
    with listening(models[:1], limits) as own, slow(0.05), ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda _: own.post("/embed", {"inputs": TEXT[0]}), range(32)))
        refused = [one for one in found if one.status_code == 429]
        assert {one.status_code for one in found} == {200, 429}
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        assert "tokens are waiting" in refused[0].json()["error"]["message"]


def test_too_many_requests_at_once(models: list[Served]) -> None:
    """429 before anything is read."""
    with listening(models[:1], ServeSettings(requests=2)) as own, slow(0.3):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: own.post("/embed", {"inputs": "a"}), range(8)))
        assert {one.status_code for one in found} == {200, 429}


@pytest.mark.parametrize("path", ["/embed", "/fill"])
def test_an_answer_too_late_is_told(models: list[Served], path: str) -> None:
    """504 in time, asked by the event loop or by a thread; then all is well again."""
    with listening(models[:1], ServeSettings(seconds=0.3)) as own:
        # Far longer than a machine that does much else may stumble.
        with slow(4.0):
            began = time.monotonic()
            found = own.post(path, {"inputs": "a [MASK]"})
            assert (found.status_code, found.json()["error"]["type"]) == (504, "timeout")
            assert time.monotonic() - began < 3.6
        time.sleep(4.0)
        lives(own)


@pytest.mark.parametrize("path", ["/embed", "/fill"])
def test_a_client_that_is_killed_frees_its_place(models: list[Served], path: str) -> None:
    """What it asked is not computed, and its request is over at once."""
    with listening(models[:1], ServeSettings(batch_tokens=8)) as own:
        service = own.server.config.app._app.state.service  # type: ignore[union-attr]
        with slow(0.4):
            body = json.dumps({"inputs": ["a hammer [MASK]"] * 100}).encode()
            with socket.create_connection(("127.0.0.1", own.port)) as gone:
                gone.sendall(HEAD % (path.encode(), len(body)) + body)
                until = time.monotonic() + 10
                while not service.batcher.waiting and time.monotonic() < until:
                    time.sleep(0.01)
                assert service.batcher.waiting > 100
            time.sleep(0.2)
        began = time.monotonic()
        lives(own)
        assert time.monotonic() - began < 3
        assert service.batcher.waiting == 0


def test_a_model_whose_files_are_gone_serves_on(folders: dict[str, Path], tmp_path: Path) -> None:
    """It was loaded, the pooler with it."""
    shutil.copytree(folders["plain"], tmp_path / "m")
    with listening([served("m", tmp_path / "m")]) as own:
        shutil.rmtree(tmp_path / "m")
        for pooling in ("mean", "pooled"):
            found = own.post("/embed", {"inputs": "a", "pooling": pooling})
            assert found.status_code == 200
        assert own.post("/fill", {"inputs": "a [MASK]"}).status_code == 200


def test_a_failure_inside_is_told_and_logged(
    models: list[Served], caplog: pytest.LogCaptureFixture
) -> None:
    """500 without its cause, which the log has; the next request is answered."""
    with listening(models[:1]) as own:
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


def test_the_log_has_no_text(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """A line of JSON a request: what, when, how long; never what was said."""
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        running.post("/embed", {"inputs": "my secret"}, params={"q": "my secret"})
        running.post("/fill", {"inputs": "my secret without a mask"})
        time.sleep(0.1)
    lines = [json.loads(one.message) for one in caplog.records if one.name == "bertsmith.serve"]
    assert [(one["path"], one["status"]) for one in lines] == [("/embed", 200), ("/fill", 422)]
    assert lines[0].keys() == {"time", "id", "method", "path", "status", "seconds", "bytes"}
    assert "secret" not in caplog.text


def test_memory_stays(models: list[Served]) -> None:
    """A thousand requests of all sorts leave no thread, no task and no tensor behind."""
    with listening(models[:1]) as own:

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
        time.sleep(0.2)
        assert count() <= tensors + 5
        assert threading.active_count() <= threads + 8


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_is_under_way(folders: dict[str, Path], ending: int) -> None:
    """The answer that was asked for comes; new connections are refused; the process ends with 0."""
    program = (
        "import sys, time\n"
        "from bertsmith.model.bert import BertModel\n"
        "whole = BertModel.hidden_states\n"
        "def slow(self, *a, **k):\n"
        "    time.sleep(1.0)\n"
        "    return whole(self, *a, **k)\n"
        "BertModel.hidden_states = slow\n"
        "from bertsmith.cli.app import main\n"
        "main()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folders["plain"]), "--port", str(port), "--no-page", "--threads", "1"]
    own = subprocess.Popen(
        [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.1)
        # Started by the command line, it checks names, too.
        assert httpx.get(f"{url}/models", headers={"Host": "evil.example"}).status_code == 400
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{url}/embed", json={"inputs": "a"}, timeout=30)
            time.sleep(0.4)
            own.send_signal(ending)
            time.sleep(0.2)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            assert asked.result(30).status_code == 200
        _, told = own.communicate(timeout=30)
    finally:
        own.kill()
    assert own.returncode == 0, told
    assert "Traceback" not in told
