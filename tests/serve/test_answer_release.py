"""The memory of an answer is freed with the answer, without a garbage collection."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from bertsmith.serve import vectors
from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.models import ServedModel
from bertsmith.serve.settings import ServeSettings
from bertsmith.use.embed import Embedder
from tests.serve.model_pause import TIMEOUT, wait_until
from tests.serve.model_server import SENTENCES, run_server, send_request_without_reading


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["weakref.ref[Any]"]]:
    """Weak references to the memory of all vectors that servers compute, without the collector."""
    computed: list[weakref.ref[Any]] = []
    allocate, encode = vectors._allocate_outputs, Embedder.encode_batch

    def allocate_outputs(*arguments: Any) -> Any:
        outputs = allocate(*arguments)
        # All outputs are views of one array.
        computed.append(weakref.ref(outputs[0].base))
        return outputs

    def encode_batch(*arguments: Any, **options: Any) -> Any:
        batch = encode(*arguments, **options)
        if not isinstance(batch, list):
            computed.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(vectors, "_allocate_outputs", allocate_outputs)
    monkeypatch.setattr(Embedder, "encode_batch", encode_batch)
    gc.collect()
    gc.disable()
    yield computed
    gc.enable()


def _is_free(references: list["weakref.ref[Any]"]) -> bool:
    """Return whether vectors were computed and all of them were freed."""
    return bool(references) and all(reference() is None for reference in references)


@pytest.mark.parametrize("path", ["/embed_all", "/embed", "/v1/embeddings"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_vectors_are_freed_after_the_answer(
    models: list[ServedModel],
    monkeypatch: pytest.MonkeyPatch,
    references: list["weakref.ref[Any]"],
    path: str,
    *,
    is_streamed: bool,
) -> None:
    """Neither the open connection nor the idle model thread keeps the vectors of an answer."""
    if is_streamed:
        monkeypatch.setattr("bertsmith.serve.embeddings._MAX_BUFFERED_NUMBERS", 100)
    body = {"input" if path.startswith("/v1") else "inputs": SENTENCES * 10}
    with run_server(models[:1]) as server:
        response = server.post(path, body)
        assert response.status_code == 200
        assert ("content-length" in response.headers) != is_streamed
        wait_until(lambda: _is_free(references))


def test_vectors_of_slow_reader_are_freed(
    models: list[ServedModel], references: list["weakref.ref[Any]"]
) -> None:
    """The vectors of a client that does not read are freed when the client is disconnected."""
    settings = ServeSettings(request_timeout_seconds=TIMEOUT, send_timeout_seconds=0.2)
    with (
        run_server(models[:1], settings) as server,
        send_request_without_reading(server),
    ):
        wait_until(lambda: _is_free(references))


class _Payload:
    """A payload, which is also its own result."""


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_batcher_frees_calls(*, is_cancelled: bool) -> None:
    """A batcher without work, and the deadline of a call, keep no payloads and no results."""
    resume = threading.Event()

    def compute_batch(payloads: list[Any]) -> list[Any]:
        assert resume.wait(TIMEOUT)
        return payloads

    batcher = Batcher(
        max_batch_tokens=100, max_queue_tokens=1000, max_call_tokens=500, max_wait_seconds=0.0
    )
    deadline = Deadline(TIMEOUT)
    payload = _Payload()
    reference = weakref.ref(payload)
    gc.collect()
    gc.disable()
    try:
        future = batcher.submit("key", compute_batch, [(1, payload)], deadline)
        if is_cancelled:
            deadline.cancel()
            assert future.cancelled()
        resume.set()
        if not is_cancelled:
            assert future.result(TIMEOUT) == [payload]
        del payload, future
        wait_until(lambda: reference() is None)
        # The future no longer exists, and nothing happens.
        deadline.cancel()
    finally:
        gc.enable()
        batcher.close(TIMEOUT)
