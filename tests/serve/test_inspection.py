"""Endpoints that look into a model, and similarities of several texts."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import BertsmithError
from bertsmith.serve import inspection
from bertsmith.serve.inspection import compute_occurrences, max_pool
from bertsmith.serve.model_calls import ModelCalls
from bertsmith.serve.models import ServedModel
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.use.attributions import attribute
from bertsmith.use.embed import Embedder
from bertsmith.use.explain import attention
from bertsmith.use.similar import similar
from tests.serve.model_server import SENTENCES, RunningServer, run_server

TEXTS = [SENTENCES[0], SENTENCES[3], "the smith and the smith"]


def test_word_distances_equal_those_of_similar(
    server: RunningServer, models: list[ServedModel]
) -> None:
    """Without ``layer``, all layers; -1 is the last one."""
    embedder = models[0].embedder
    body = {"inputs": TEXTS, "word": "smith"}
    response = server.post("/word_distances", body).json()
    assert response["word"] == "smith"
    assert [layer["layer"] for layer in response["layers"]] == [0, 1, 2]
    for layer in response["layers"]:
        expected = similar(embedder, TEXTS, "smith", layer=layer["layer"])
        np.testing.assert_allclose(layer["distances"], expected.distances, atol=1e-5)
    occurrences = [
        {"text_index": item.text_index, "start": item.start, "end": item.end}
        for item in expected.occurrences
    ]
    assert response["occurrences"] == occurrences
    assert len(occurrences) == 4
    last = server.post("/word_distances", {**body, "layer": -1}).json()["layers"]
    assert last == response["layers"][2:]


def test_word_is_not_searched_in_long_texts(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search would hold the GIL for seconds; the status is 422 without it."""
    monkeypatch.setattr(Embedder, "find_word", None)
    response = server.post("/word_distances", {"inputs": ["a " * 40_000] * 2, "word": "a"})
    assert response.status_code == 422
    message = response.json()["error"]["message"]
    assert "the limit is 131,072 characters per request, got 160,000" in message


def test_attention_of_all_heads_or_one(server: RunningServer, models: list[ServedModel]) -> None:
    """The probabilities equal those of the library; layers and heads count from 1."""
    expected = attention(models[0].bundle, SENTENCES[0], SENTENCES[1])
    body = {"inputs": SENTENCES[:2]}
    response = server.post("/attention", body).json()
    assert response["tokens"] == expected.tokens
    assert response["segments"] == expected.segments
    assert response["num_removed_tokens"] == expected.num_removed_tokens
    numbers = [(item["layer"], item["head"]) for item in response["maps"]]
    assert numbers == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for (layer, head), item in zip(numbers, response["maps"], strict=True):
        probabilities = expected.probabilities[layer - 1, head - 1]
        np.testing.assert_allclose(item["probabilities"], probabilities, atol=1e-5)
    one = server.post("/attention", {**body, "layer": 2, "head": 1}).json()["maps"]
    assert one == [response["maps"][2]]
    pooled = server.post("/attention", {**body, "layer": 2, "head": 1, "max_cells": 7}).json()
    np.testing.assert_allclose(
        pooled["maps"][0]["probabilities"], max_pool(expected.probabilities[1, 0], 7), atol=1e-5
    )


def test_max_pooling_keeps_the_largest_probability() -> None:
    """Each cell of the result is the maximum of a block of cells."""
    probabilities = np.arange(25, dtype=np.float32).reshape(5, 5)
    assert max_pool(probabilities, 2).tolist() == [[6, 9], [21, 24]]
    assert max_pool(probabilities, 5).tolist() == probabilities.tolist()


def test_similarities_of_all_pairs(server: RunningServer, models: list[ServedModel]) -> None:
    """A list of texts gives a matrix of cosines."""
    vectors = models[0].embedder.encode(TEXTS, normalize=True)
    response = server.post("/similarity", {"inputs": TEXTS}).json()
    np.testing.assert_allclose(response, vectors @ vectors.T, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("word_distances", {"inputs": TEXTS, "word": "anvil"}, "the word 'anvil' is not in"),
        ("word_distances", {"inputs": TEXTS, "word": " "}, "the word ' ' is not in"),
        ("word_distances", {"inputs": TEXTS, "word": "smith", "layer": 3}, "expected 0 .* to 2"),
        ("word_distances", {"inputs": TEXTS, "word": "smith", "layer": -4}, "layer is -4"),
        ("word_distances", {"inputs": "a text", "word": "a"}, "inputs: Input should be a valid l"),
        ("word_distances", {"inputs": ["a " * 60] * 2, "word": "a"}, "of the word .* got 120"),
        ("attention", {"inputs": "a", "layer": 3}, "layer is 3; expected 1 to 2"),
        ("attention", {"inputs": "a", "head": 3}, "head is 3; expected 1 to 2"),
        ("attention", {"inputs": "a", "layer": 0}, "layer: .* greater than or equal to 1"),
        ("attention", {"inputs": " "}, "the text is empty"),
        ("attention", {"inputs": ["a", "b", "c"]}, "inputs"),
        ("similarity", {"inputs": []}, "at least 1 item"),
        ("similarity", {"inputs": ["a"] * 11}, "the limit is 100 similarities .* got 121"),
    ],
)
def test_invalid_requests_are_refused(
    limited_server: RunningServer, path: str, body: dict[str, Any], message: str
) -> None:
    """The error says what is wrong and what is expected."""
    response = limited_server.post(f"/{path}", body)
    assert response.status_code == 422
    assert re.search(message, response.json()["error"]["message"])


@pytest.fixture(scope="module")
def limited_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server whose responses have at most 100 numbers."""
    with run_server(models[:1], ServeSettings(max_vector_elements=100)) as server:
        yield server


def test_size_of_attention_is_limited(
    limited_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of numbers applies to the requested heads, after pooling.

    A request above the limit is rejected before the model computes.
    """
    body = {"inputs": SENTENCES[0]}
    assert limited_server.post("/attention", {**body, "max_cells": 5}).status_code == 200
    monkeypatch.setattr(ModelCalls, "compute_attention", None)
    response = limited_server.post("/attention", body)
    assert response.status_code == 422
    message = response.json()["error"]["message"]
    assert message.startswith("the limit is 100 attention probabilities per request, got ")
    assert message.endswith("; send a layer, a head, or max_cells")


def test_frequent_word_is_rejected_before_vectors_are_computed(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Occurrences are counted first; occurrences within other words do not count."""
    service = Service(models[:1])
    name = "bertsmith.serve.inspection.compute_token_vectors"
    monkeypatch.setattr(name, lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(BertsmithError, match="got 15,000"):
        compute_occurrences(service, None, ("a " * 300,) * 50, "a", [0])
    monkeypatch.undo()
    texts = ("he " + "then " * 20,) * 9
    assert len(compute_occurrences(service, None, texts, "he", [0])) == 9
    service.close()


def test_attributions_equal_those_of_the_library(
    server: RunningServer, models: list[ServedModel]
) -> None:
    """/attributions explains a label of a text or pair; limits and models are checked."""
    bundle = next(model.bundle for model in models if model.name == "mood")
    assert isinstance(bundle, FineTunedBundle)
    for inputs, label in ((SENTENCES[0], None), ((SENTENCES[0], "the smith"), "bad")):
        expected = attribute(bundle, inputs, label)
        request = {"inputs": inputs, "label": label, "model": "mood"}
        response = server.post("/attributions", request).json()
        assert response["tokens"] == expected.tokens
        assert response["segments"] == expected.segments
        assert response["label"] == (label or expected.label)
        np.testing.assert_allclose(response["attributions"], expected.values, atol=1e-5)
    for body, status, message in (
        ({"inputs": "a", "model": "plain"}, 404, "cannot classify"),
        ({"inputs": "a", "model": "mood", "label": "no"}, 422, "expected one of bad, good"),
        ({"inputs": " "}, 422, "is empty"),
    ):
        error = server.post("/attributions", body)
        assert error.status_code == status
        assert message in error.json()["error"]["message"]


def test_attributions_are_limited(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text with too many tokens is rejected before the model computes it."""
    monkeypatch.setattr(inspection, "MAX_ATTRIBUTION_TOKENS", 9)
    mood = next(model for model in models if model.name == "mood")
    with run_server([mood]) as server:
        response = server.post("/attributions", {"inputs": SENTENCES[0]})
        assert response.status_code == 422
        assert "limited to 9 tokens" in response.json()["error"]["message"]
        assert server.post("/attributions", {"inputs": "iron"}).status_code == 200
