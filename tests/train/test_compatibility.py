"""Runs and checkpoints written by version 0.1 still load, resume and finish."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertsmith import bundle
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.snapshot import write_snapshot
from bertsmith.use.inspection.describe import describe_checkpoint, describe_run
from tests.train.conftest import make_assignments

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"
WEIGHTS = "model/model.safetensors"
PRETRAIN = make_assignments(
    checkpoint__every=3, checkpoint__keep=9, run__eval_every=6, model__max_positions=32
)
FINETUNE: dict[str, Any] = {
    "optim": {"lr": 3e-3},
    "run": {"threads": 1, "precision": "fp32", "device": "cpu", "choose": "best"},
    "task": {"batch": 8},
    "schedule": {"epochs": 3.0},
    "checkpoint": {"every": 4, "keep": 9},
}


@pytest.fixture
def old_files(tmp_path: Path) -> Path:
    """A copy of the fixtures, with its own path in the settings."""
    folder = tmp_path / "v0.1"
    shutil.copytree(FIXTURES, folder)
    for file in [*folder.rglob("settings.toml"), *folder.rglob("bertsmith.json")]:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("@ROOT@", str(folder)), encoding="utf-8")
    return folder


def _assert_same_weights(run: Path, reference: Path) -> None:
    """Compare with a tolerance, because the fixtures were trained on another CPU."""
    weights = load_file(run / WEIGHTS)
    expected = load_file(reference / WEIGHTS)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_killed_pretraining_run_resumes(old_files: Path) -> None:
    """The run resumes from step 6 and ends with the weights of an uninterrupted run."""
    run = old_files / "pretrain-stopped"
    result = pretrain(old_files / "store", run, steps=12, assignments=PRETRAIN)
    assert result.outcome.state.step == 12
    train_lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == [*range(1, 13)]
    _assert_same_weights(run, old_files / "pretrain-finished")


def test_killed_finetuning_run_resumes(old_files: Path) -> None:
    """The run resumes from step 8 and selects the best weights of an uninterrupted run."""
    run = old_files / "finetune-stopped"
    result = finetune(
        "classify",
        old_files / "pretrain-finished",
        run,
        data=old_files / "table.jsonl",
        values=FINETUNE,
    )
    assert (result.step, result.steps) == (15, 15)
    _assert_same_weights(run, old_files / "finetune-finished")


def test_finished_runs_are_recognized(old_files: Path) -> None:
    """The same command does not change the weights, and restores a missing model directory."""
    for name in ("pretrain-finished", "finetune-finished"):
        run = old_files / name
        weights = (run / WEIGHTS).read_bytes()
        for is_model_missing in (False, True):
            if is_model_missing:
                (run / "model").rename(old_files / f"{name}-model")
            if name == "pretrain-finished":
                pretrain(old_files / "store", run, steps=12, assignments=PRETRAIN)
            else:
                finetune(
                    "classify",
                    old_files / "pretrain-finished",
                    run,
                    data=old_files / "table.jsonl",
                    values=FINETUNE,
                )
            assert (run / WEIGHTS).read_bytes() == weights


def test_old_checkpoints_can_be_inspected_and_exported(old_files: Path, tmp_path: Path) -> None:
    """``inspect`` describes old runs and checkpoints, and a snapshot can be written from one."""
    run = old_files / "pretrain-stopped"
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [3, 6]
    assert describe_run(run).facts["step"] == 8
    assert describe_checkpoint(run / "checkpoints" / "step-6").facts["moments"]
    write_snapshot(run, 3, tmp_path / "snapshot")
    assert bundle.load(tmp_path / "snapshot").info["provenance"]["step"] == 3


def test_settings_of_a_run_are_a_settings_file(old_files: Path, tmp_path: Path) -> None:
    """A new run with ``config=RUN/settings.toml`` ends with the weights of that run."""
    finished = old_files / "pretrain-finished"
    pretrained = pretrain(
        old_files / "store", tmp_path / "pretrain", config=finished / "settings.toml"
    )
    assert pretrained.outcome.state.step == 12
    _assert_same_weights(tmp_path / "pretrain", finished)
    finished = old_files / "finetune-finished"
    for number, data in enumerate((old_files / "table.jsonl", None)):
        run = tmp_path / f"finetune-{number}"
        finetune(
            "classify",
            old_files / "pretrain-finished",
            run,
            data=data,
            config=finished / "settings.toml",
        )
        _assert_same_weights(run, finished)
