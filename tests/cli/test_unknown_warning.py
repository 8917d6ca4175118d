"""Commands that tokenize text warn once if more than 2 % of the tokens are [UNK]."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.bundle import HeadConfig, TaskKind, save_fine_tuned
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from tests.cli.conftest import RunCli

ENGLISH = "The old pilot knew the ferry."
#: Korean: "The old boatman knew the ferry."
KOREAN = "늙은 사공은 나룻배를 알았다."
#: Of the five tokens of KOREAN, only the full stop is in the English vocabulary.
KOREAN_UNKNOWN_SHARE = 0.8
LABELS_BY_KIND: dict[TaskKind, tuple[str, ...]] = {
    "single": ("no", "yes"),
    "entities": ("O", "B-PER", "I-PER"),
    "span": (),
    "choice": (),
}
WARNING = "are [UNK]: the vocabulary does not cover this text"


@pytest.fixture(scope="module")
def fine_tuned_models(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[TaskKind, Path]:
    """A random model of each task family with an English vocabulary."""
    torch.manual_seed(5)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=1,
        width=16,
        heads=2,
        feed_forward=32,
        max_positions=64,
    )
    folder = tmp_path_factory.mktemp("fine_tuned")
    for kind, labels in LABELS_BY_KIND.items():
        head = HeadConfig(kind, labels)
        save_fine_tuned(folder / kind, head.build_model(config), tokenizer, head, {})
    return {kind: folder / kind for kind in LABELS_BY_KIND}


@pytest.fixture(params=[ENGLISH, KOREAN], ids=["english", "korean"])
def text(request: pytest.FixtureRequest) -> str:
    """A sentence that the vocabulary covers, or one that it does not cover."""
    return str(request.param)


def run_and_check_warning(run_cli: RunCli, text: str, *arguments: object) -> Any:
    """Run a command; assert that it warns once for Korean text, and never for English text."""
    completed = run_cli(*arguments)
    assert completed.status == 0, completed.err
    assert completed.err.count(WARNING) == (1 if text == KOREAN else 0)
    assert WARNING not in completed.out
    return completed


def test_commands_of_pre_trained_models_warn(run_cli: RunCli, model: Path, text: str) -> None:
    """``fill``, ``score`` and ``pair`` warn; special tokens in the text do not lower the share."""
    run_and_check_warning(run_cli, text, "fill", model, f"{text} [MASK] [SEP]")
    run_and_check_warning(run_cli, text, "score", model, "--text", text)
    completed = run_and_check_warning(run_cli, text, "pair", model, text, text)
    if text == KOREAN:
        assert "warning: 80.0% of the tokens are" in completed.err


def test_vector_commands_warn(run_cli: RunCli, model: Path, text: str, tmp_path: Path) -> None:
    """``embed``, ``similar`` and ``search`` warn; ``embed --json`` has the share."""
    file = tmp_path / "lines.txt"
    index = tmp_path / "v.index"
    file.write_text(f"{text}\n{text}\n")
    run_and_check_warning(run_cli, text, "embed", model, file)
    completed = run_and_check_warning(run_cli, text, "embed", model, file, "--out", index, "--json")
    share = KOREAN_UNKNOWN_SHARE if text == KOREAN else 0
    assert json.loads(completed.out)["unknown_share"] == share
    run_and_check_warning(run_cli, text, "search", index, text)
    run_and_check_warning(run_cli, text, "similar", model, file, "--word", text.split()[1])


@pytest.mark.parametrize("kind", LABELS_BY_KIND)
def test_commands_of_fine_tuned_models_warn(
    run_cli: RunCli,
    fine_tuned_models: dict[TaskKind, Path],
    text: str,
    kind: TaskKind,
    tmp_path: Path,
) -> None:
    """``predict`` and ``evaluate`` warn for every task family; --json contains the share."""
    num_texts = {"span": 2, "choice": 3}.get(kind, 1)
    model = fine_tuned_models[kind]
    run_and_check_warning(run_cli, text, "predict", model, "\t".join([text] * num_texts))
    data = tmp_path / "data.jsonl"
    tags = ["B-PER", *["O"] * (len(text.split()) - 1)]
    rows: dict[TaskKind, dict[str, Any]] = {
        "single": {"text": text, "label": "yes"},
        "entities": {"tokens": text.split(), "tags": tags},
        "span": {
            "id": "1",
            "question": text,
            "context": text,
            "answers": {"text": [text[:2]], "answer_start": [0]},
        },
        "choice": {"text": text, "a": text, "b": text, "label": 1},
    }
    data.write_text(json.dumps(rows[kind]) + "\n")
    options = ["--set", 'task.ending_columns=["a","b"]'] if kind == "choice" else []
    completed = run_and_check_warning(
        run_cli, text, "evaluate", model, "--data", data, "--json", *options
    )
    share = json.loads(completed.out)["counts"]["unknown_share"]
    if text == KOREAN:
        assert share == KOREAN_UNKNOWN_SHARE
    else:
        assert share == 0


def test_warning_for_standard_input_is_not_delayed(
    run_cli: RunCli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that reads standard input warns once, with its first result."""
    stderr_after_first_line: list[str] = []
    stderr = io.StringIO()
    monkeypatch.setattr("bertsmith.cli.unknown_warning.log", lambda line: stderr.write(line + "\n"))

    def read_typed_lines(*_: str) -> Iterator[str]:
        yield KOREAN
        stderr_after_first_line.append(stderr.getvalue())
        yield KOREAN

    monkeypatch.setattr("bertsmith.cli.model_options.read_lines", read_typed_lines)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run_cli("embed", model, "-", stdin_is_terminal=True).status == 0
    assert WARNING in stderr_after_first_line[0]
    assert stderr.getvalue() == stderr_after_first_line[0]
