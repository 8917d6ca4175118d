"""Training on a GPU reads the result of a step while the next one runs; simulated on the CPU."""

import math
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import DivergedError
from bertsmith.train.engine import loop, step
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.objective import PretrainingObjective
from tests.train.conftest import TrainFunction


@pytest.fixture
def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the results of steps on the CPU as late as on a GPU."""
    for module in (loop, step):
        monkeypatch.setattr(module, "can_skip_step", lambda *_: True)


def read_training_lines(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without times."""
    names = {"step", "kind", "loss", "mlm_loss", "nsp_loss", "lr", "grad_norm", "grad_norms"}
    return [
        {name: value for name, value in line.items() if name in names} for line in read_metrics(run)
    ]


def test_reading_late_changes_no_result(
    train: TrainFunction, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Weights and metrics are those of a run that reads each step immediately."""
    options: dict[str, Any] = {
        "steps": 7, "run__eval_every": 3, "checkpoint__steps": 2, "run__log_every": 2,
        "run__log_grad_norms": "true",
    }  # fmt: skip
    expected = train("immediate", **options)
    request.getfixturevalue("read_late")
    late = train("late", **options)
    weights = [
        (result.run / "model" / "model.safetensors").read_bytes() for result in (expected, late)
    ]
    assert weights[0] == weights[1]
    lines = read_training_lines(tmp_path / "late")
    assert lines == read_training_lines(tmp_path / "immediate")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 4, 6, 7]


@pytest.mark.usefixtures("read_late")
@pytest.mark.parametrize(("interval", "last_step", "saved_steps"), [(3, 5, [3]), (4, 4, [])])
def test_a_diverged_step_is_reported_after_the_next_one(
    train: TrainFunction,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interval: int,
    last_step: int,
    saved_steps: list[int],
) -> None:
    """A NaN loss in step 4 is reported after step 5, or before a checkpoint of step 4."""
    compute_losses = PretrainingObjective.compute_losses
    num_calls = 0

    def return_nan_in_step_4(self: Any, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        losses = compute_losses(self, *arguments)
        return (
            {name: loss * math.nan for name, loss in losses.items()} if num_calls == 4 else losses
        )

    monkeypatch.setattr(PretrainingObjective, "compute_losses", return_nan_in_step_4)
    options = {"data__batch_size": 4, "run__micro_batch_tokens": 4096, "steps": 9}
    with pytest.raises(DivergedError, match=r"in step 4: the loss is nan.* examples 12 to 15 of"):
        train(checkpoint__steps=interval, run__eval_every=9, **options)
    assert num_calls == last_step
    assert [number for number, _ in list_checkpoints(tmp_path / "run")] == saved_steps
