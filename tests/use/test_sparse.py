"""Sparse vectors equal those of transformers and of sentence-transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from transformers import AutoTokenizer, BertForMaskedLM

from bertsmith.bundle import load_encoder
from bertsmith.errors import BertsmithError
from bertsmith.interop.huggingface import write_huggingface
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.interop.sentence_transformers.splade import read_splade
from bertsmith.use import sparse
from bertsmith.use.embed import Embedder
from bertsmith.use.sparse import SparseVector, embed_sparse
from tests.use.conftest import MAX_POSITIONS, SENTENCES

TEXTS = ["iron", SENTENCES[0], " ".join(SENTENCES), "", *SENTENCES[1:3]]


def to_dense(vectors: list[SparseVector], size: int) -> Any:
    """Return the vectors with all entries, [n, V]."""
    dense = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(dense, vectors, strict=True):
        assert list(vector.token_ids) == sorted(set(vector.token_ids))
        assert (vector.weights > 0).all()
        row[vector.token_ids] = vector.weights
    return dense


def compute_hf_vectors(directory: Path) -> Any:
    """Compute max(log(1 + ReLU(logits))) for each text with transformers, [n, V]."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = BertForMaskedLM.from_pretrained(directory).eval()
    rows = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=MAX_POSITIONS, return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**inputs).logits[0].relu().log1p().amax(0))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("max_logits", [None, 3000])
def test_vectors_equal_those_of_transformers(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, max_logits: int | None
) -> None:
    """They are the maximum over all tokens, for short, empty and truncated texts in a batch."""
    if max_logits is not None:
        # About 13 tokens, so that some texts share their logits and others exceed the limit.
        monkeypatch.setattr(sparse, "_MAX_LOGITS", max_logits)
    expected = compute_hf_vectors(model_dir)
    vectors = to_dense(embed_sparse(model_dir, TEXTS), expected.shape[1])
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    # About half of the random logits are positive.
    assert 0.1 < (vectors > 0).mean() < 0.9
    assert embed_sparse(model_dir, []) == []


@pytest.mark.parametrize(
    ("mode", "activation", "is_old"),
    [("max", "relu", True), ("max", "log1p_relu", False), ("sum", "relu", False)],
)
def test_directories_of_sparse_encoders_are_read(
    model_dir: Path, tmp_path: Path, mode: Any, activation: Any, is_old: bool
) -> None:
    """Pooling, activation, prompts and maximum length are those of SparseEncoder."""
    if is_old:
        transformer = MLMTransformer(str(model_dir))
    else:
        transformer = Transformer(str(model_dir), transformer_task="fill-mask")
    transformer.max_seq_length = 17
    pooling = SpladePooling(mode, activation_function=activation)
    prompts = {"query": "the smith: ", "document": ""}
    reference = SparseEncoder(modules=[transformer, pooling], prompts=prompts, device="cpu")
    reference.save(str(tmp_path / "splade"))
    config = read_splade(tmp_path / "splade")
    assert config is not None
    assert (config.mode, config.activation) == (mode, activation)
    assert config.text_config.max_seq_length == 17
    for prompt_name in (None, "query"):
        expected = reference.encode(
            TEXTS, prompt_name=prompt_name, convert_to_sparse_tensor=False
        ).numpy()
        vectors = embed_sparse(tmp_path / "splade", TEXTS, prompt_name=prompt_name)
        dense = to_dense(vectors, expected.shape[1])
        np.testing.assert_allclose(dense, expected, rtol=0, atol=1e-5)
    with pytest.raises(BertsmithError, match="a sparse model"):
        write_sentence_transformers(tmp_path / "splade", tmp_path / "out")
    (note,) = write_huggingface(tmp_path / "splade", tmp_path / "hf")
    assert "pooling, prompts and the maximum length of the original model are not" in note
    # Dense vectors of the same model are those of a model without a pooling config.
    embedder = Embedder(load_encoder(tmp_path / "splade"))
    assert embedder.pooling_config is None
    assert embedder.encode(["iron"]).shape == (1, 26)


def test_invalid_models_and_texts_are_errors(model_dir: Path, tmp_path: Path) -> None:
    """A model without a masked-LM head, a single string and an unknown prompt are rejected."""
    encoder = BertForMaskedLM.from_pretrained(model_dir).bert
    encoder.save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "encoder")
    with pytest.raises(BertsmithError, match="masked-LM head"):
        embed_sparse(tmp_path / "encoder", ["a"])
    with pytest.raises(BertsmithError, match="expected a list of texts"):
        embed_sparse(model_dir, "a")
    with pytest.raises(BertsmithError, match="unknown prompt 'query'; the model declares no"):
        embed_sparse(model_dir, ["a"], prompt_name="query")
