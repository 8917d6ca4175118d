"""Sweeps over seeds and the grid: the best model, interruption, and errors."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith import bundle
from bertsmith.errors import RunError, SettingsError
from bertsmith.settings import read_toml
from bertsmith.train.engine import loop
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.step import take_step
from bertsmith.train.finetuning import sweep
from bertsmith.train.finetuning.sweep import run_sweep
from tests.train.finetuning.test_finetune import FAST_SETTINGS, write_table


def test_sweep_keeps_the_best_seed(start_model: Path, tmp_path: Path) -> None:
    """A sweep reports median and range over the seeds, and copies the best model."""
    data = write_table(tmp_path / "train.jsonl", "single", 60)
    values = {**FAST_SETTINGS, "schedule": {"epochs": 2.0}}
    out = tmp_path / "sweep"
    result = run_sweep("classify", start_model, out, seeds=3, data=data, values=values)
    (point,) = result.points
    scores = [run.metrics["accuracy"] for run in point.runs]
    assert point.summarize_metric("accuracy") == (sorted(scores)[1], min(scores), max(scores))
    assert result.best is not None
    assert result.best.metrics["accuracy"] == max(scores)
    best_weights = (result.best.run / "model" / bundle.WEIGHTS_FILE).read_bytes()
    assert (out / "model" / bundle.WEIGHTS_FILE).read_bytes() == best_weights
    assert len({run.metrics["loss"] for run in point.runs}) == 3
    repeated = run_sweep("classify", start_model, out, seeds=3, data=data, values=values)
    assert repeated.points == result.points
    assert not list(out.glob("*/checkpoints"))


def test_sweep_keeps_the_optimizer_if_told_to(start_model: Path, tmp_path: Path) -> None:
    """With checkpoint.keep_optimizer, each run keeps its last checkpoint."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    values = {**FAST_SETTINGS, "schedule": {"steps": 1}, "checkpoint": {"keep_optimizer": True}}
    run_sweep("classify", start_model, tmp_path / "sweep", seeds=2, data=data, values=values)
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/step-*"))) == 2


def test_interrupted_sweep_with_a_damaged_checkpoint_ends_the_same(
    start_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted sweep resumes its second run from the newest intact checkpoint."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    values = {**FAST_SETTINGS, "schedule": {"steps": 6}, "checkpoint": {"steps": 2}}
    expected = run_sweep(
        "classify", start_model, tmp_path / "uninterrupted", seeds=2, data=data, values=values
    )
    num_steps = 0

    def interrupt_second_run(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        # The first run has 6 steps, and the second one is interrupted in its step 5.
        if num_steps == 6 + 5:
            raise KeyboardInterrupt
        return take_step(*arguments, **keywords)

    out = tmp_path / "interrupted"
    monkeypatch.setattr(loop, "take_step", interrupt_second_run)
    with pytest.raises(KeyboardInterrupt):
        run_sweep("classify", start_model, out, seeds=2, data=data, values=values)
    newest = out / "seed-1" / "checkpoints" / "step-4" / "moments.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    result = run_sweep("classify", start_model, out, seeds=2, data=data, values=values)
    assert num_steps == 6 + 5 + (6 - 2), "resumed after step 2"
    for resumed, uninterrupted in zip(result.points[0].runs, expected.points[0].runs, strict=True):
        weights = (resumed.run / "model" / bundle.WEIGHTS_FILE).read_bytes()
        assert weights == (uninterrupted.run / "model" / bundle.WEIGHTS_FILE).read_bytes()


def test_late_signal_stops_the_sweep_after_the_run(
    start_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the last step of a run stops the sweep after that run; the sweep can resume."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    values = {**FAST_SETTINGS, "schedule": {"steps": 2}}
    num_steps = 0

    def raise_signal_in_step_2(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            signal.raise_signal(signal.SIGTERM)
        return take_step(*arguments, **keywords)

    monkeypatch.setattr(loop, "take_step", raise_signal_in_step_2)
    out = tmp_path / "sweep"
    result = run_sweep("classify", start_model, out, seeds=2, data=data, values=values)
    assert result.stopped_run is not None
    assert (result.stopped_run.late_signal, result.model) == (signal.SIGTERM, None)
    assert num_steps == 2
    result = run_sweep("classify", start_model, out, seeds=2, data=data, values=values)
    assert (result.stopped_run, result.model) == (None, out / "model")
    assert num_steps == 2 + 2


def test_lowest_error_is_the_best(start_model: Path, tmp_path: Path) -> None:
    """If the first metric is the mean squared error, the lowest value selects epoch and seed."""
    data = write_table(tmp_path / "train.jsonl", "regression", 40)
    task = {**FAST_SETTINGS["task"], "kind": "regression", "metrics": ["mse", "pearson"]}
    values = {
        **FAST_SETTINGS,
        "task": task,
        "schedule": {"epochs": 3.0},
        "run": {"threads": 1, "model_selection": "best"},
    }
    result = run_sweep(
        "classify", start_model, tmp_path / "sweep", seeds=3, data=data, values=values
    )
    (point,) = result.points
    errors = [run.metrics["mse"] for run in point.runs]
    assert len(set(errors)) == 3
    assert result.best is not None
    assert result.best.metrics["mse"] == min(errors)
    for run_result in point.runs:
        lines = map(json.loads, (run_result.run / "metrics.jsonl").read_text().splitlines())
        epoch_errors = [line["mse"] for line in lines if line["kind"] == "heldout"]
        assert run_result.metrics["mse"] == min(epoch_errors)


def test_nan_is_the_worst_score(tmp_path: Path) -> None:
    """In a summary over seeds, NaN counts as the highest error or the lowest F1."""
    runs = [
        FinetuneResult(
            run=tmp_path,
            model=None,
            signal=None,
            step=1,
            steps=1,
            metric_names=["mse", "f1"],
            metrics={"mse": value, "f1": value},
            counts={},
            seconds=0.0,
        )
        for value in (2.0, float("nan"), 1.0)
    ]
    point = sweep.GridPoint({}, runs)
    median_mse, min_mse, max_mse = point.summarize_metric("mse")
    assert (median_mse, min_mse) == (2.0, 1.0)
    assert np.isnan(max_mse)
    median_f1, min_f1, max_f1 = point.summarize_metric("f1")
    assert (median_f1, max_f1) == (1.0, 2.0)
    assert np.isnan(min_f1)


def test_sweep_does_not_overwrite_a_model(start_model: Path, tmp_path: Path) -> None:
    """A directory with a model or a single run is rejected as the directory of a sweep."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    with pytest.raises(RunError, match="contains a model or a single run"):
        run_sweep("classify", start_model, start_model.parent, seeds=2, data=data)
    assert (start_model / bundle.WEIGHTS_FILE).exists()


def test_grid_is_that_of_the_paper(
    start_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid runs all combinations of its values; the grid of appendix A.3 has 18."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    monkeypatch.setattr(sweep, "GRID", {"task.batch_size": (4, 8), "optim.lr": (1e-3, 2e-3)})
    values = {"run": FAST_SETTINGS["run"], "schedule": {"epochs": 0.5}}
    out = tmp_path / "sweep"
    result = run_sweep("classify", start_model, out, grid=True, data=data, values=values)
    assert [point.hyperparameters for point in result.points] == [
        {"task.batch_size": batch, "optim.lr": lr} for batch in (4, 8) for lr in (1e-3, 2e-3)
    ]
    settings = read_toml(out / "batch-4_lr-0.002_seed-0" / "settings.toml")
    assert (settings["task"]["batch_size"], settings["optim"]["lr"]) == (4, 2e-3)
    monkeypatch.undo()
    assert np.prod([len(values) for values in sweep.GRID.values()]) == 18


@pytest.mark.parametrize(
    "assignment", ["task.batch_size=4", "optim.lr=0.5", "schedule.epochs=1.0", "schedule.steps=2"]
)
def test_grid_rejects_settings_it_would_override(
    start_model: Path, tmp_path: Path, assignment: str
) -> None:
    """Batch size, learning rate, epochs and steps cannot be set in addition to the grid."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    name = assignment.partition("=")[0]
    with pytest.raises(SettingsError, match=rf"{name} is .*, but the grid sets"):
        run_sweep(
            "classify",
            start_model,
            tmp_path / "sweep",
            grid=True,
            data=data,
            assignments=[assignment],
        )
    assert not (tmp_path / "sweep").exists()
