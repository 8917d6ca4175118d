"""The verb inspect, on everything that it knows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli.inspect import _NEXT, _NEXT_OF_HEADS
from bertsmith.text.wordpiece import Tokenizer

Run = Callable[..., Any]

#: Enough documents for pairs and a held-out part.
DOCUMENT = (
    "The ferry crossed the river twice a day. Nobody remembered a winter with ice. "
    "The old pilot knew every stone. Every stone knew him in the evening. "
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, words: Tokenizer) -> Path:
    """A tokenizer's directory."""
    folder = tmp_path_factory.mktemp("inspect") / "words"
    words.save(folder)
    return folder


def test_a_tokenizer(run: Run, tokenizer: Path, words: Tokenizer) -> None:
    """A directory and its vocab.txt under any name show size and special tokens."""
    other = tokenizer.parent / "mine.txt"
    other.write_bytes((tokenizer / "vocab.txt").read_bytes())
    for path in (tokenizer, tokenizer / "vocab.txt", tokenizer / "tokenizer.json", other):
        done = run("inspect", path)
        assert done.status == 0, done.err
        assert f"{words.vocab_size} words" in done.out
        assert "[MASK] 4" in done.out
        assert "next: bertsmith prepare" in done.err
        found = json.loads(run("inspect", path, "--json").out)
        assert found["kind"] == "tokenizer"
        assert found["size"] == words.vocab_size


def test_a_store(run: Run, tokenizer: Path, tmp_path: Path) -> None:
    """A store shows its counts and examples, with the pair's label and the masks marked."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"{DOCUMENT * (2 + number % 3)} {number}." for number in range(40)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    store = tmp_path / "store"
    made = run("prepare", corpus, "--tokenizer", tokenizer, "--out", store, "--workers", 1)
    assert made.status == 0, made.err
    done = run("inspect", store, "--examples", 4, "--length", 32)
    assert done.status == 0, done.err
    assert sum(line.startswith("  A: [CLS]") for line in done.out.splitlines()) == 4
    assert "{[MASK]→" in done.out
    assert "next: bertsmith pretrain --data" in done.err
    found = json.loads(run("inspect", store / "manifest.json", "--json").out)
    assert found["kind"] == "store"
    assert found["report"]["documents"] == 40
    assert "verified" not in found
    assert "verified: checksums" in run("inspect", store, "--verify").out
    assert json.loads(run("inspect", store, "--verify", "--json").out)["verified"] == "checksums"
    ids = store / "train.ids"
    ids.write_bytes(ids.read_bytes()[:-2] + b"\0\0")
    done = run("inspect", store, "--verify")
    assert done.status == 2
    assert "train.ids: the file is damaged" in done.err
    done = run("inspect", tokenizer, "--verify")
    assert done.status == 2
    assert "--verify is for token stores" in done.err


def test_a_model(run: Run, model: Path) -> None:
    """A model directory, or its config.json, shows config, parameters and tensors."""
    for path in (model, model / "config.json"):
        done = run("inspect", path)
        assert done.status == 0, done.err
        assert "2 layers, width 22, 2 heads; on top: masked LM, next sentence" in done.out
        assert "bert.encoder.layer.1.attention.self.query.weight" in done.out
        assert f"next: bertsmith fill {model}" in done.err
    assert json.loads(run("inspect", model, "--json").out)["config"]["feed_forward"] == 31


def test_tensors_and_settings(run: Run, model: Path, tmp_path: Path) -> None:
    """A lone weights file and a settings file are shown as they stand."""
    shown = run("inspect", model / "model.safetensors").out
    assert "cls.predictions.bias" in shown
    assert "config" not in shown
    settings = tmp_path / "mine.toml"
    settings.write_text("[optim]\nlr = 2e-4\n")
    assert run("inspect", settings).out.split()[-2:] == ["optim.lr", "0.0002"]
    assert json.loads(run("inspect", settings, "--json").out)["settings"] == {"optim": {"lr": 2e-4}}


@pytest.mark.parametrize("name", ["nothing", "empty", "notes.txt"])
def test_the_unknown_is_refused_with_what_is_known(run: Run, tmp_path: Path, name: str) -> None:
    """A path without anything known is an error that lists what is."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("just some notes\n")
    done = run("inspect", tmp_path / name)
    assert done.status == 2
    assert "expected one of: a tokenizer directory or its vocab.txt, a store" in done.err


def test_every_next_command_is_a_verb(run: Run) -> None:
    """What inspect advises exists."""
    for command in (*_NEXT.values(), *_NEXT_OF_HEADS.values()):
        assert run(command.split()[1], "--help").status == 0
