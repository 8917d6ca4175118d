"""Fixtures for training tests: a store of random text, and a function that trains a small model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.data.prepare import prepare
from bertsmith.progress import NullProgress
from bertsmith.runtime import device
from bertsmith.text.corpus import find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import curve
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.pretraining import time_budget
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.result import PretrainResult

#: The words of all texts, such as "ba".
WORDS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
#: Settings of a very small model, with which training takes about a second.
SMALL_SETTINGS: dict[str, Any] = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.feed_forward": 32,
    "model.max_positions": 64,
    "data.max_seqlen": 32,
    "data.batch_size": 4,
    "data.nsp": "true",
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
    """Return the small model's settings as "section.name=value", for the option ``--set``.

    A keyword section__name=value changes a setting; the value None removes it.
    """
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return [
        f"{key}={value}" for key, value in (SMALL_SETTINGS | values).items() if value is not None
    ]


def make_tokenizer(extra_words: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer with the words WORDS and ``extra_words``."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, ".", *WORDS, *extra_words)))


def make_store(
    folder: Path,
    num_documents: int = 120,
    extra_words: tuple[str, ...] = (),
    max_sentences: int = 12,
) -> Path:
    """Prepare a store of documents with random sentences, and return its path.

    Args:
        folder: Folder for the corpus and the store.
        num_documents: Number of documents.
        extra_words: Words of the vocabulary that are not in the text.
        max_sentences: Exclusive upper bound for the number of sentences of a document.
    """
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(num_documents):
        sentences = [
            " ".join(rng.choice(WORDS, rng.integers(3, 12))).capitalize() + "."
            for _ in range(rng.integers(2, max_sentences))
        ]
        lines.append(json.dumps({"text": " ".join(sentences)}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(lines))
    sources = find_sources([str(folder / "corpus.jsonl")])
    prepare(sources, make_tokenizer(extra_words), folder / "store", workers=1)
    return folder / "store"


class RecordingProgress(NullProgress):
    """Progress that records the log messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Record a message."""
        self.messages.append(text)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 120 documents."""
    return make_store(tmp_path_factory.mktemp("train"))


#: Type of the fixture ``train``.
TrainFunction = Callable[..., PretrainResult]


@pytest.fixture(autouse=True)
def skip_slow_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of the peak throughput and the loss curve, to save a second per run."""
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)
    monkeypatch.setattr(curve, "draw", lambda run, _, **__: run / curve.CURVE_FILE)
    monkeypatch.setattr(time_budget, "_time_curve", lambda: 0.0)


def copy_interrupted_run(run: Path, copy: Path, last_step: int) -> None:
    """Copy a finished run without its model and the checkpoints after ``last_step``."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    for step, directory in list_checkpoints(copy):
        if step > last_step:
            shutil.rmtree(directory)


def assert_same_weights(folder: Path, expected: Path) -> None:
    """Check that the safetensors files of two folders have the same bytes."""
    files = sorted(expected.glob("*.safetensors"))
    assert files
    for file in files:
        assert (folder / file.name).read_bytes() == file.read_bytes(), file


@pytest.fixture
def train(store: Path, tmp_path: Path) -> TrainFunction:
    """A function that trains the small model in the directory tmp_path / ``out``.

    Its keywords are settings as in ``make_assignments``, or arguments of ``pretrain``.
    """

    def train_small_model(out: str = "run", data: Path = store, **changes: Any) -> PretrainResult:
        arguments = {key: changes.pop(key) for key in _PRETRAIN_ARGUMENTS & changes.keys()}
        return pretrain(data, tmp_path / out, assignments=make_assignments(**changes), **arguments)

    return train_small_model
