"""Int8 ONNX models agree with float32 on real sentences.

The tests train a small classifier, because the outputs of random weights are too close to each
other.
"""

import csv
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from bertsmith.bundle import HeadConfig, save_fine_tuned
from bertsmith.interop.onnx import write_onnx
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import pack_sequences
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.use.embed import embed

QUANTIZED_FILE = "model_quantized.onnx"
HEAD = HeadConfig("single", ("negative", "positive"))


def read_sst2(path: Path, max_rows: int) -> list[tuple[str, int]]:
    """Return the first sentences of an SST-2 file and their labels."""
    with path.open(encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence"], int(row["label"])) for row in islice(table, max_rows)]


def run_graph(file: Path, sequences: list[list[int]]) -> list[NDArray[np.float32]]:
    """Run the graph for one sequence at a time; return the first output for each sequence."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    outputs = []
    for ids in sequences:
        input_ids = np.array([ids], np.int64)
        feed = {
            "input_ids": input_ids,
            "attention_mask": np.ones_like(input_ids),
            "token_type_ids": np.zeros_like(input_ids),
        }
        outputs.append(session.run(None, feed)[0][0])
    return outputs


@pytest.fixture(scope="module")
def classifier(
    labeled_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], list[list[int]]]:
    """Train a small sentiment classifier; return its directory, held-out texts and their ids."""
    examples = read_sst2(labeled_data / "glue" / "SST-2" / "train.tsv", 4000)
    texts = [text for text, _ in read_sst2(labeled_data / "glue" / "SST-2" / "dev.tsv", 872)]
    tokenizer = train_wordpiece((text for text, _ in examples), 3000)
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=3000, layers=2, width=64, heads=4, feed_forward=256, max_positions=96
    )
    model = HEAD.build_model(config)

    def encode_texts(texts_to_encode: list[str]) -> list[list[int]]:
        return [
            [tokenizer.cls_id, *ids[: config.max_positions - 2], tokenizer.sep_id]
            for ids in tokenizer.encode_batch(texts_to_encode)
        ]

    inputs = encode_texts([text for text, _ in examples])
    targets = torch.tensor([label for _, label in examples])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = list(batch_by_length([len(ids) for ids in inputs], 1024))
    for epoch in range(3):
        rng = torch.Generator().manual_seed(epoch)
        for number in torch.randperm(len(batches), generator=rng).tolist():
            batch = batches[number]
            logits = model(
                pack_sequences([(inputs[index], [0] * len(inputs[index])) for index in batch])
            )
            optimizer.zero_grad()
            loss = F.cross_entropy(logits, targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    folder = tmp_path_factory.mktemp("classifier") / "model"
    save_fine_tuned(folder, model.eval(), tokenizer, HEAD, {})
    return folder, texts, encode_texts(texts)


@pytest.mark.data
def test_labels_agree_with_float32(
    tmp_path: Path, classifier: tuple[Path, list[str], list[list[int]]]
) -> None:
    """At least 99 % of 872 held-out sentences get the same label as in float32."""
    folder, _, sequences = classifier
    logits_by_precision = []
    for int8, name in ((False, "model.onnx"), (True, QUANTIZED_FILE)):
        write_onnx(folder, tmp_path / name, int8=int8)
        logits_by_precision.append(np.stack(run_graph(tmp_path / name / name, sequences)))
    assert len(logits_by_precision[0]) == 872
    # The classifier has learned something: both labels occur.
    assert 0.2 < logits_by_precision[0].argmax(-1).mean() < 0.8
    agreement = (logits_by_precision[0].argmax(-1) == logits_by_precision[1].argmax(-1)).mean()
    assert agreement >= 0.99, agreement
    # The model really is quantized.
    assert np.abs(logits_by_precision[0] - logits_by_precision[1]).max() > 0
    files = [next((tmp_path / name).glob("*.onnx")) for name in ("model.onnx", QUANTIZED_FILE)]
    assert files[1].stat().st_size < 0.45 * files[0].stat().st_size


@pytest.mark.data
def test_sentence_vectors_agree_with_float32(
    tmp_path: Path, classifier: tuple[Path, list[str], list[list[int]]]
) -> None:
    """Mean hidden states have a cosine similarity of at least 0.99 with float32."""
    folder, texts, sequences = classifier
    write_sentence_transformers(folder, tmp_path / "encoder", normalize=True)
    write_onnx(tmp_path / "encoder", tmp_path / "int8", int8=True)
    hidden = run_graph(tmp_path / "int8" / QUANTIZED_FILE, sequences)
    means = np.stack([states.mean(0) for states in hidden])
    means /= np.linalg.norm(means, axis=-1, keepdims=True)
    cosines = (means * embed(tmp_path / "encoder", texts)).sum(-1)
    assert cosines.min() >= 0.99, cosines.min()
    # The model really is quantized.
    assert cosines.min() < 0.99999
