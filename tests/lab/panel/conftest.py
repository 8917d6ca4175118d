"""A tiny model, and data of a few dozen examples for each kind of task."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from bertsmith.bundle import save
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece_trainer import train_wordpiece

SENTENCES = (
    "the small cat sleeps on the warm mat",
    "a bad film with a long and boring plot",
    "the good actors play in a wonderful film",
    "every dog runs after the small red ball",
)


def write_model(
    folder: Path,
    seed: int,
    width: int = 8,
    layers: int = 1,
    info: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a random model with the content ``info`` of bertsmith.json; return its directory."""
    tokenizer = train_wordpiece(SENTENCES, 124)
    # With a small init_range, predictions would hardly depend on which tokens are masked.
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=layers, width=width, heads=2, feed_forward=12,
        max_positions=48, init_range=0.5,
    )  # fmt: skip
    torch.manual_seed(seed)
    save(folder, BertForPreTraining(config), tokenizer, info)
    return folder


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with the same architecture and other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / "first", 1), write_model(folder / "second", 2)]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SST-2, RTE, a held-out text and minimal pairs."""
    folder = tmp_path_factory.mktemp("data")
    texts = [SENTENCES[index % 4] for index in range(24)]
    labels = [str(index % 2) for index in range(24)]
    write_table(folder / "SST-2", ("sentence", "label"), list(zip(texts, labels, strict=True)))
    names = ["entailment" if label == "1" else "not_entailment" for label in labels]
    numbers = list(map(str, range(24)))
    write_table(
        folder / "glue" / "RTE", ("index", "sentence1", "sentence2", "label"),
        list(zip(numbers, texts, reversed(texts), names, strict=True)),
    )  # fmt: skip
    (folder / "text.txt").write_text("".join(f"{text}.\n" for text in SENTENCES))
    pair = {"sentence_good": SENTENCES[0], "sentence_bad": "the cat small sleep on mat"}
    (folder / "pairs.jsonl").write_text(3 * (json.dumps(pair) + "\n"))
    return folder


def write_table(folder: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the training and the validation file of a task in GLUE's format."""
    folder.mkdir(parents=True)
    lines = ["\t".join(row) + "\n" for row in (columns, *rows)]
    (folder / "train.tsv").write_text("".join(lines))
    (folder / "dev.tsv").write_text("".join(lines))
