"""The program run in this process, and a small random model to ask."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from bertsmith.cli.main import main
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece

SENTENCES = [
    "The ferry crossed the river twice a day, in the morning and in the evening.",
    "Nobody remembered a winter in which the ice had held the ferry fast.",
    "The old pilot knew every stone of the river, and every stone knew him.",
]


@dataclass(frozen=True)
class Done:
    """What the program left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


Run = Callable[..., Done]


class _Terminal(io.TextIOWrapper):
    """Standard input as a person's keyboard."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the program with arguments and bytes on stdin; a traceback fails the test."""

    def program(*arguments: object, stdin: bytes = b"", terminal: bool = False) -> Done:
        monkeypatch.setattr(sys, "argv", ["bertsmith", *map(str, arguments)])
        stream = _Terminal if terminal else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", stream(io.BytesIO(stdin)))
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        caught = capsys.readouterr()
        return Done(status, caught.out, caught.err)

    return program


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """A vocabulary learnt from three sentences."""
    return train_wordpiece(iter(SENTENCES * 3), 181)


def save_model(directory: Path, words: Tokenizer, *, nsp: bool = True) -> Path:
    """Save a small random model and return its directory."""
    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=words.vocab_size,
        layers=2,
        width=22,
        heads=2,
        feed_forward=31,
        max_positions=43,
        init_range=0.3,
        nsp=nsp,
    )
    bundle.save(directory, BertForPreTraining(config), words, {"recipe": "fast"})
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, words: Tokenizer) -> Path:
    """The directory of a model with both heads."""
    return save_model(tmp_path_factory.mktemp("cli") / "model", words)


@pytest.fixture(scope="session")
def model_without_pairs(tmp_path_factory: pytest.TempPathFactory, words: Tokenizer) -> Path:
    """The directory of a model without a next-sentence head."""
    return save_model(tmp_path_factory.mktemp("cli") / "single", words, nsp=False)
