"""The training loop in several processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.progress import NullProgress
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.train.engine.loop import train
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
