"""Fixtures: a small store of random text, and a training function that takes about a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.data.prepare import prepare
from bertsmith.runtime import device
from bertsmith.text.corpus import find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import curve
from bertsmith.train.pretraining.pretrain import PretrainResult, pretrain

WORDS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
#: Settings of a very small model with small batches.
SMALL_SETTINGS = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.feed_forward": 32,
    "model.max_positions": 64,
    "data.max_seqlen": 32,
    "data.batch_size": 4,
    "run.max_eval_sequences": 8,
    "run.precision": "fp32",
    "run.device": "cpu",
    "run.threads": 1,
    "run.log_every": 1,
}
#: Keyword arguments of ``pretrain`` that are not settings.
_PRETRAIN_ARGUMENTS = {
    "steps", "epochs", "minutes", "start_from", "recipe", "config", "progress", "size",
}  # fmt: skip


def make_assignments(**changes: Any) -> list[str]:
    """Return SMALL_SETTINGS with changes as arguments of ``--set``.

    A change is written as section__name=value; the value None removes a setting.
    """
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return [
        f"{key}={value}" for key, value in (SMALL_SETTINGS | values).items() if value is not None
    ]


def make_tokenizer(extra_words: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer with the vocabulary WORDS."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, ".", *WORDS, *extra_words)))


def make_store(
    folder: Path, documents: int = 120, extra: tuple[str, ...] = (), max_sentences: int = 12
) -> Path:
    """Prepare a store of random sentences."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(documents):
        sentences = [
            " ".join(rng.choice(WORDS, rng.integers(3, 12))).capitalize() + "."
            for _ in range(rng.integers(2, max_sentences))
        ]
        lines.append(json.dumps({"text": " ".join(sentences)}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(lines))
    sources = find_sources([str(folder / "corpus.jsonl")])
    prepare(sources, make_tokenizer(extra), folder / "store", workers=1)
    return folder / "store"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 120 documents."""
    return make_store(tmp_path_factory.mktemp("train"))


TrainFunction = Callable[..., PretrainResult]


@pytest.fixture(autouse=True)
def skip_slow_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the peak measurement and the loss curve, which take a second per run."""
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)
    monkeypatch.setattr(curve, "draw", lambda run, _: run / curve.CURVE_FILE)


@pytest.fixture
def train(store: Path, tmp_path: Path) -> TrainFunction:
    """Train the small model; keywords are settings, or arguments of ``pretrain``."""

    def run(out: str = "run", data: Path = store, **changes: Any) -> PretrainResult:
        arguments = {key: changes.pop(key) for key in _PRETRAIN_ARGUMENTS & changes.keys()}
        return pretrain(data, tmp_path / out, assignments=make_assignments(**changes), **arguments)

    return run
