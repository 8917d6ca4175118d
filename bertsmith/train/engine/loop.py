"""The training loop: steps, accumulation, checkpoints, and a clean way out at any moment.

It never knows what is trained: that is a ``Objective``, pre-training or a task.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.progress import Progress
from bertsmith.runtime.device import Machine, trim_memory
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.budget import RevisedSchedule, TimeBudget
from bertsmith.train.engine.checkpoint import TrainingState
from bertsmith.train.engine.metrics_log import MetricsLog
from bertsmith.train.engine.signals import DeferredSignals
from bertsmith.train.engine.step import take_step


class Objective(Protocol):
    """What the loop trains."""

    def iter_batches(self, first_step: int) -> Iterator[list[Any]]:
        """Yield for each step from ``first_step`` on the pieces of its batch."""

    def compute_losses(self, piece: Any, whole: list[Any], noise: DropoutSeed) -> dict[str, Tensor]:
        """Return named terms, float32 []: sums over ``piece`` divided by the counts of ``whole``.

        Their sum over names and pieces is the loss of the step.
        """

    def describe_batch(self, step: int) -> str:
        """Say for people which examples the batch of ``step`` (from 0) holds."""

    def count_tokens(self, whole: list[Any]) -> int:
        """Count the tokens of a batch."""

    def count_macs(self, whole: list[Any]) -> float:
        """Count the multiply-adds of forward and backward pass for a batch."""

    def evaluate(self) -> dict[str, float]:
        """Return the held-out figures."""


@dataclass(frozen=True)
class LoopOptions:
    """What the loop needs to know besides the work. ``rate`` gives the learning rate of a step."""

    steps: int
    seed: int
    max_grad_norm: float
    lr_at_step: Callable[[int], float]
    log_every: int
    eval_every: int
    checkpoint_every: int
    keep_checkpoints: int
    #: The held-out figure by which the best checkpoint is chosen, and whether more is better.
    selection_metric: str
    #: Measures the machine's matrix product, in multiply-adds a second.
    measure_peak_macs: Callable[[], float]
    higher_is_better: bool = False
    #: Evaluations without a better one after which the run ends; None: it goes to its end.
    patience: int | None = None
    #: Parts of the model whose gradients' norms the journal has as well, before clipping.
    grad_norm_groups: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``signal`` is None when it is finished, else what stopped it.

    late_signal: a signal that came when there was nothing left to stop. replan: why the loop ended before
    its last step without a signal.
    """

    state: TrainingState
    signal: int | None
    late_signal: int | None = None
    revised_schedule: RevisedSchedule | None = None


class _Clock:
    """The time of training, evaluation and checkpoints left out."""

    def __init__(self, before: float) -> None:
        self.total = before
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Add the time since the last lap, and return it."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.total += seconds
        return seconds

    def skip(self) -> None:
        """Leave out the time since the last lap."""
        self._began = time.perf_counter()


def train(
    objective: Objective,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    machine: Machine,
    options: LoopOptions,
    run: Path,
    progress: Progress,
    budget: TimeBudget | None = None,
) -> Outcome:
    """Train from the last checkpoint of ``run``, or from the start, to the end of the plan.

    On SIGTERM or Ctrl-C, and where ``budget`` has a new plan, it finishes the step, saves a
    checkpoint and returns.
    """
    checkpoint.remove_partial_checkpoints(run)
    is_finished = partial(_is_finished, options)
    state = checkpoint.resume(run, model, optimizer, progress, is_finished)
    if state.step:
        progress.log(f"going on from step {state.step} of {options.steps}")
    journal = MetricsLog(run, state.step)
    progress.start("training", options.steps, "steps")
    progress.advance(state.step)
    loop = _Loop(
        objective, model, optimizer, machine, options, run, state, journal, progress, budget
    )
    try:
        with DeferredSignals() as stopper:
            loop.run_until(stopper)
    finally:
        progress.finish()
        journal.close()
        trim_memory()
    if loop.state.step < options.steps:
        replan = loop.replan if stopper.received is None else None
        return Outcome(loop.state, stopper.received, revised_schedule=replan)
    return Outcome(loop.state, None, stopper.received)


def _is_finished(plan: LoopOptions, state: TrainingState) -> bool:
    """Tell whether all steps are done, or evaluations have not become better for too long."""
    steps_since_best = 0 if state.best_step is None else state.step - state.best_step
    out_of_patience = (
        plan.patience is not None and steps_since_best >= plan.patience * plan.eval_every
    )
    return out_of_patience or state.step >= plan.steps


class _Loop:
    """Steps one after another, with what belongs between two of them."""

    def __init__(
        self,
        work: Objective,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        machine: Machine,
        plan: LoopOptions,
        run: Path,
        state: TrainingState,
        journal: MetricsLog,
        progress: Progress,
        budget: TimeBudget | None,
    ) -> None:
        self.state = state
        self.replan: RevisedSchedule | None = None
        self._budget = budget
        self._work, self._model, self._optimizer, self._machine = work, model, optimizer, machine
        self._plan, self._run, self._journal, self._progress = plan, run, journal, progress
        self._ceiling = plan.measure_peak_macs()
        self._saved = state.step
        self._shown: dict[str, str] = {}

    def run_until(self, stopper: DeferredSignals) -> None:
        """Go to the end of the plan, or until a signal asks to stop; what was learnt is saved."""
        clock = _Clock(self.state.seconds)
        batches = self._work.iter_batches(self.state.step)
        self._model.train()
        if self._budget is not None:
            self._budget.start(self.state.seconds)
        while not (self.replan or stopper.received or _is_finished(self._plan, self.state)):
            self._step(next(batches), clock)
            if self._evaluate() or self._due(self._plan.checkpoint_every):
                self._save()
            clock.skip()
            if self._budget is not None:
                self.replan = self._budget.revise(self.state.step, self._plan.steps)
        if self._saved < self.state.step:
            # A signal may come at any moment of a step, so it is here that what it stopped is
            # saved.
            self._save()

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self._plan.steps

    def _step(self, whole: list[Any], clock: _Clock) -> None:
        """Take a step, and tell of it."""
        plan, work, step = self._plan, self._work, self.state.step
        rate = plan.lr_at_step(step)
        told = (step + 1) % plan.log_every == 0 or step in (0, plan.steps - 1)
        result = take_step(
            work.compute_losses, whole, self._model, self._optimizer, self._machine,
            step=step, seed=plan.seed, lr=rate, max_grad_norm=plan.max_grad_norm, describe_batch=work.describe_batch,
            grad_norm_groups=plan.grad_norm_groups if told else None,
        )  # fmt: skip
        seconds = clock.lap()
        if self._budget is not None:
            self._budget.add_step(seconds)
        self.state = replace(self.state, step=step + 1, seconds=clock.total)
        speed = work.count_tokens(whole) / seconds
        share = work.count_macs(whole) / seconds / self._ceiling
        if told:
            line: dict[str, Any] = {"step": step + 1, "kind": "train", "loss": result.loss}
            line |= result.losses
            line |= {"lr": rate, "grad_norm": result.grad_norm, "seconds": round(clock.total, 3)}
            line |= {"gradients": result.grad_norms} if plan.grad_norm_groups else {}
            self._journal.write(line | {"tokens_per_second": round(speed), "mfu": share})
        self._progress.advance(
            1, loss=f"{result.loss:.3f}", **self._shown,
            **{"tokens/s": f"{speed:,.0f}", "of ceiling": f"{share:.0%}"},
        )  # fmt: skip

    def _evaluate(self) -> bool:
        """Evaluate if it is time to, and tell whether it is the best so far."""
        if not self._due(self._plan.eval_every):
            return False
        self._model.eval()
        figures = self._work.evaluate()
        self._model.train()
        # Measured again now and then: on a shared machine the first time may have been bad.
        self._ceiling = max(self._ceiling, self._plan.measure_peak_macs())
        self._journal.write({"step": self.state.step, "kind": "heldout", **figures})
        found = figures[self._plan.selection_metric]
        self._shown = {"held-out": f"{found:.3f}"}
        if math.isnan(found):  # A correlation with a constant: no evaluation to remember.
            return False
        if self._plan.higher_is_better:
            found = -found
        if self.state.best_loss is not None and found >= self.state.best_loss:
            return False
        self.state = replace(self.state, best_step=self.state.step, best_loss=found)
        return True

    def _save(self) -> None:
        self._journal.sync()
        checkpoint.save(
            self._run, self.state, self._model, self._optimizer, self._plan.keep_checkpoints
        )
        self._saved = self.state.step
