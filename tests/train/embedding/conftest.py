"""A small model to start from, tables of texts of random words, and fast training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.engine.finetuning_run import FinetuneResult
from tests.model.examples import make_prime_size_config
from tests.train.conftest import WORDS, make_tokenizer

#: Width of the vectors of the start model.
WIDTH = 32
#: Words of each topic. Texts of the same topic belong together.
TOPICS = [WORDS[start : start + 6] for start in range(0, 60, 6)]
#: Settings with which a small model learns fast.
FAST_SETTINGS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-3},
    "run": {"threads": 1, "precision": "fp32"},
    "embedding": {"batch_size": 16},
    "schedule": {"epochs": 3.0},
}
WriteTable = Callable[[str, Sequence[dict[str, Any]]], Path]


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with random weights and the vocabulary WORDS."""
    return save_start_model(tmp_path_factory.mktemp("start") / "model")


def save_start_model(directory: Path) -> Path:
    """Write a model with random weights and the vocabulary WORDS."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = make_prime_size_config(
        vocab_size=tokenizer.vocab_size, width=WIDTH, heads=2, feed_forward=61, init_range=0.1
    )
    bundle.save(directory, BertForPreTraining(config), tokenizer, {})
    return directory


@pytest.fixture
def write_table(tmp_path: Path) -> WriteTable:
    """A function that writes rows as JSON lines to a file in tmp_path."""
    return lambda name, rows: write_rows(tmp_path / name, rows)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_text(topic: int, rng: np.random.Generator) -> str:
    """Return two to seven random words of a topic."""
    return " ".join(rng.choice(TOPICS[topic], rng.integers(2, 8)))


def make_rows(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows with standard column names; the score of two texts is 1 for the same topic.

    All texts are different.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < count:
        topic, other = rng.choice(len(TOPICS), 2, replace=False).tolist()
        text, positive, negative = (make_text(t, rng) for t in (topic, topic, other))
        if len({text, positive, negative} - seen) < 3:
            continue
        seen |= {text, positive, negative}
        is_same = len(rows) % 2 == 0
        row: dict[str, dict[str, Any]] = {
            "pairs": {"anchor": text, "positive": positive},
            "triplets": {"anchor": text, "positive": positive, "negative": negative},
            "scored_pairs": {"sentence1": text, "sentence2": positive if is_same else negative,
                             "score": float(is_same)},
            "labeled_texts": {"text": text, "label": f"topic {topic}"},
            "texts": {"text": text},
        }  # fmt: skip
        rows.append(row[kind])
    return rows


def train(start_model: Path, out: Path, *data: Path, **tables: dict[str, Any]) -> FinetuneResult:
    """Train with fast settings; keywords are tables of settings."""
    values = {name: FAST_SETTINGS.get(name, {}) | table for name, table in tables.items()}
    return finetune_embedder(start_model, out, data=data, values=FAST_SETTINGS | values)
