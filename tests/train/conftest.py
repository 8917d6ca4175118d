"""A small store of made-up text, and settings under which a run takes a second.

It never knows what is tested.
"""

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

WORDS = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
#: A model, a batch and an evaluation that cost next to nothing.
SMALL = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.feed_forward": 32,
    "model.max_positions": 64,
    "data.length": 32,
    "data.batch": 4,
    "run.eval_sequences": 8,
    "run.precision": "fp32",
    "run.device": "cpu",
    "run.threads": 1,
    "run.log_every": 1,
}


def assignments(**changes: Any) -> list[str]:
    """Return SMALL as the arguments of ``--set``; a change is written section__name=value.

    None leaves a setting out.
    """
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in (SMALL | named).items() if value is not None]


def make_tokenizer(extra: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer of sixty short words."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, ".", *WORDS, *extra)))


def make_store(
    folder: Path, documents: int = 120, extra: tuple[str, ...] = (), max_sentences: int = 12
) -> Path:
    """Prepare a store of random sentences."""
    chance = np.random.default_rng(0)
    lines = []
    for _ in range(documents):
        sentences = [
            " ".join(chance.choice(WORDS, chance.integers(3, 12))).capitalize() + "."
            for _ in range(chance.integers(2, max_sentences))
        ]
        lines.append(json.dumps({"text": " ".join(sentences)}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(lines))
    found = find_sources([str(folder / "corpus.jsonl")])
    prepare(found, make_tokenizer(extra), folder / "store", workers=1)
    return folder / "store"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 120 documents."""
    return make_store(tmp_path_factory.mktemp("train"))


Train = Callable[..., PretrainResult]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what costs a second in each run: the machine's ceiling and the picture."""
    monkeypatch.setattr(device, "measure_peak_macs", lambda _: 1e9)
    monkeypatch.setattr(curve, "draw", lambda run, _: run / curve.CURVE_FILE)


@pytest.fixture
def train(store: Path, tmp_path: Path) -> Train:
    """Train the small model; keywords are settings, or arguments of ``pretrain``."""

    def run(out: str = "run", data: Path = store, **changes: Any) -> PretrainResult:
        own = {"steps", "epochs", "minutes", "start_from", "recipe", "config", "progress", "size"}
        arguments = {key: changes.pop(key) for key in own & changes.keys()}
        return pretrain(data, tmp_path / out, assignments=assignments(**changes), **arguments)

    return run
