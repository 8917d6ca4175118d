"""The verb prepare: what may be named as the tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store

Run = Callable[..., Any]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two documents."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "The ferry crossed the river."}\n{"text": "It had no pilot."}\n')
    return path


def test_a_model_a_run_and_its_files_name_the_same_words(
    run: Run, model: Path, corpus: Path, tmp_path: Path
) -> None:
    """What goes on from a model needs its words, and its RUN is what people have at hand."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(model)
    stores = []
    for number, name in enumerate((model, tmp_path / "run", model / "tokenizer.json")):
        out = tmp_path / f"store-{number}"
        done = run("prepare", corpus, "--tokenizer", name, "--out", out, "--workers", 1)
        assert done.status == 0, done.err
        stores.append(Store.open(out).load_tokenizer().spec.fingerprint())
    assert len(set(stores)) == 1


def test_what_has_no_words_is_told(run: Run, corpus: Path, tmp_path: Path) -> None:
    """Each is told what it is; nothing is written."""
    for place in ("half/checkpoints", "empty"):
        (tmp_path / place).mkdir(parents=True)
    for name, told in (
        ("half", "this run has not written its model yet"),
        ("empty", "found no tokenizer; expected tokenizer.json or vocab.txt"),
        ("nothing", "no such tokenizer; make one with: bertsmith vocab"),
    ):
        done = run("prepare", corpus, "--tokenizer", tmp_path / name, "--out", tmp_path / "store")
        assert (done.status, done.out) == (2, "")
        assert f"{tmp_path / name}: {told}" in done.err
    assert not (tmp_path / "store").exists()
