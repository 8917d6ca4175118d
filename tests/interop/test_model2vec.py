"""Static models: loading in model2vec and sentence-transformers, components and weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model2vec import StaticModel
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from bertsmith import bundle
from bertsmith.errors import CorpusError, InputError, ModelError
from bertsmith.interop import model2vec
from bertsmith.interop.model2vec import (
    compute_components,
    compute_zipf_probabilities,
    write_static_model,
)
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.model.bert import BertForPreTraining
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import embed
from tests.model.examples import make_prime_size_config

WORDS = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
WIDTH = 22
#: Texts with unknown words, placeholders, special tokens, and more than 512 tokens.
TEXTS = ["ba be bi", "Ba, ZZZ be", "[unused1] ku [MASK] so", "zzz", "", "ba be " * 270]


@pytest.fixture(scope="module")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with random weights and the vocabulary WORDS."""
    return save_model(tmp_path_factory.mktemp("static") / "model")


def save_model(directory: Path, vocab: list[str] | None = None, **changes: Any) -> Path:
    """Write a model with random weights."""
    tokens = (*SPECIAL_TOKENS, "[unused1]", ",", *(vocab or WORDS))
    tokenizer = Tokenizer(TokenizerSpec(vocab=tokens))
    torch.manual_seed(0)
    config = make_prime_size_config(
        vocab_size=tokenizer.vocab_size, width=WIDTH, heads=2, feed_forward=61, init_range=0.3,
        **changes,
    )  # fmt: skip
    bundle.save(directory, BertForPreTraining(config), tokenizer, {})
    return directory


def read_vectors(directory: Path) -> np.ndarray[Any, Any]:
    """Return the vector of each token."""
    vectors: np.ndarray[Any, Any] = load_file(directory / "model.safetensors")["embeddings"].numpy()
    return vectors


@pytest.mark.parametrize("dims", [None, 7])
def test_other_libraries_compute_the_same_vectors(
    start_model: Path, tmp_path: Path, dims: int | None
) -> None:
    """model2vec and sentence-transformers give the mean of the known tokens, with length 1."""
    assert write_static_model(start_model, tmp_path / "static", dims=dims) == []
    vectors = read_vectors(tmp_path / "static")
    width = dims or WIDTH
    assert vectors.shape == (len(SPECIAL_TOKENS) + 2 + len(WORDS), width)
    tokenizer = bundle.load_encoder(start_model).tokenizer
    expected = np.zeros((len(TEXTS), width))
    for row, ids in zip(expected, tokenizer.encode_batch(TEXTS), strict=True):
        total = vectors[ids].astype(np.float64).sum(0)
        row[:] = total / max(np.linalg.norm(total), 1e-12)
    model = SentenceTransformer(str(tmp_path / "static"), device="cpu")
    assert isinstance(model[0], StaticEmbedding)
    static = StaticModel.from_pretrained(tmp_path / "static")
    for encode in (model.encode, static.encode):
        np.testing.assert_allclose(encode(TEXTS[:-1]), expected[:-1], rtol=0, atol=1e-6)
        # The other libraries sum 540 vectors in float32.
        np.testing.assert_allclose(encode(TEXTS[-1:]), expected[-1:], rtol=0, atol=1e-5)
    assert np.linalg.norm(expected, axis=1) == pytest.approx([1, 1, 1, 0, 0, 1])


def test_only_words_have_a_vector(start_model: Path, tmp_path: Path) -> None:
    """Special tokens and placeholders have the vector 0, all words another one."""
    write_static_model(start_model, tmp_path / "static")
    is_zero = (read_vectors(tmp_path / "static") == 0).all(1)
    assert is_zero.tolist() == [True] * 6 + [False] * (1 + len(WORDS))


def test_vectors_are_weighted_components_of_single_tokens(
    start_model: Path, tmp_path: Path
) -> None:
    """The vectors are the scaled, weighted projections of the embeddings of single words."""
    write_sentence_transformers(start_model, tmp_path / "st", pooling="max", normalize=True)
    write_static_model(tmp_path / "st", tmp_path / "static")
    words = [",", *WORDS]
    embeddings = embed(start_model, words, pooling="max", include_special_tokens=True)
    probabilities = compute_zipf_probabilities(len(words))
    components = compute_components(embeddings.astype(np.float64), probabilities)
    weights = 1e-4 / (1e-4 + probabilities)
    check_components(tmp_path / "static", components * weights[:, None])


def check_components(directory: Path, expected: np.ndarray[Any, Any]) -> None:
    """Check the vectors of words. The last components are zero if they have no variance."""
    vectors = read_vectors(directory)[6:]
    num_components = expected.shape[1]
    # Small components are differences of nearly equal numbers.
    np.testing.assert_allclose(vectors[:, :num_components], expected, rtol=1e-2, atol=1e-5)
    assert not vectors[:, num_components:].any()


def test_components_are_principal_components() -> None:
    """Without scaling, components keep weighted inner products of the centered vectors."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 7)) * np.arange(1, 8)
    vectors[:, 6] = vectors[:, 0]  # a direction without variance
    probabilities = compute_zipf_probabilities(50)
    components = compute_components(vectors, probabilities)
    assert components.shape == (50, 6)
    influence = np.sqrt(probabilities) / np.sqrt(probabilities).sum()
    covariance = (components * influence[:, None]).T @ components
    variances = np.diag(covariance)
    np.testing.assert_allclose(covariance, np.diag(variances), atol=1e-9)
    assert (np.diff(variances) < 0).all()
    np.testing.assert_allclose(probabilities @ components, 0, atol=1e-9)
    # Undoing the scaling by the square root of the standard deviation restores all distances.
    restored = components * variances ** (0.25 / 0.5)
    distances = np.linalg.norm(vectors[:, None] - vectors, axis=-1)
    np.testing.assert_allclose(
        np.linalg.norm(restored[:, None] - restored, axis=-1), distances, atol=1e-8
    )
    assert (components.max(0) == np.abs(components).max(0)).all()


def test_frequent_words_have_less_weight(
    start_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words are counted in the documents of a folder; the weight is a / (a + p)."""
    monkeypatch.setattr(model2vec, "_CHARACTERS_PER_CHUNK", 10)
    (tmp_path / "text").mkdir()
    lines = ["ba ba ba be", "ba zzz", "so", "so so", "ba"]
    (tmp_path / "text" / "a.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines)
    )
    write_static_model(start_model, tmp_path / "static", frequencies=str(tmp_path / "text"))
    words = [",", *WORDS]
    counts = np.array([{"ba": 5, "be": 1, "so": 3}.get(word, 0) for word in words])
    probabilities = (counts + 1) / (counts + 1).sum()
    embeddings = embed(start_model, words, include_special_tokens=True).astype(np.float64)
    components = compute_components(embeddings, compute_zipf_probabilities(len(words)))
    weights = 8e-4 / (8e-4 + probabilities)
    check_components(tmp_path / "static", components * weights[:, None])
    (tmp_path / "empty.txt").write_text("zzz\n")
    cases: list[tuple[str, type[Exception], str]] = [
        ("empty.txt", InputError, "this text has no word of the vocabulary"),
        ("missing", CorpusError, "missing"),
    ]
    for path, error, message in cases:
        with pytest.raises(error, match=message):
            write_static_model(start_model, tmp_path / "no", frequencies=str(tmp_path / path))
    assert not (tmp_path / "no").exists()


def test_models_that_cannot_be_static_are_rejected(start_model: Path, tmp_path: Path) -> None:
    """Too many dimensions, other architectures and repeated tokens are errors."""
    out = tmp_path / "out"
    with pytest.raises(InputError, match="dims is 23, but the model's vectors have 22"):
        write_static_model(start_model, out, dims=23)
    causal = save_model(tmp_path / "causal", attention="causal")
    with pytest.raises(ModelError, match="cannot represent this model"):
        write_static_model(causal, out)
    repeated = save_model(tmp_path / "repeated", [*WORDS, "ba"])
    with pytest.raises(ModelError, match="has a token twice"):
        write_static_model(repeated, out)
    assert not out.exists()
    write_static_model(start_model, out)
    with pytest.raises(ModelError, match="model_type is 'model2vec'"):
        bundle.load_encoder(out)
