"""The verb that runs experiments: its words, its files, its exit status."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.lab import stage_runners
from bertsmith.lab.stage_runners import Job
from bertsmith.runtime import device

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the machine's ceiling out."""
    monkeypatch.setattr(device, "measure_peak_macs", lambda _: 1e9)


def test_an_experiment_is_one_command(run: Run, tmp_path: Path) -> None:
    """A plan first, then the table on stdout, files named at the end; again it makes nothing."""
    options = ("activations", "--scale", "smoke", "--out", tmp_path / "lab")
    planned = run("lab", *options, "--plan")
    assert planned.status == 0, planned.err
    assert "7 stages to make for 4 results: about" in planned.out
    assert not (tmp_path / "lab/smoke/results").exists()
    as_json = json.loads(run("lab", *options, "--plan", "--json").out)
    assert len(as_json["stages"]) == 7
    done = run("lab", *options)
    assert done.status == 0, done.err
    assert "| GELU, erf |" in done.out
    assert "wrote" in done.err
    assert (tmp_path / "lab/smoke/activations.png").exists()
    assert "0 stages to make for 4 results" in run("lab", *options, "--plan").out
    told = json.loads(run("lab", *options, "--json").out)
    assert set(told["figures"]) == {"GELU, erf", "GELU, tanh", "ReLU", "ELU"}


def test_a_failed_run_is_told_and_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of four fails: the table has the others, the status is 1, and again it is 0."""
    made = stage_runners.pretrain_model

    def failing(job: Job) -> dict[str, Any]:
        if job.stage.settings["model"].get("activation") == "relu":
            raise OSError("the disk is full")
        return made(job)

    options = ("lab", "activations", "--scale", "smoke", "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(stage_runners.STAGE_FUNCTIONS, "pretrain", failing)
        done = run(*options)
    assert done.status == 1
    assert "the disk is full" in done.err
    assert "failed: relu, 0 (pretrain-" in done.err
    assert "1 result is missing; the same command tries again" in done.err
    rows = [line for line in done.out.splitlines() if line.startswith("| ReLU")]
    assert rows == ["| ReLU | - | - |"]
    assert run(*options).status == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nothing",), "unknown experiment 'nothing'"),
        (("masking",), "--text FILE_OR_FOLDER"),
        (("masking", "--model", "x"), "trains models of its own"),
    ],
)
def test_a_mistake_is_told_in_a_line(run: Run, tmp_path: Path, words: Any, told: str) -> None:
    """The user's mistake exits with 2 and writes nothing."""
    done = run("lab", *words, "--out", tmp_path / "lab")
    assert done.status == 2
    assert told in done.err
    assert not (tmp_path / "lab").exists()
