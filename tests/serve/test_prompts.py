"""Prompts that a sentence-transformers directory declares."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from bertsmith.serve.models import load_served_model
from tests.serve.model_server import SENTENCES, RunningServer, run_server

PROMPTS = {"query": "the smith: ", "document": "every hammer: "}
LONG_TEXT = " ".join(SENTENCES)


@pytest.fixture(scope="module")
def reference(model_dirs: dict[str, Path]) -> SentenceTransformer:
    """The same model in sentence-transformers; its default prompt is "document"."""
    parts = [
        modules.Transformer(str(model_dirs["plain"])),
        modules.Pooling(26),
        modules.Normalize(),
    ]
    return SentenceTransformer(
        modules=parts, prompts=PROMPTS, default_prompt_name="document", device="cpu"
    )


@pytest.fixture(scope="module")
def prompt_server(
    reference: SentenceTransformer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of the sentence-transformers directory."""
    path = tmp_path_factory.mktemp("prompts") / "model"
    reference.save(str(path))
    with run_server([load_served_model("prompted", path)]) as server:
        yield server


def assert_close(actual: Any, expected: Any) -> None:
    """Compare numbers with a tolerance of 1e-5."""
    np.testing.assert_allclose(np.array(actual, np.float64), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt_name", [None, "query", "document", "default"])
def test_prompts_give_the_vectors_of_sentence_transformers(
    prompt_server: RunningServer, reference: SentenceTransformer, prompt_name: str | None
) -> None:
    """All embedding endpoints add the named prompt, or the default one, to each text."""
    texts = SENTENCES[:3]
    name = None if prompt_name == "default" else prompt_name
    expected = reference.encode(texts, prompt_name=name)
    body = {"inputs": texts, "prompt_name": prompt_name}
    assert_close(prompt_server.post("/embed", body).json(), expected)
    response = prompt_server.post("/v1/embeddings", {"input": texts, "prompt_name": prompt_name})
    assert_close([item["embedding"] for item in response.json()["data"]], expected)
    tokens = prompt_server.post("/embed_all", body).json()
    means = np.stack([np.mean(vectors, axis=0) for vectors in tokens])
    assert_close(means / np.linalg.norm(means, axis=1, keepdims=True), expected)
    inputs = {"source_sentence": texts[0], "sentences": texts[1:]}
    similarities = prompt_server.post(
        "/similarity", {"inputs": inputs, "parameters": {"prompt_name": prompt_name}}
    )
    assert_close(similarities.json(), expected[1:] @ expected[0])


def test_prompt_is_tokenized(prompt_server: RunningServer) -> None:
    """/tokenize adds the named prompt, and no prompt for null, as text-embeddings-inference."""
    text = SENTENCES[0]

    def tokenize(**body: Any) -> Any:
        return prompt_server.post("/tokenize", body).json()

    assert tokenize(inputs=text, prompt_name=None) == tokenize(inputs=text)
    assert tokenize(inputs=text, prompt_name="query") == tokenize(inputs=PROMPTS["query"] + text)
    default = tokenize(inputs=[text], prompt_name="default")
    assert default == tokenize(inputs=PROMPTS["document"] + text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "a"}),
        ("/embed", {"inputs": "a"}),
        ("/embed_all", {"inputs": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/similarity", {"inputs": ["a", "b"]}),
    ],
)
def test_unknown_prompt_lists_the_prompts(
    prompt_server: RunningServer, server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    """The error lists the prompts of the model, or says that it has none."""
    option = {"prompt_name": "question"}
    extra: dict[str, Any] = {"parameters": option} if path == "/similarity" else option
    body = body | extra
    response = prompt_server.post(path, body)
    assert response.status_code == 422
    assert response.json()["error"]["message"] == (
        "unknown prompt 'question'; expected one of 'document', 'query'"
    )
    message = server.post(path, body).json()["error"]["message"]
    assert message == "unknown prompt 'question'; the model declares no prompts"


def test_prompts_need_texts(prompt_server: RunningServer) -> None:
    """Token ids cannot get a prompt."""
    response = prompt_server.post("/v1/embeddings", {"input": [2, 5, 3], "prompt_name": "query"})
    assert response.status_code == 422
    assert "prompt_name has no effect on token ids" in response.json()["error"]["message"]


def test_truncation_direction_of_all_embedding_endpoints(server: RunningServer) -> None:
    """/embed_all and /similarity truncate on the left, too; others accept the right side only."""
    vectors = {}
    for side in ("right", "left"):
        option = {"truncation_direction": side}
        expected = server.post("/embed", {"inputs": LONG_TEXT, "normalize": False, **option})
        tokens = server.post("/embed_all", {"inputs": LONG_TEXT, **option}).json()[0]
        vectors[side] = np.mean(tokens, axis=0)
        assert_close(vectors[side], expected.json()[0])
        inputs = {"inputs": [LONG_TEXT, "iron"], "parameters": option}
        unit_vectors = server.post("/embed", {"inputs": [LONG_TEXT, "iron"], **option}).json()
        cosine = np.dot(*map(np.array, unit_vectors))
        assert_close(server.post("/similarity", inputs).json()[0][1], cosine)
    assert np.abs(vectors["right"] - vectors["left"]).max() > 0.01
    bodies: dict[str, dict[str, Any]] = {
        "/predict": {"inputs": "a"},
        "/rerank": {"query": "a", "texts": ["a"]},
    }
    for path, body in bodies.items():
        assert server.post(path, {**body, "truncation_direction": "Right"}).status_code == 200
        response = server.post(path, {**body, "truncation_direction": "Left"})
        assert response.status_code == 422
        assert "truncation_direction" in response.json()["error"]["message"]
