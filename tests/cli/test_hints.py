"""The commands that are shown to be pasted, and runs that have no model yet."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bertsmith.cli import hints
from bertsmith.errors import RunError
from bertsmith.settings import Settings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine.run_directory import load_run_settings
from tests.cli.conftest import SENTENCES, Run

AWKWARD = "a $(b) 'c' \"d\" & e"


@pytest.mark.parametrize("name", ["run", AWKWARD, "-run", "$HOME", "a\tb"])
def test_paths_survive_a_shell(name: str) -> None:
    """What a shell makes of a quoted path is the path, and no option."""
    (word,) = shlex.split(hints.quote_path(name))
    assert Path(word) == Path(name)
    assert not word.startswith("-")


@pytest.mark.parametrize(
    ("kind", "pair", "texts"),
    [
        ("single", False, ["..."]),
        ("single", True, ["TEXT", "SECOND TEXT"]),
        ("span", True, ["QUESTION", "CONTEXT"]),
        ("choice", False, ["PROMPT", "ENDING 1", "ENDING 2", "ENDING 3"]),
        ("tags", False, ["..."]),
    ],
)
def test_predict_is_shown_with_texts_of_its_form(kind: str, pair: bool, texts: list[str]) -> None:
    """A pasted ``predict`` gets as many texts as its model reads, with real tabs between them."""
    command = hints.predict_command(AWKWARD, kind, pair=pair, endings=3)
    shell = ["bash", "-c", command.replace("bertsmith predict", "printf '%s\\n'")]
    shown = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines() == [AWKWARD, "\t".join(texts)]


class _Task(Settings):
    labels: list[str]
    lr: float = 1.0


class _Schedule(Settings):
    minutes: float | None = None


class _Run(Settings):
    task: _Task
    schedule: _Schedule = _Schedule()


def test_only_labels_that_differ_are_named(tmp_path: Path) -> None:
    """Of 2,500 labels an error names those that came or went, not all."""
    labels = [f"label-{number}" for number in range(2500)]
    stored = _Run(task=_Task(labels=labels))
    (tmp_path / "settings.toml").write_text(stored.to_toml())
    with pytest.raises(RunError) as caught:
        load_run_settings(tmp_path, _Run(task=_Task(labels=[*labels[1:], "new"], lr=2.0)))
    message = str(caught.value)
    assert (
        "task.labels: 2,500 items in the run, 2,500 now; only in the run: 'label-0'; only now: 'new'"
        in message
    )
    assert "task.lr: 1.0 in the run, 2.0 now" in message
    assert "--from RUN --out NEW" in message
    assert len(message) < 600
    with pytest.raises(RunError, match="the order differs from item 1 on"):
        load_run_settings(tmp_path, _Run(task=_Task(labels=labels[::-1])))


@pytest.fixture(scope="module")
def corpus(words: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, its vocabulary and a labelled table."""
    folder = tmp_path_factory.mktemp("corpus") / "of $(them) all"
    folder.mkdir()
    words.save(folder / "words", 43)
    (folder / "a.txt").write_text(
        "\n\n".join("\n".join(SENTENCES) + f"\nNumber {n}." for n in range(60))
    )
    rows = [f"the river {n}\t{'still' if n % 2 else 'loud'}" for n in range(24)]
    (folder / "t.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    return folder


SMALL = ("--set", "model.width=16", "--set", "model.heads=2", "--set", "model.layers=1",
         "--set", "data.length=32", "--set", "data.batch=4", "--set", "run.threads=1")  # fmt: skip


def _next(err: str) -> list[str]:
    """Return the words of the command that was shown last as the next one."""
    (*_, command) = re.findall(r"^next: bertsmith (.*)$", err, re.MULTILINE)
    return shlex.split(command)


def test_hints_can_be_pasted_and_unfinished_runs_used(
    run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command's hint runs as it is shown; a run without a model answers by its checkpoint."""
    store, pretrained, tuned = corpus / "my store", corpus / "my run", corpus / "my 'tuned'"
    monkeypatch.chdir(corpus)
    done = run("prepare", corpus / "a.txt", "--tokenizer", corpus / "words", "--workers", 1,
               "--out", store)  # fmt: skip
    assert _next(done.err) == ["pretrain", "--data", str(store), "--out", "RUN"]
    done = run("pretrain", "--data", store, "--steps", 2, *SMALL, "--out", pretrained)
    assert done.status == 0, done.err
    assert f"bertsmith pretrain --from {hints.quote_path(pretrained)}" in done.err
    shown = run(*_next(done.err))
    assert shown.status == 0, shown.err
    # As a run that was stopped after its first checkpoint.
    shutil.move(pretrained / "model", corpus / "kept")
    answer = run("fill", pretrained, "the [MASK]")
    assert answer.status == 0, answer.err
    assert "this run is not finished; using its last checkpoint, step 2 of 2" in answer.err
    assert answer.out == run("fill", corpus / "kept", "the [MASK]").out
    refused = run("embed", pretrained, corpus / "a.txt", "--out", corpus / "v.npy")
    assert refused.status == 2
    assert "bertsmith export" in refused.err
    shutil.move(corpus / "kept", pretrained / "model")

    done = run("finetune", "classify", "--model", pretrained, "--data", corpus / "t.tsv",
               "--epochs", 1, "--batch", 8, "--set", "run.threads=1", "--out", tuned)  # fmt: skip
    assert done.status == 0, done.err
    assert run(*_next(done.err)).status == 0
    expected = run("predict", tuned, "the river").out
    shutil.rmtree(tuned / "model")
    answer = run("predict", tuned, "the river")
    assert answer.out == expected
    assert "using its last checkpoint" in answer.err
    for place in (pretrained, tuned):
        assert "bertsmith-" not in " ".join(path.name for path in place.iterdir())
