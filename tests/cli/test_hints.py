"""Suggested commands can be pasted into a shell, and unfinished runs can be used as models."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli import hints
from bertsmith.errors import RunError
from bertsmith.settings import Settings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine.run_directory import load_run_settings
from tests.cli.conftest import SENTENCES, RunCli

SPECIAL_CHARACTERS = "a $(b) 'c' \"d\" & e"


@pytest.mark.parametrize("name", ["run", SPECIAL_CHARACTERS, "-run", "$HOME", "a\tb"])
def test_quoted_paths_survive_a_shell(name: str) -> None:
    """A shell turns a quoted path into the path, and never into an option."""
    (word,) = shlex.split(hints.quote_path(name))
    assert Path(word) == Path(name)
    assert not word.startswith("-")


@pytest.mark.parametrize(
    ("task_kind", "task", "texts"),
    [
        ("single", None, ["..."]),
        ("single", {"pair_column": None}, ["..."]),
        ("single", {"pair_column": "b"}, ["TEXT", "SECOND TEXT"]),
        ("span", {}, ["QUESTION", "CONTEXT"]),
        ("choice", {}, ["PROMPT", "ENDING 1", "ENDING 2"]),
        (
            "choice",
            {"ending_columns": ["a", "b", "c"]},
            ["PROMPT", "ENDING 1", "ENDING 2", "ENDING 3"],
        ),
        ("choice", {"ending_columns": ["lists"]}, ["PROMPT", "ENDING 1", "ENDING 2"]),
        ("tags", {}, ["..."]),
    ],
)
def test_predict_command_has_the_texts_of_the_task(
    task_kind: str, task: dict[str, Any] | None, texts: list[str]
) -> None:
    """A pasted ``predict`` command gets the texts that the model needs, separated by tabs."""
    command = hints.format_predict_command(SPECIAL_CHARACTERS, task_kind, task)
    shell = ["bash", "-c", command.replace("bertsmith predict", "printf '%s\\n'")]
    output = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.splitlines() == [SPECIAL_CHARACTERS, "\t".join(texts)]


class _TaskSettings(Settings):
    """The settings of a task that the tests change."""

    labels: list[str]
    lr: float = 1.0


class _ScheduleSettings(Settings):
    """The settings that ``load_run_settings`` reads from the schedule."""

    minutes: float | None = None


class _DeviceSettings(Settings):
    """The setting that ``load_run_settings`` reads from the table "run"."""

    device: str = "cpu"


class _RunSettings(Settings):
    """Settings of a run with labels."""

    task: _TaskSettings
    run: _DeviceSettings = _DeviceSettings()
    schedule: _ScheduleSettings = _ScheduleSettings()


def test_only_changed_labels_are_listed(tmp_path: Path) -> None:
    """If the labels of a run changed, the error lists the added and removed ones only."""
    labels = [f"label-{number}" for number in range(2500)]
    stored = _RunSettings(task=_TaskSettings(labels=labels))
    (tmp_path / "settings.toml").write_text(stored.to_toml())
    changed = _RunSettings(task=_TaskSettings(labels=[*labels[1:], "new"], lr=2.0))
    with pytest.raises(RunError) as error:
        load_run_settings(tmp_path, changed)
    message = str(error.value)
    assert re.search(r"task\.labels: 2,500 .*'label-0'; only now: 'new'", message)
    assert "'label-1'" not in message
    assert re.search(r"task\.lr: 1\.0 .*, 2\.0 now", message)
    assert "--from RUN --out NEW" in message
    assert len(message) < 600
    reversed_labels = _RunSettings(task=_TaskSettings(labels=labels[::-1]))
    with pytest.raises(RunError, match=r"2,500 now; the items differ from item 1 on"):
        load_run_settings(tmp_path, reversed_labels)


@pytest.fixture(scope="module")
def data_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer and a labeled table; its name has special characters."""
    folder = tmp_path_factory.mktemp("corpus") / "of $(them) all"
    folder.mkdir()
    tokenizer.save(folder / "tokenizer")
    documents = ("\n".join(SENTENCES) + f"\nNumber {n}." for n in range(60))
    (folder / "a.txt").write_text("\n\n".join(documents))
    rows = [f"the river {n}\t{'still' if n % 2 else 'loud'}" for n in range(24)]
    (folder / "t.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    return folder


SMALL_MODEL_OPTIONS = (
    "--set", "model.width=16", "--set", "model.heads=2", "--set", "model.layers=1",
    "--set", "data.max_seqlen=32", "--set", "data.batch_size=4", "--set", "run.threads=1",
)  # fmt: skip


def _next_command(err: str) -> list[str]:
    """Return the arguments of the last suggested command."""
    (*_, command) = re.findall(r"^next: bertsmith (.*)$", err, re.MULTILINE)
    return shlex.split(command)


def test_suggested_commands_run_and_unfinished_runs_are_usable(
    run_cli: RunCli, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each suggested command runs as printed; a run without a model uses its last checkpoint."""
    store = data_folder / "my store"
    pretrained = data_folder / "my run"
    tuned = data_folder / "my 'tuned'"
    monkeypatch.chdir(data_folder)
    completed = run_cli(
        "prepare", data_folder / "a.txt", "--tokenizer", data_folder / "tokenizer", "--workers", 1,
        "--out", store,
    )  # fmt: skip
    assert _next_command(completed.err) == ["pretrain", "--data", str(store), "--out", "RUN"]
    completed = run_cli(
        "pretrain", "--data", store, "--steps", 2, *SMALL_MODEL_OPTIONS, "--out", pretrained
    )
    assert completed.status == 0, completed.err
    assert f"bertsmith pretrain --from {hints.quote_path(pretrained)}" in completed.err
    suggested = run_cli(*_next_command(completed.err))
    assert suggested.status == 0, suggested.err
    # Without its model, the run looks like one that stopped after its first checkpoint.
    shutil.move(pretrained / "model", data_folder / "moved")
    completed = run_cli("fill", pretrained, "the [MASK]")
    assert completed.status == 0, completed.err
    assert "this run is not finished; using its latest checkpoint, step 2 of 2" in completed.err
    assert completed.out == run_cli("fill", data_folder / "moved", "the [MASK]").out
    rejected = run_cli("embed", pretrained, data_folder / "a.txt", "--out", data_folder / "v.npy")
    assert rejected.status == 2
    assert "bertsmith export" in rejected.err
    shutil.move(data_folder / "moved", pretrained / "model")

    completed = run_cli(
        "finetune", "classify", "--model", pretrained, "--data", data_folder / "t.tsv",
        "--epochs", 1, "--batch-size", 8, "--set", "run.threads=1", "--out", tuned,
    )  # fmt: skip
    assert completed.status == 0, completed.err
    assert run_cli(*_next_command(completed.err)).status == 0
    expected = run_cli("predict", tuned, "the river").out
    shutil.rmtree(tuned / "model")
    completed = run_cli("predict", tuned, "the river")
    assert completed.out == expected
    assert "using its latest checkpoint" in completed.err
    # The temporary models are not written to the run directories.
    for run_directory in (pretrained, tuned):
        assert "bertsmith-" not in " ".join(path.name for path in run_directory.iterdir())
