"""Invalid texts and weights, limits per request, and outputs that are not finite."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bertsmith.model.bert import BertModel
from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import Deadline, NotFiniteError
from bertsmith.serve.models import ServedModel, load_served_model, require_finite
from bertsmith.serve.settings import ServeSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.masked_lm import TopTokens
from tests.serve.model_server import SENTENCES, RunningServer, run_server

LONE_SURROGATE = "half \ud800 a character"
JSON_HEADERS = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", LONE_SURROGATE]}),
        ("/embed", {"inputs": ["a", LONE_SURROGATE]}),
        ("/embed_all", {"inputs": LONE_SURROGATE}),
        ("/tokenize", {"inputs": LONE_SURROGATE}),
        ("/similarity", {"inputs": {"source_sentence": LONE_SURROGATE, "sentences": ["a"]}}),
        ("/fill", {"inputs": "[MASK] " + LONE_SURROGATE}),
        ("/pair", {"inputs": ["a", LONE_SURROGATE]}),
        ("/classify", {"inputs": [["a", LONE_SURROGATE]]}),
        ("/tag", {"inputs": LONE_SURROGATE}),
        ("/answer", {"inputs": {"question": LONE_SURROGATE, "context": "b"}}),
        ("/choose", {"inputs": {"prompt": "a", "endings": ["b", LONE_SURROGATE]}}),
    ],
)
def test_lone_surrogates_are_rejected(server: RunningServer, path: str, body: Any) -> None:
    """JSON can express lone surrogates, but tokenizers cannot encode them."""
    content = json.dumps(body)
    response = httpx.post(server.url + path, content=content, headers=JSON_HEADERS, timeout=60)
    assert response.status_code == 422
    assert "lone surrogate" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/embed", {"inputs": "a", "layer": [-1] * 1000}, "twice"),
        ("/embed", {"inputs": "a", "layer": [-1] * 2000}, "layer: expected at most 1,024 items"),
        ("/embed", {"inputs": "a", "layer": [1, -2]}, "twice"),
        ("/embed", {"inputs": ["a"] * 9}, "200 vector elements per request, got 234"),
        ("/embed_all", {"inputs": ["a b c"] * 4}, "200 vector elements per request"),
        ("/fill", {"inputs": ["[MASK] [MASK]"] * 4}, "7 masks per request, got 8"),
        ("/tokenize", {"inputs": ["a " * 60] * 2}, "100 tokens per request"),
    ],
)
def test_small_bodies_with_large_responses_are_rejected(
    models: list[ServedModel], path: str, body: Any, message: str
) -> None:
    """Layers, vectors, masks and tokens of a request are limited."""
    settings = ServeSettings(max_vector_elements=200, max_masks=7, max_tokens=100)
    with run_server(models[:1], settings) as server:
        response = server.post(path, body)
        assert response.status_code == 422, response.text
        assert message in response.text
        assert server.post("/embed", {"inputs": SENTENCES[0]}).status_code == 200


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (b"NaN", "Input should be a finite number"),
        (b"Infinity", "Input should be a finite number"),
        (b"1e400", "Input should be a finite number"),
        (b"1e38", "Input should be less than or equal to 1000000"),
    ],
)
def test_layer_weights_must_be_finite(server: RunningServer, weight: bytes, message: str) -> None:
    """Weights that are infinite, NaN or too large would give vectors that are not finite."""
    body = b'{"inputs": "a", "layer": [1, 2], "combine": "weighted", "weights": [1, %s]}' % weight
    response = httpx.post(f"{server.url}/embed", content=body, headers=JSON_HEADERS, timeout=60)
    assert response.status_code == 422
    assert f"weights.1: {message}" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def nan_server(model_dirs: dict[str, Path]) -> Iterator[RunningServer]:
    """A server of all models, with NaN in a weight of each."""
    models = [load_served_model(name, path) for name, path in model_dirs.items()]
    for model in models:
        encoder = model.embedder.encoder
        assert isinstance(encoder, BertModel)
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
        ("/attention", "plain", {"inputs": "a"}),
    ],
)
def test_outputs_that_are_not_finite_are_errors(
    nan_server: RunningServer, path: str, model: str, body: Any
) -> None:
    """NaN in the outputs gives status 500, because JSON would show it as null."""
    response = nan_server.post(path, {"model": model, **body})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "internal")
    assert f"the outputs of model '{model}' are not finite" in error["message"]


def test_output_that_is_not_finite_does_not_fail_its_batch() -> None:
    """An infinite output is an error, but other calls of the same batch are answered."""

    def compute(payloads: list[float]) -> list[np.ndarray]:
        return [np.array([payload]) for payload in payloads]

    batcher = Batcher(
        max_batch_tokens=10, max_queue_tokens=10, max_call_tokens=10, max_wait_seconds=60.0
    )
    compute_finite = require_finite("m", compute)
    finite = batcher.submit("key", compute_finite, [(1, 1.0)], Deadline(60))
    infinite = batcher.submit("key", compute_finite, [(9, float("inf"))], Deadline(60))
    assert finite.result(60) == [np.array([1.0])]
    with pytest.raises(NotFiniteError, match="model 'm'"):
        infinite.result(60)
    batcher.close(60)


def test_log_probability_of_minus_infinity_is_allowed() -> None:
    """Minus infinity is the logarithm of a probability of zero."""
    results = [TopTokens(torch.tensor([[0.0, float("-inf")]]), torch.tensor([[5, 6]]))]
    assert require_finite("m", lambda _: results)(None) is results


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/tokenize"])
def test_requests_are_answered_while_a_long_text_is_tokenized(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A long text is tokenized in a thread, which does not block the event loop."""
    started, resume = threading.Event(), threading.Event()
    tokenizer = models[0].bundle.tokenizer
    for name in ("encode_batch", "encode_batch_with_offsets"):
        encode = getattr(tokenizer, name)

        def encode_paused(texts: list[str], *args: Any, encode: Any = encode) -> Any:
            if len(texts[0]) > 10_000:
                started.set()
                assert resume.wait(60)
            return encode(texts, *args)

        monkeypatch.setattr(
            Tokenizer, name, lambda _, *args, encode_paused=encode_paused: encode_paused(*args)
        )
    field = "input" if path.startswith("/v1") else "inputs"
    with run_server(models[:1]) as server:
        thread = threading.Thread(target=server.post, args=(path, {field: "a " * 6000}))
        thread.start()
        assert started.wait(60)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert thread.is_alive()
        resume.set()
        thread.join(60)


@pytest.mark.parametrize(
    ("header", "status"), [(b"X-Long: " + b"x" * 300_000, 431), (b"Content-Length: x", 400)]
)
def test_responses_of_the_parser_have_cors_headers(
    models: list[ServedModel], header: bytes, status: int
) -> None:
    """Responses to invalid headers (400) and too large headers (431) have CORS headers."""
    with run_server(models[:1], origins=["https://a.example"]) as server:
        for origin, is_allowed in ((b"https://a.example", True), (b"https://b.example", False)):
            with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(
                        b"GET /health HTTP/1.1\r\nHost: x\r\nOrigin: " + origin + b"\r\n"
                    )
                    connection.sendall(header + b"\r\n\r\n")
                response = b""
                with contextlib.suppress(ConnectionError):
                    while chunk := connection.recv(65536):
                        response += chunk
            assert response.startswith(b"HTTP/1.1 %d" % status), response[:100]
            head = response.partition(b"\r\n\r\n")[0]
            assert (b"Access-Control-Allow-Origin: " + origin in head) == is_allowed


@pytest.mark.parametrize("header", [b"X-Long: " + b"x" * 300_000, b"X: y\r\n" * 50_000])
@pytest.mark.parametrize("is_complete", [True, False])
def test_too_large_header_gets_431(server: RunningServer, header: bytes, is_complete: bool) -> None:
    """A header with one long field or many short ones is rejected, but a large body is accepted."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + header.rstrip())
            if is_complete:
                connection.sendall(b"\r\n\r\n")
        response = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                response += chunk
    assert response.startswith(b"HTTP/1.1 431"), response[:100]
    assert b"the header is larger than 65,536 bytes" in response
    post = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = json.dumps({"inputs": "a " * 50_000}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        # The next request starts in the same packet as the end of the body, whose bytes must not
        # count as header bytes.
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        connection.sendall(post + length + body + b"GET /health HT")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    response_50k = httpx.get(f"{server.url}/health", headers={"X-Long": "x" * 50_000})
    assert response_50k.status_code == 200


def test_trailer_of_a_chunked_body_has_a_size_limit(server: RunningServer) -> None:
    """A trailer of 4 MiB closes the connection, and the server keeps working."""
    header = b"POST /embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(header + b"x" * 2**22)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("header", "data"),
    [(b"", b""), (b"", b"\r\n"), (b"", b"\r\nGE"), (b"Content-Length: 9\r\n", b"x")],
    ids=["idle", "line-break", "unfinished-header", "unfinished-body"],
)
def test_idle_connection_is_closed(models: list[ServedModel], header: bytes, data: bytes) -> None:
    """An answered request is followed by a time limit, also if further data is no full request."""
    settings = ServeSettings(body_timeout_seconds=0.2)
    options = {"timeout_keep_alive": 1}
    with (
        run_server(models[:1], settings, uvicorn_options=options) as server,
        socket.create_connection(("127.0.0.1", server.port), 60) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.settimeout(10)
        connection.sendall(data)
        assert connection.recv(65536) == b""


def test_pipelined_request_ends_the_keep_alive_timeout(models: list[ServedModel]) -> None:
    """A request that has begun before the previous answer has the time limit of its body."""
    with (
        run_server(models[:1], uvicorn_options={"timeout_keep_alive": 1}) as server,
        socket.create_connection(("127.0.0.1", server.port), 60) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nPOST /fill HTTP/1.1\r\nHo")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"st: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{")
        time.sleep(1.5)
        connection.sendall(b"}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 422")


def test_only_get_and_head_of_health_need_no_key(models: list[ServedModel]) -> None:
    """A POST request to /health needs the API key."""
    with run_server(models[:1], key="open") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.head(f"{server.url}/ready").status_code == 200
        assert httpx.post(f"{server.url}/health", content=b"a").status_code == 401


def test_web_page_keeps_the_error_format(models: list[ServedModel]) -> None:
    """With the page, wrong methods and paths have the common error format."""
    with run_server(models[:1], has_page=True) as server:
        response = httpx.get(f"{server.url}/embed")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert "/embed does not accept GET; see /docs" in response.json()["error"]["message"]
        assert httpx.post(f"{server.url}/health").status_code == 405
        assert httpx.head(f"{server.url}/health").status_code == 200
        response = httpx.post(f"{server.url}/nothing", json={})
        assert response.status_code == 404
        assert "/nothing" in response.json()["error"]["message"]


def test_failures_are_logged_without_the_input(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception is logged by type and traceback; its message may quote the text."""

    def fail(_: Tokenizer, texts: list[str], *__: Any) -> Any:
        try:
            int(texts[0])
        except ValueError as error:
            message = f"cannot encode {texts[0]}"
            raise KeyError(message) from error

    for name in ("encode_batch", "encode_batch_with_offsets"):
        monkeypatch.setattr(Tokenizer, name, fail)
    with run_server(models[:1]) as server, caplog.at_level("DEBUG"):
        response = server.post("/embed", {"inputs": "my secret"})
    assert response.status_code == 500
    assert "see the server's log" in response.json()["error"]["message"]
    assert "an endpoint failed with KeyError" in caplog.text
    assert "caused by ValueError" in caplog.text
    assert "in fail" in caplog.text
    assert "my secret" not in caplog.text
