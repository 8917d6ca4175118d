"""ONNX in 8 bits: on real sentences it says what the model says.

Random weights would be no test: their outputs have no margin. So a small classifier learns first.
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
from bertsmith.model.packed import batch_by_length, pack_sequences
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.use.embed import embed

QUANTIZED = "model_quantized.onnx"
HEAD = HeadConfig("single", ("negative", "positive"))


def rows(path: Path, most: int) -> list[tuple[str, int]]:
    """Return the first sentences of a table of SST-2 and their labels."""
    with path.open(encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence"], int(row["label"])) for row in islice(table, most)]


def ran(file: Path, sequences: list[list[int]]) -> list[NDArray[np.float32]]:
    """Return the first output for each sequence, each by itself."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found = []
    for ids in sequences:
        one = np.array([ids], np.int64)
        feed = {"input_ids": one, "attention_mask": one * 0 + 1, "token_type_ids": one * 0}
        found.append(session.run(None, feed)[0][0])
    return found


@pytest.fixture(scope="module")
def learnt(
    labelled: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], list[list[int]]]:
    """Teach a small BERT the sentiment of 4,000 reviews: its directory, texts and ids held out."""
    examples = rows(labelled / "glue" / "SST-2" / "train.tsv", 4000)
    texts = [text for text, _ in rows(labelled / "glue" / "SST-2" / "dev.tsv", 872)]
    words = train_wordpiece((text for text, _ in examples), 3000)
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=3000, layers=2, width=64, heads=4, feed_forward=256, max_positions=96
    )
    model = HEAD.build_model(config)

    def encoded(some: list[str]) -> list[list[int]]:
        return [[words.cls_id, *ids[:94], words.sep_id] for ids in words.encode_batch(some)]

    inputs = encoded([text for text, _ in examples])
    targets = torch.tensor([label for _, label in examples])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = list(batch_by_length([len(ids) for ids in inputs], 1024))
    for epoch in range(3):
        chance = torch.Generator().manual_seed(epoch)
        for number in torch.randperm(len(batches), generator=chance).tolist():
            batch = batches[number]
            logits = model(pack_sequences([(inputs[one], [0] * len(inputs[one])) for one in batch]))
            optimizer.zero_grad()
            loss = F.cross_entropy(logits, targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    folder = tmp_path_factory.mktemp("learnt") / "model"
    save_fine_tuned(folder, model.eval(), words, HEAD, {})
    return folder, texts, encoded(texts)


@pytest.mark.data
def test_the_same_label(tmp_path: Path, learnt: tuple[Path, list[str], list[list[int]]]) -> None:
    """Of 872 held-out sentences at least 99 % get the label of the model in float32."""
    folder, _, sequences = learnt
    said = []
    for int8, name in ((False, "model.onnx"), (True, QUANTIZED)):
        write_onnx(folder, tmp_path / name, int8=int8)
        said.append(np.stack(ran(tmp_path / name / name, sequences)))
    assert len(said[0]) == 872
    # It has learnt: both labels are given, and with a margin.
    assert 0.2 < said[0].argmax(-1).mean() < 0.8
    same = (said[0].argmax(-1) == said[1].argmax(-1)).mean()
    assert same >= 0.99, same
    # It is in 8 bits.
    assert np.abs(said[0] - said[1]).max() > 0
    files = [next((tmp_path / name).glob("*.onnx")) for name in ("model.onnx", QUANTIZED)]
    assert files[1].stat().st_size < 0.45 * files[0].stat().st_size


@pytest.mark.data
def test_the_same_direction(
    tmp_path: Path, learnt: tuple[Path, list[str], list[list[int]]]
) -> None:
    """The mean hidden state of each sentence has a cosine of at least 0.99 with float32's."""
    folder, texts, sequences = learnt
    write_sentence_transformers(folder, tmp_path / "encoder", normalize=True)
    write_onnx(tmp_path / "encoder", tmp_path / "int8", int8=True)
    hidden = ran(tmp_path / "int8" / QUANTIZED, sequences)
    means = np.stack([own.mean(0) for own in hidden])
    means /= np.linalg.norm(means, axis=-1, keepdims=True)
    cosines = (means * embed(tmp_path / "encoder", texts)).sum(-1)
    assert cosines.min() >= 0.99, cosines.min()
    # It is in 8 bits.
    assert cosines.min() < 0.99999
