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
from tests.train.conftest import assignments

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"
WEIGHTS = "model/model.safetensors"
PRETRAIN = assignments(
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
def old(tmp_path: Path) -> Path:
    """A copy of the fixtures, with the paths in them replaced by the copy's."""
    folder = tmp_path / "v0.1"
    shutil.copytree(FIXTURES, folder)
    for file in [*folder.rglob("settings.toml"), *folder.rglob("bertsmith.json")]:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("@ROOT@", str(folder)), encoding="utf-8")
    return folder


def _assert_same_weights(run: Path, reference: Path) -> None:
    """Compare within the tolerance between CPUs: the fixtures come from another machine."""
    weights, expected = load_file(run / WEIGHTS), load_file(reference / WEIGHTS)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


def test_a_killed_pretraining_run_resumes(old: Path) -> None:
    """The run resumes from step 6 and ends with the weights of the run that was not killed."""
    run = old / "pretrain-stopped"
    result = pretrain(old / "store", run, steps=12, assignments=PRETRAIN)
    assert result.outcome.state.step == 12
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "train"] == [
        *range(1, 13)
    ]
    _assert_same_weights(run, old / "pretrain-finished")


def test_a_killed_finetuning_run_resumes(old: Path) -> None:
    """The run resumes from step 8 and chooses the best weights of the run that was not killed."""
    run = old / "finetune-stopped"
    result = finetune("classify", old / "pretrain-finished", run,
                      data=old / "table.jsonl", values=FINETUNE)  # fmt: skip
    assert (result.step, result.steps) == (15, 15)
    _assert_same_weights(run, old / "finetune-finished")


def test_finished_runs_are_recognized(old: Path) -> None:
    """The same command leaves the weights as they are, and writes a missing model again."""
    for name, weights in (("pretrain-finished", WEIGHTS), ("finetune-finished", WEIGHTS)):
        run, before = old / name, (old / name / weights).read_bytes()
        for model_is_missing in (False, True):
            if model_is_missing:
                (run / "model").rename(old / f"{name}-model")
            if name == "pretrain-finished":
                pretrain(old / "store", run, steps=12, assignments=PRETRAIN)
            else:
                finetune("classify", old / "pretrain-finished", run,
                         data=old / "table.jsonl", values=FINETUNE)  # fmt: skip
            assert (run / weights).read_bytes() == before


def test_old_checkpoints_can_be_inspected_and_exported(old: Path, tmp_path: Path) -> None:
    """``inspect`` describes run and checkpoint, and a checkpoint becomes a model directory."""
    run = old / "pretrain-stopped"
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [3, 6]
    assert describe_run(run).facts["step"] == 8
    assert describe_checkpoint(run / "checkpoints" / "step-6").facts["moments"]
    write_snapshot(run, 3, tmp_path / "snapshot")
    assert bundle.load(tmp_path / "snapshot").info["provenance"]["step"] == 3
