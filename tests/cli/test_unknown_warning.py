"""Every command that encodes text warns once if more than 2 % of the tokens are [UNK]."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.bundle import HeadConfig, TaskKind, save_fine_tuned
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

Run = Callable[..., Any]
ENGLISH = "The old pilot knew the ferry."
#: Korean: "The old boatman knew the ferry."
KOREAN = "늙은 사공은 나룻배를 알았다."
KINDS: dict[TaskKind, tuple[str, ...]] = {
    "single": ("no", "yes"),
    "entities": ("O", "B-PER", "I-PER"),
    "span": (),
    "choice": (),
}
WARNING = "are [UNK]: the vocabulary does not cover this text"


@pytest.fixture(scope="module")
def tuned(words: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[TaskKind, Path]:
    """A random model of each task family with an English vocabulary."""
    torch.manual_seed(5)
    config = ModelConfig(
        vocab_size=words.vocab_size, layers=1, width=16, heads=2, feed_forward=32, max_positions=64
    )
    root = tmp_path_factory.mktemp("tuned")
    for kind, labels in KINDS.items():
        head = HeadConfig(kind, labels)
        save_fine_tuned(root / kind, head.build_model(config), words, head, {})
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(params=[ENGLISH, KOREAN], ids=["english", "korean"])
def text(request: pytest.FixtureRequest) -> str:
    """A sentence that the vocabulary covers, or one that it does not."""
    return str(request.param)


def check(run: Run, text: str, *arguments: object, **more: Any) -> Any:
    """Run a command and expect one warning for Korean text, none for English."""
    done = run(*arguments, **more)
    assert done.status == 0, done.err
    assert done.err.count(WARNING) == (text == KOREAN)
    assert WARNING not in done.out
    return done


def test_pre_trained_models(run: Run, model: Path, text: str) -> None:
    """fill, score and pair warn; special tokens in the text do not lower the share."""
    check(run, text, "fill", model, f"{text} [MASK] [SEP]")
    check(run, text, "score", model, "--text", text)
    done = check(run, text, "pair", model, text, text)
    if text == KOREAN:
        assert "warning: 80.0% of the tokens are" in done.err


def test_vectors(run: Run, model: Path, text: str, tmp_path: Path) -> None:
    """embed, similar and search warn, and embed --json has the share."""
    (tmp_path / "lines.txt").write_text(f"{text}\n{text}\n")
    check(run, text, "embed", model, tmp_path / "lines.txt")
    out = tmp_path / "v.index"
    done = check(run, text, "embed", model, tmp_path / "lines.txt", "--out", out, "--json")
    assert json.loads(done.out)["unknown_share"] == (0.8 if text == KOREAN else 0)
    check(run, text, "search", out, text)
    word = text.split()[1]
    check(run, text, "similar", model, tmp_path / "lines.txt", "--word", word)


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuned_models(
    run: Run, tuned: dict[TaskKind, Path], text: str, kind: TaskKind, tmp_path: Path
) -> None:
    """In all families predict and evaluate warn, and the counts of evaluate have the share."""
    parts = {"span": 2, "choice": 3}.get(kind, 1)
    check(run, text, "predict", tuned[kind], "\t".join([text] * parts))
    data = tmp_path / "data.jsonl"
    tags = ["B-PER", *["O"] * (len(text.split()) - 1)]
    rows: dict[TaskKind, dict[str, Any]] = {
        "single": {"text": text, "label": "yes"},
        "entities": {"tokens": text.split(), "tags": tags},
        "span": {"id": "1", "question": text, "context": text,
                 "answers": {"text": [text[:2]], "answer_start": [0]}},
        "choice": {"text": text, "a": text, "b": text, "label": 1},
    }  # fmt: skip
    data.write_text(json.dumps(rows[kind]) + "\n")
    endings = ["--set", 'task.endings=["a","b"]'] if kind == "choice" else []
    done = check(run, text, "evaluate", tuned[kind], "--data", data, "--json", *endings)
    share = json.loads(done.out)["counts"]["unknown_share"]
    assert (share > 0.7) == (text == KOREAN)
    assert share > 0.7 or share == 0


def test_endless_input_is_warned_about_at_once(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From standard input the warning comes with the first answer, and only once."""
    said: list[str] = []
    stderr = io.StringIO()
    monkeypatch.setattr("bertsmith.cli.unknown_warning.say", lambda line: stderr.write(line + "\n"))

    def typed(*_: str) -> Iterator[str]:
        yield KOREAN
        said.append(stderr.getvalue())
        yield KOREAN

    monkeypatch.setattr("bertsmith.cli.model_options.read_lines", typed)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run("embed", model, "-", terminal=True).status == 0
    assert WARNING in said[0]
    assert stderr.getvalue() == said[0]
