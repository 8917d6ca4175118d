"""Embedding with an OpenVINO graph: the vectors of the original model, and clear errors."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith.errors import ModelError, SettingsError
from bertsmith.interop.openvino import OpenVINOBundle, OpenVINOEncoder
from bertsmith.interop.openvino.writing import write_openvino
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.use.embed import Embedder, embed
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.explain import attention
from bertsmith.use.search import Searcher
from bertsmith.use.similar import similar
from bertsmith.use.token_vectors import Floats
from bertsmith.use.vector_settings import VectorSettings
from tests.use.conftest import SENTENCES, WIDTH

pytest.importorskip("openvino", reason="pip install 'bertsmith[openvino]'")

TEXTS = [*SENTENCES, "", "struck", "the smith " * 60]


@pytest.fixture(scope="module")
def original(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    """The random model with two layers as a sentence-transformers directory."""
    directory = tmp_path_factory.mktemp("model") / "smith"
    write_sentence_transformers(model_dir, directory)
    return Embedder.load(directory)


@pytest.fixture(scope="module")
def exported(original: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model's OpenVINO graph."""
    directory = tmp_path_factory.mktemp("openvino") / "out"
    write_openvino(original.path, directory)
    return directory


@pytest.fixture(scope="module")
def embedder(exported: Path) -> Embedder:
    """An embedder with the graph, which computes in float32."""
    bundle = Embedder.load(exported)
    encoder = OpenVINOEncoder(exported, bundle.config, "f32")
    return Embedder(OpenVINOBundle(encoder, bundle.tokenizer, bundle.config, exported))


def assert_close(vectors: Floats, expected: Floats) -> None:
    """Assert that vectors differ by at most 1e-5."""
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", [None, "mean", "max", "mean-max", "first", "last"])
def test_vectors_equal_those_of_pytorch(
    original: Embedder, embedder: Embedder, pooling: str | None
) -> None:
    """All poolings give the vectors of the original model; None is normalized mean pooling."""
    expected = original.encode(TEXTS, pooling=pooling, include_special_tokens=False)
    vectors = embedder.encode(TEXTS, pooling=pooling, include_special_tokens=False)
    assert_close(vectors, expected)
    small_batches = embedder.encode(
        TEXTS, pooling=pooling, include_special_tokens=False, batch_tokens=61
    )
    assert_close(small_batches, expected)


def test_vectors_with_several_threads(original: Embedder, exported: Path) -> None:
    """Workers of several threads compute the same vectors in the default precision."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        vectors = Embedder.load(exported).encode(TEXTS * 5, batch_tokens=61)
    finally:
        torch.set_num_threads(num_threads)
    # The default precision is bf16 on some CPUs.
    cosines = (vectors * original.encode(TEXTS * 5)).sum(1)
    assert cosines.min() >= 0.999, cosines.min()


def test_token_and_word_vectors(original: Embedder, embedder: Embedder) -> None:
    """Vectors of tokens and of a word equal those of the original model."""
    for tokens, expected in zip(
        embedder.encode_tokens(TEXTS), original.encode_tokens(TEXTS), strict=True
    ):
        assert tokens.tokens == expected.tokens
        assert_close(tokens.vectors, expected.vectors)
    texts = [text for text in SENTENCES if "smith" in text]
    distances = similar(embedder, texts, "smith").distances
    assert_close(distances, similar(original, texts, "smith").distances)


def test_index_is_searched_with_the_graph(exported: Path, tmp_path: Path) -> None:
    """The search loads the graph; a different graph at the same path would be an error."""
    pytest.importorskip("usearch")
    embed_lines(Embedder.load(exported), SENTENCES, tmp_path / "lines.index", VectorSettings())
    hits = Searcher(tmp_path / "lines.index").search([SENTENCES[3]], top=1)
    assert hits[0][0].text == SENTENCES[3]


def test_function_accepts_a_directory(exported: Path) -> None:
    """``bertsmith.embed`` loads the graph."""
    assert embed(exported, ["a smith"]).shape == (1, WIDTH)


def test_a_graph_runs_on_the_cpu(exported: Path) -> None:
    """The device of other models, which is CUDA by default on a machine with a GPU, is ignored."""
    vectors = Embedder.load(exported, device="cuda").encode(TEXTS)
    np.testing.assert_array_equal(vectors, Embedder.load(exported).encode(TEXTS))


INTERRUPT_SCRIPT = """
import faulthandler, signal, sys
from bertsmith import Embedder

faulthandler.enable()
first, second = (Embedder.load(sys.argv[1]) for _ in range(2))
del first
del second
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_signals_after_models_are_freed(exported: Path) -> None:
    """A signal handler runs after models were freed in the order in which they were loaded."""
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPT_SCRIPT, exported],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, "interrupted\n"), process.stderr


def test_unavailable_settings_are_errors(embedder: Embedder, exported: Path) -> None:
    """The error says what the graph cannot do and names the original model."""
    for layer in (-2, 0, [-2, -1]):
        with pytest.raises(SettingsError, match=r"^layers: .* use the original model, smith$"):
            embedder.encode(TEXTS, layer=layer)
    with pytest.raises(SettingsError, match=r"^pooling: .* use the original model, smith$"):
        embedder.encode(TEXTS, pooling="pooled")
    with pytest.raises(SettingsError, match=r"precision of the OpenVINO graph .* remove --fast"):
        Embedder.load(exported, fast=True)
    with pytest.raises(ModelError, match=r"no weights.*use the original model, smith"):
        attention(exported, "a smith")
