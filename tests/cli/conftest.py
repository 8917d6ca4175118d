"""Fixtures that run the program in this process, small random models, and a classifier."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith import bundle
from bertsmith.cli.main import main
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.train.finetuning.finetune import finetune

SENTENCES = [
    "The ferry crossed the river twice a day, in the morning and in the evening.",
    "Nobody remembered a winter in which the ice had held the ferry fast.",
    "The old pilot knew every stone of the river, and every stone knew him.",
]

#: Vocabulary size of the fixture ``tokenizer``.
VOCAB_SIZE = 181
#: Hidden size and maximum sequence length of the fixture ``model``. Its sizes are odd or otherwise
#: different, so that confusing two of them is an error.
MODEL_WIDTH = 22
MAX_SEQLEN = 43


@dataclass(frozen=True)
class CompletedCommand:
    """Exit status, stdout and stderr of a command."""

    status: int
    out: str
    err: str


RunCli = Callable[..., CompletedCommand]


class _Terminal(io.TextIOWrapper):
    """Standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCli:
    """Return a function that runs the program in this process with arguments and standard input."""

    def run_command(
        *arguments: object, stdin: bytes = b"", stdin_is_terminal: bool = False
    ) -> CompletedCommand:
        monkeypatch.setattr(sys, "argv", ["bertsmith", *map(str, arguments)])
        stream_class = _Terminal if stdin_is_terminal else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", stream_class(io.BytesIO(stdin)))
        status = 0
        try:
            main()
        except SystemExit as system_exit:
            status = int(system_exit.code or 0)
        captured = capsys.readouterr()
        return CompletedCommand(status, captured.out, captured.err)

    return run_command


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer with a vocabulary learned from SENTENCES."""
    return train_wordpiece(iter(SENTENCES * 3), VOCAB_SIZE)


def small_config(tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    """Return the config of a small model, updated with ``changes``."""
    sizes = {"layers": 1, "width": MODEL_WIDTH, "heads": 2, "feed_forward": 31}
    fixed = {"vocab_size": tokenizer.vocab_size, "max_positions": MAX_SEQLEN}
    return ModelConfig(**(sizes | fixed | changes))


def save_model(directory: Path, tokenizer: Tokenizer, *, nsp: bool = True) -> Path:
    """Save a small random pre-trained model and return its directory."""
    torch.manual_seed(3)
    config = small_config(tokenizer, layers=2, init_range=0.3, nsp=nsp)
    bundle.save(directory, BertForPreTraining(config), tokenizer, {"recipe": "fast"})
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The directory of a model with a masked-LM and a next-sentence head."""
    return save_model(tmp_path_factory.mktemp("cli") / "model", tokenizer)


@pytest.fixture(scope="session")
def model_without_nsp(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The directory of a model without a next-sentence head."""
    return save_model(tmp_path_factory.mktemp("cli") / "single", tokenizer, nsp=False)


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 rows with two classes."""
    file = tmp_path_factory.mktemp("table") / "train.csv"
    examples = (("the anvil rings", "loud"), ("the river sleeps", "still"))
    rows = [f"{examples[n % 2][0]} {n},{examples[n % 2][1]}" for n in range(24)]
    file.write_text("\n".join(["line,mood", *rows]) + "\n")
    return file


@pytest.fixture(scope="session")
def classifier(model: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a classifier fine-tuned on ``table``."""
    out = tmp_path_factory.mktemp("classifier") / "run"
    task = {"text_column": "line", "label_column": "mood", "batch_size": 8}
    finetune("classify", model, out, data=table, values={"task": task, "run": {"threads": 1}})
    return out


@pytest.fixture
def lines_file(tmp_path: Path) -> Path:
    """Five lines: the third is too long, the fourth empty, the last without a line break."""
    file = tmp_path / "lines.txt"
    file.write_text("\n".join([*SENTENCES[:2], "ferry " * 60, "", SENTENCES[2]]), encoding="utf-8")
    return file
