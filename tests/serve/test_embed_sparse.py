"""POST /embed_sparse: sparse vectors of the masked-LM head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM

from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import TRUNCATED_HEADER
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import paused_model
from tests.serve.model_server import SENTENCES, RunningServer, run_server

LONG_TEXT = " ".join(SENTENCES)


def compute_hf_vector(directory: Path, text: str, side: str = "right") -> Any:
    """Compute max(log(1 + ReLU(logits))) of a text with transformers, [V]."""
    tokenizer = AutoTokenizer.from_pretrained(directory, truncation_side=side)
    model = BertForMaskedLM.from_pretrained(directory).eval()
    with torch.no_grad():
        inputs = tokenizer(text, truncation=True, max_length=61, return_tensors="pt")
        return model(**inputs).logits[0].relu().log1p().amax(0).numpy()


def test_vectors_have_the_format_of_tei(server: RunningServer, model_dirs: dict[str, Path]) -> None:
    """Each text gets the entries {index, value} above 0 of transformers' BertForMaskedLM."""
    texts = [SENTENCES[0], "iron", LONG_TEXT]
    response = server.post("/embed_sparse", {"inputs": texts})
    assert response.headers[TRUNCATED_HEADER] == "1"
    for entries, text in zip(response.json(), texts, strict=True):
        expected = compute_hf_vector(model_dirs["plain"], text)
        assert [entry["index"] for entry in entries] == list(expected.nonzero()[0])
        values = [entry["value"] for entry in entries]
        np.testing.assert_allclose(values, expected[expected > 0], rtol=0, atol=1e-5)
    one = server.post("/embed_sparse", {"inputs": "iron", "parameters": {}})
    np.testing.assert_allclose(
        [entry["value"] for entry in one.json()[0]],
        [entry["value"] for entry in response.json()[1]],
        atol=1e-5,
    )
    assert TRUNCATED_HEADER not in one.headers


def test_texts_are_truncated_on_either_side_or_rejected(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """truncation_direction selects the side, and truncate: false rejects long texts."""
    for side in ("Left", "right"):
        body = {"inputs": LONG_TEXT, "truncation_direction": side}
        expected = compute_hf_vector(model_dirs["plain"], LONG_TEXT, side.lower())
        values = [entry["value"] for entry in server.post("/embed_sparse", body).json()[0]]
        np.testing.assert_allclose(values, expected[expected > 0], rtol=0, atol=1e-5)
    response = server.post("/embed_sparse", {"inputs": [LONG_TEXT, "a"], "truncate": False})
    assert response.status_code == 422
    assert "1 of the texts are longer" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("names", "model", "message"),
    [
        (
            ("mood", "plain"),
            "mood",
            "the model 'mood' cannot embed_sparse, which needs",
        ),
        (("mood",), None, "no loaded model can embed_sparse, which needs a masked-LM head"),
    ],
)
def test_models_without_a_head_are_named(
    models: list[ServedModel], names: tuple[str, ...], model: str | None, message: str
) -> None:
    """The error says which model has no masked-LM head; by default, the first one with it."""
    loaded = [served for served in models if served.name in names]
    with run_server(loaded) as server:
        response = server.post("/embed_sparse", {"inputs": "a", "model": model})
        assert response.status_code == 404
        assert response.json()["error"]["message"].startswith(message)
        if len(loaded) > 1:
            assert server.post("/embed_sparse", {"inputs": "a"}).status_code == 200


def test_limits_apply(models: list[ServedModel]) -> None:
    """The number of texts and of entries in the response is limited."""
    with run_server(models[:1], ServeSettings(max_texts=3, max_vector_elements=400)) as server:
        for texts, message in ((["a"] * 4, "3 texts"), (SENTENCES[:3], "400 vector elements")):
            response = server.post("/embed_sparse", {"inputs": texts})
            assert response.status_code == 422
            assert message in response.json()["error"]["message"]


def test_texts_of_a_request_share_a_batch(models: list[ServedModel]) -> None:
    """Three texts are computed in one forward pass."""
    with run_server(models[:1]) as server, paused_model() as pause:
        pause.resume.set()
        assert server.post("/embed_sparse", {"inputs": SENTENCES[:3]}).status_code == 200
        assert pause.num_batches == 1
