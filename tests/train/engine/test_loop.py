"""The training loop: several processes, and the logged model FLOPs utilization."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertsmith.progress import NullProgress
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.train.engine import loop
from bertsmith.train.engine.loop import train
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.settings import OptimSettings
from tests.train.engine.toy_run import MACHINE, OPTIONS, ToyObjective


class _SecondProcess(ProcessGroup):
    """A process that receives the metrics of process 0: the loss falls until step 4."""

    def broadcast(self, value: Any) -> Any:
        """Return the metrics of process 0."""
        return {"loss": abs(value["step"] - 4.0)}


class _Objective(ToyObjective):
    """The toy objective, whose metrics never improve in this process."""

    num_evaluations = 0

    def evaluate(self) -> dict[str, float]:
        """Return the step, and a loss that rises."""
        self.num_evaluations += 1
        return {"loss": float(self.num_evaluations), "step": float(self.num_evaluations)}


def test_metrics_of_process_0_end_a_run_in_all_processes(tmp_path: Path) -> None:
    """Early stopping and the best step depend on the metrics of process 0 alone.

    Otherwise a process whose metrics differ by rounding would end and the others wait for it.
    """
    machine = replace(MACHINE, processes=_SecondProcess())
    objective = _Objective()
    optimizer = build_optimizer(objective.model, OptimSettings())
    options = replace(OPTIONS, eval_every=1, patience=2)
    outcome = train(
        objective, objective.model, optimizer, machine, options, tmp_path, NullProgress()
    )
    assert (outcome.state.best_step, outcome.state.step) == (4, 6)


def test_utilization_is_at_most_1(tmp_path: Path) -> None:
    """If other processes slow the measurement of the peak, a faster step becomes the peak."""
    objective = ToyObjective()
    optimizer = build_optimizer(objective.model, OptimSettings())
    # A step of the toy objective has more than one multiply-add per second.
    options = replace(OPTIONS, measure_peak_macs_per_second=lambda: 1e-9)
    train(objective, objective.model, optimizer, MACHINE, options, tmp_path, NullProgress())
    utilization = [line["mfu"] for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert utilization[0] == 1.0
    assert all(0 < value <= 1 for value in utilization)


@pytest.mark.parametrize(("interval", "count"), [(30.0, 1), (0.0, 4)])
def test_peak_is_not_measured_after_each_of_many_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, count: int
) -> None:
    """The peak is measured at the start and after the evaluations that are far enough apart."""
    monkeypatch.setattr(loop, "PEAK_INTERVAL_SECONDS", interval)
    peaks = iter(range(1, 99))
    options = replace(OPTIONS, eval_every=3, measure_peak_macs_per_second=lambda: next(peaks))
    objective = ToyObjective()
    optimizer = build_optimizer(objective.model, OptimSettings())
    train(objective, objective.model, optimizer, MACHINE, options, tmp_path, NullProgress())
    assert next(peaks) == count + 1
