"""The command ``distill``."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import MODEL_WIDTH, SENTENCES, RunCli


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A text file of 24 lines."""
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{SENTENCES[n % 3]} {n}\n" for n in range(24)))
    return file


def test_distill_embeddings(run_cli: RunCli, model: Path, lines: Path, tmp_path: Path) -> None:
    """A student is trained, inspected and embeds lines; a finished run is not trained again."""
    run = tmp_path / "run"
    command = ["distill", "--teacher", model, "--data", lines, "--layers", "1", "--out", run,
               "--objective", "embedding", "--epochs", "1", "--batch-size", "8",
               "--set", "run.threads=1"]  # fmt: skip
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert completed.out.startswith("held out (2 examples): teacher_cosine ")
    assert f"outputs of the teacher: 24 x {MODEL_WIDTH} in 16 bits" in completed.err
    assert "student: 1 layer of width" in completed.err
    assert f"next: bertsmith compare {model} {run}" in completed.err
    assert json.loads(run_cli(*command, "--json").out)["metrics"]["examples"] == 2
    assert "finished" in run_cli("inspect", run).out
    vectors = run_cli("embed", run, lines, "--out", tmp_path / "vectors.npy")
    assert vectors.status == 0, vectors.err


def test_invalid_options_are_errors_without_torch(
    run_cli: RunCli, model: Path, lines: Path, tmp_path: Path
) -> None:
    """The message names the options of the student, and what a teacher lacks."""
    command = ["distill", "--teacher", model, "--data", lines, "--out", tmp_path / "run"]
    cases: list[tuple[list[object], str]] = [
        (["--objective", "embedding"], "no student: give one of --layers"),
        (["--layers", "1", "--from", model, "--objective", "embedding"], "--from and another"),
        (["--layers", "1", "--objective", "task"], "needs a fine-tuned teacher"),
        (["--student-layers", "1,x"], "--student-layers '1,x': expected numbers"),
    ]
    for options, message in cases:
        completed = run_cli(*command, *options)
        assert (completed.status, message in completed.err) == (2, True), completed.err
