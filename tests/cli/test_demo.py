"""The command ``demo``: the commands that it runs."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bertsmith.bundle import load, save
from bertsmith.cli import demo
from bertsmith.data.store import Store
from bertsmith.errors import InputError
from bertsmith.lab.demo_comparison import compare_on_store
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.progress import NullProgress
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.fill import fill
from bertsmith.use.score import score
from tests.cli.conftest import RunCli
from tests.train.conftest import make_store, make_tokenizer


def test_pretraining_is_limited_by_minutes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretrain command gets --minutes, but neither steps nor an evaluation interval."""
    commands: list[list[str]] = []

    def record_command(arguments: list[str], *, standalone_mode: bool) -> int:
        commands.append(arguments)
        return 0

    monkeypatch.setattr(demo, "app", record_command)
    monkeypatch.setattr(demo, "_compare", lambda *_: None)
    demo.demo(out=tmp_path, minutes=0.5, seed=0)
    names = [command[0] for command in commands]
    assert names == ["corpus", "vocab", "prepare", "pretrain", "fill"]
    pretrain = commands[3]
    assert pretrain[pretrain.index("--minutes") + 1] == "0.5"
    assert not any("steps" in word or "eval_every" in word for word in pretrain)


def test_other_minutes_need_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo with other minutes than the one in the folder is an error that names --out."""
    monkeypatch.setattr(demo, "app", None)
    (tmp_path / "corpus.jsonl").touch()
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "settings.toml").write_text("[schedule]\nminutes = 3.0\nsteps = 90\n")
    expected = r"run-0: .* --minutes 3, got 0\.2; .* --out my-demo"
    with pytest.raises(InputError, match=expected):
        demo.demo(out=tmp_path, minutes=0.2, seed=0)


def test_ctrl_c_says_how_to_continue_the_demo(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is that of the demo, although Ctrl-C stops a command that it runs."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bertsmith.text.docstrings.read_documentation", interrupt)
    completed = run_cli("demo", "--out", tmp_path / "demo")
    assert completed.status == 130
    assert completed.err.endswith("stopped; run the same command again to continue\n")


def save_model(path: Path, tokenizer: Tokenizer, layers: int) -> Path:
    """Save a random model with a tokenizer."""
    torch.manual_seed(layers)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=layers, width=8, heads=2, feed_forward=12,
        max_positions=64, init_range=0.5,
    )  # fmt: skip
    save(path, BertForPreTraining(config), tokenizer, {})
    return path


def test_models_are_compared_on_the_same_held_out_sentences(tmp_path: Path) -> None:
    """Bits per character are those of ``score`` on the held-out text; the words, of ``fill``."""
    store = make_store(tmp_path)
    tokenizer = make_tokenizer()
    models = [
        save_model(tmp_path / "own", tokenizer, 1),
        save_model(tmp_path / "reference", make_tokenizer(("lorem",)), 2),
    ]
    text = "ba be [MASK] bo."
    results, num_sentences = compare_on_store(
        models, store, [text], num_sentences=10**6, top=2, progress=NullProgress()
    )
    split = Store.open(store).load_split("heldout")
    offsets = split.sentence_offsets.tolist()
    sentences = {tokenizer.decode(split.ids[start:end]) for start, end in pairwise(offsets)}
    sentences = {sentence for sentence in sentences if 20 <= len(sentence) <= 200}
    assert num_sentences == len(sentences) > 5
    num_characters = sum(map(len, sentences))
    for path, result in zip(models, results, strict=True):
        bundle = load(path)
        total = sum(score(bundle, sentence, variant="within-word").total for sentence in sentences)
        expected = -total / math.log(2) / num_characters
        assert result.bits_per_character == pytest.approx(expected, rel=1e-4)
        assert result.words == [[word for word, _ in fill(bundle, text, 2)[0].predictions]]
    assert results[0] != results[1]


def test_sentences_with_unknown_words_are_left_out(tmp_path: Path) -> None:
    """Only sentences without [UNK] for both models are scored."""
    store = make_store(tmp_path)
    spec = make_tokenizer().spec
    smaller = Tokenizer(replace(spec, vocab=tuple(word for word in spec.vocab if word != "ba")))
    models = [
        save_model(tmp_path / "own", make_tokenizer(), 1),
        save_model(tmp_path / "reference", smaller, 1),
    ]
    counts = [
        compare_on_store(paths, store, [], num_sentences=10**6, top=1, progress=NullProgress())[1]
        for paths in (models[:1], models)
    ]
    assert 0 < counts[1] < counts[0]
