"""What one request may cost: however small, it is answered within bounds, and holds up nobody."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import Deadline, NotFiniteError
from bertsmith.serve.models import ServedModel, load_served_model, require_finite
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.text.wordpiece import Tokenizer
from tests.serve.model_server import TEXT, RunningServer, run_server

HALF = "half \ud800 a character"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", HALF]}),
        ("/embed", {"inputs": ["a", HALF]}),
        ("/embed_all", {"inputs": HALF}),
        ("/tokenize", {"inputs": HALF}),
        ("/similarity", {"inputs": {"source_sentence": HALF, "sentences": ["a"]}}),
        ("/fill", {"inputs": "[MASK] " + HALF}),
        ("/pair", {"inputs": ["a", HALF]}),
        ("/classify", {"inputs": [["a", HALF]]}),
        ("/tag", {"inputs": HALF}),
        ("/answer", {"inputs": {"question": HALF, "context": "b"}}),
        ("/choose", {"inputs": {"prompt": "a", "endings": ["b", HALF]}}),
    ],
)
def test_half_a_character_is_told(running: RunningServer, path: str, body: Any) -> None:
    """JSON can write it, no tokenizer reads it, and it is the client's fault."""
    sent = {"Content-Type": "application/json"}
    found = httpx.post(running.url + path, content=json.dumps(body), headers=sent, timeout=60)
    assert found.status_code == 422
    assert "half a character" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/embed", {"inputs": "a", "layer": [-1] * 1000}, "a layer stands there twice"),
        ("/embed", {"inputs": "a", "layer": [-1] * 2000}, "layer: List should have at most 1024"),
        ("/embed", {"inputs": "a", "layer": [1, -2]}, "a layer stands there twice"),
        ("/embed", {"inputs": ["a"] * 9}, "234 numbers; this server takes 200"),
        ("/embed_all", {"inputs": ["a b c"] * 4}, "numbers; this server takes 200 of one"),
        ("/fill", {"inputs": ["[MASK] [MASK]"] * 4}, "8 masks; this server takes 7 of one"),
        ("/tokenize", {"inputs": ["a " * 60] * 2}, "tokens; this server takes 100 of one"),
    ],
)
def test_a_small_body_gets_no_huge_answer(
    models: list[ServedModel], path: str, body: Any, said: str
) -> None:
    """Vectors, words and tokens of a request have a bound each, which the error names."""
    limits = ServeSettings(numbers=200, masks=7, tokens=100)
    with run_server(models[:1], limits) as own:
        found = own.post(path, body)
        assert (found.status_code, said in found.text) == (422, True), found.text
        assert own.post("/embed", {"inputs": TEXT[0]}).status_code == 200


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (b"NaN", "Input should be a finite number"),
        (b"Infinity", "Input should be a finite number"),
        (b"1e400", "Input should be a finite number"),
        (b"1e38", "Input should be less than or equal to 1000000"),
    ],
)
def test_weights_are_numbers(running: RunningServer, weight: bytes, message: str) -> None:
    """Other weights would give vectors that are not finite."""
    body = b'{"inputs": "a", "layer": [1, 2], "combine": "weighted", "weights": [1, %s]}' % weight
    sent = {"Content-Type": "application/json"}
    found = httpx.post(f"{running.url}/embed", content=body, headers=sent, timeout=60)
    assert found.status_code == 422
    assert f"weights.1: {message}" in found.json()["error"]["message"]


@pytest.fixture(scope="module")
def broken(folders: dict[str, Path]) -> Iterator[RunningServer]:
    """A server of all models with NaN among their weights."""
    models = [load_served_model(name, path) for name, path in folders.items()]
    for model in models:
        encoder = model.embedder.encoder
        torch.nn.init.constant_(next(encoder.parameters()), float("nan"))
    with run_server(models) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/v1/embeddings", "plain", {"input": "a"}),
        ("/v1/embeddings", "plain", {"input": ["a", "b"], "encoding_format": "base64"}),
        ("/embed", "plain", {"inputs": ["a", "b"]}),
        ("/embed", "plain", {"inputs": "a", "pooling": "max", "normalize": False}),
        ("/embed_all", "plain", {"inputs": "a"}),
        ("/similarity", "plain", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/fill", "plain", {"inputs": "a [MASK]"}),
        ("/pair", "plain", {"inputs": ["a", "b"]}),
        ("/classify", "mood", {"inputs": "a"}),
        ("/classify", "topics", {"inputs": "a"}),
        ("/classify", "grade", {"inputs": "a"}),
        ("/tag", "names", {"inputs": "a"}),
        ("/tag", "speech", {"inputs": "a"}),
        ("/answer", "answers", {"inputs": {"question": "a", "context": "b"}}),
        ("/choose", "endings", {"inputs": {"prompt": "a", "endings": ["b", "c"]}}),
    ],
)
def test_numbers_that_are_not_finite_are_an_error(
    broken: RunningServer, path: str, model: str, body: Any
) -> None:
    """500 that names the model, where JSON would have null."""
    found = broken.post(path, {"model": model, **body})
    assert (found.status_code, found.json()["error"]["type"]) == (500, "internal")
    message = found.json()["error"]["message"]
    assert f"the model '{model}' computed numbers that are not finite" in message


def test_attention_that_is_not_finite_is_an_error(broken: RunningServer) -> None:
    """The page draws no NaN."""
    app: Any = broken.server.config.app
    with pytest.raises(NotFiniteError, match="the model 'plain' computed"):
        app._app.state.service.attention("plain", "a")


def test_one_text_that_is_not_finite_fails_alone() -> None:
    """What others sent in the same batch is answered; infinity is an error, too."""

    def compute(payloads: list[float]) -> list[np.ndarray]:
        return [np.array([payload]) for payload in payloads]

    batcher = Batcher(batch_tokens=10, queue_tokens=10, call_tokens=10, wait=60.0)
    checked = require_finite("m", compute)
    good = batcher.submit("key", checked, [(1, 1.0)], Deadline(60))
    bad = batcher.submit("key", checked, [(9, float("inf"))], Deadline(60))
    assert good.result(60) == [np.array([1.0])]
    with pytest.raises(NotFiniteError, match="the model 'm'"):
        bad.result(60)
    batcher.close(60)


def test_a_probability_of_zero_is_finite() -> None:
    """Its logarithm is -inf."""
    answers = [torch.tensor([0.0, float("-inf")])]
    assert require_finite("m", lambda _: answers)(None) is answers


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/tokenize"])
def test_a_long_text_is_tokenized_beside(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """While that takes its time, others are answered."""
    begun, over = threading.Event(), threading.Event()
    own = models[0].bundle.tokenizer
    for name in ("encode_batch", "encode_batch_with_offsets"):
        plain = getattr(own, name)

        def held(texts: list[str], *more: Any, plain: Any = plain) -> Any:
            if len(texts[0]) > 10_000:
                begun.set()
                assert over.wait(60)
            return plain(texts, *more)

        monkeypatch.setattr(Tokenizer, name, lambda _, *given, held=held: held(*given))
    field = "input" if path.startswith("/v1") else "inputs"
    with run_server(models[:1]) as server:
        long = threading.Thread(target=server.post, args=(path, {field: "a " * 6000}))
        long.start()
        assert begun.wait(60)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert long.is_alive()
        over.set()
        long.join(60)


@pytest.mark.parametrize("header", [b"X-Long: " + b"x" * 300_000, b"X: y\r\n" * 50_000])
@pytest.mark.parametrize("ended", [True, False])
def test_a_header_has_a_size(running: RunningServer, header: bytes, ended: bool) -> None:
    """One long line or many short ones, whole or not: 431, and the connection closes."""
    with socket.create_connection(("127.0.0.1", running.port), 60) as own:
        with contextlib.suppress(ConnectionError):
            own.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + header.rstrip())
            if ended:
                own.sendall(b"\r\n\r\n")
        found = b""
        with contextlib.suppress(ConnectionError):
            while chunk := own.recv(65536):
                found += chunk
    assert found.startswith(b"HTTP/1.1 431"), found[:100]
    assert b"the header is larger than 65,536 bytes" in found
    large = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = json.dumps({"inputs": "a " * 50_000}).encode()
    with socket.create_connection(("127.0.0.1", running.port), 60) as own:
        # The next header begins in the last bytes of a body: that is none too large.
        own.sendall(large + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /health HT")
        assert own.recv(65536).startswith(b"HTTP/1.1 200")
    fair = httpx.get(f"{running.url}/health", headers={"X-Long": "x" * 50_000})
    assert fair.status_code == 200


def test_a_trailer_has_a_size(running: RunningServer) -> None:
    """What comes after a chunked body is a header, too."""
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "
    with socket.create_connection(("127.0.0.1", running.port), 60) as own:
        with contextlib.suppress(ConnectionError):
            own.sendall(head + b"x" * 2**22)
        with contextlib.suppress(ConnectionError):
            while own.recv(65536):
                pass
    assert httpx.get(f"{running.url}/health").status_code == 200


def test_only_questions_for_health_are_free(models: list[ServedModel]) -> None:
    """A body sent to /health needs the key, and a place, as any other."""
    with run_server(models[:1], key="open") as own:
        assert httpx.get(f"{own.url}/health").status_code == 200
        assert httpx.head(f"{own.url}/ready").status_code == 200
        assert httpx.post(f"{own.url}/health", content=b"a").status_code == 401


def test_open_pages_take_no_requests_place(models: list[ServedModel]) -> None:
    """Streams of the page are counted for themselves; health is told whatever the crowd."""
    pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
    from bertsmith.serve.page import mount

    gate = threading.Event()
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(
            run_server(models[:1], ServeSettings(requests=2, pages=3), page=mount)
        )
        client = stack.enter_context(httpx.Client(timeout=60))
        stack.callback(gate.set)
        service = own.server.config.app._app.state.service  # type: ignore[union-attr]
        service.fill = lambda *_: [[]] if gate.wait() else None
        functions = client.get(f"{own.url}/config").json()["dependencies"]
        fill = next(function["id"] for function in functions if function["api_name"] == "fill")
        stream = f"{own.url}/gradio_api/queue/data?session_hash="
        for number in range(3):
            call = {"data": ["[MASK]", 5, ""], "fn_index": fill, "session_hash": f"s{number}"}
            assert own.post("/gradio_api/queue/join", call).status_code == 200
            opened = stack.enter_context(client.stream("GET", f"{stream}s{number}"))
            assert opened.status_code == 200
        found = client.get(f"{stream}s3")
        assert (found.status_code, "3 pages are open" in found.text) == (429, True)
        assert own.post("/embed", {"inputs": "a"}).status_code == 200
        assert client.get(f"{own.url}/health").status_code == 200


def test_other_methods_and_paths_beside_the_page(models: list[ServedModel]) -> None:
    """The page answers every path that is left; what is no path of ours is told in our form."""
    pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
    from bertsmith.serve.page import mount

    with run_server(models[:1], page=mount) as own:
        found = httpx.get(f"{own.url}/embed")
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
        assert "GET is not what /embed takes; /docs" in found.json()["error"]["message"]
        assert httpx.post(f"{own.url}/health").status_code == 405
        assert httpx.head(f"{own.url}/health").status_code == 200
        found = httpx.post(f"{own.url}/nothing", json={})
        assert found.status_code in (404, 405)
        assert "/nothing" in found.json()["error"]["message"]


@pytest.fixture
def page(models: list[ServedModel]) -> Iterator[Any]:
    """A client of the page's own endpoints."""
    pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
    from gradio_client import Client

    from bertsmith.serve.page import mount

    with run_server(models, page=mount) as own:
        yield Client(own.url, verbose=False, analytics_enabled=False).predict


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"api_name": "/word", "word": "a", "texts": ["a " * 60] * 2}, "'a' stands 120 times"),
        ({"api_name": "/word", "word": "a", "texts": "a text"}, "texts: Input should be a valid l"),
        ({"api_name": "/fill", "text": "[MASK]", "top": "5"}, "top: Input should be a valid int"),
        ({"api_name": "/fill", "text": "[MASK]", "top": 10**9}, "expected 1 to 1,000"),
        ({"api_name": "/fill", "text": None}, "text: Input should be a valid string"),
    ],
)
def test_the_pages_own_endpoints_say_what_is_wrong(page: Any, asked: Any, said: str) -> None:
    """Values of other types, and words that stand everywhere, are refused in words."""
    with pytest.raises(Exception, match=said):
        page(**asked)


def test_a_word_everywhere_is_counted_before_vectors(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed for what will be refused."""
    pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
    from bertsmith.errors import InputError
    from bertsmith.serve.page.inspection import Looking

    service = Service(models[:1])
    monkeypatch.setattr(service, "tokens", lambda *_: pytest.fail("computed"))
    with pytest.raises(InputError, match="stands 15,000 times"):
        Looking(service).word(None, "a", ("a " * 300,) * 50)
    monkeypatch.undo()
    # Inside other words it does not count.
    looking = Looking(service)
    assert len(looking.word(None, "he", ("he " + "then " * 20,) * 9).places) == 9
    service.close()
