"""The training loop: steps, accumulation, checkpoints, and a clean way out at any moment.

It never knows what is trained: that is a ``Work``, pre-training or a task.
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

from bertsmith.model.ops.dropout import Noise
from bertsmith.progress import Progress
from bertsmith.runtime.device import Machine, give_back_freed_memory
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.budget import Replan, TimeBudget
from bertsmith.train.engine.checkpoint import State
from bertsmith.train.engine.metrics_log import Journal
from bertsmith.train.engine.signals import Stopper
from bertsmith.train.engine.step import take_step


class Work(Protocol):
    """What the loop trains."""

    def pieces(self, first_step: int) -> Iterator[list[Any]]:
        """Yield for each step from ``first_step`` on the pieces of its batch."""

    def losses(self, piece: Any, whole: list[Any], noise: Noise) -> dict[str, Tensor]:
        """Return named terms, float32 []: sums over ``piece`` divided by the counts of ``whole``.

        Their sum over names and pieces is the loss of the step.
        """

    def whereabouts(self, step: int) -> str:
        """Say for people which examples the batch of ``step`` (from 0) holds."""

    def tokens(self, whole: list[Any]) -> int:
        """Count the tokens of a batch."""

    def products(self, whole: list[Any]) -> float:
        """Count the multiply-adds of forward and backward pass for a batch."""

    def evaluate(self) -> dict[str, float]:
        """Return the held-out figures."""


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know besides the work. ``rate`` gives the learning rate of a step."""

    steps: int
    seed: int
    clip: float
    rate: Callable[[int], float]
    log_every: int
    eval_every: int
    checkpoint_every: int
    keep: int
    #: The held-out figure by which the best checkpoint is chosen, and whether more is better.
    best_by: str
    #: Measures the machine's matrix product, in multiply-adds a second.
    ceiling: Callable[[], float]
    more_is_better: bool = False
    #: Evaluations without a better one after which the run ends; None: it goes to its end.
    patience: int | None = None
    #: Parts of the model whose gradients' norms the journal has as well, before clipping.
    watch: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``signal`` is None when it is finished, else what stopped it.

    late: a signal that came when there was nothing left to stop. replan: why the loop ended before
    its last step without a signal.
    """

    state: State
    signal: int | None
    late: int | None = None
    replan: Replan | None = None


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
    work: Work,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    machine: Machine,
    plan: Plan,
    run: Path,
    progress: Progress,
    budget: TimeBudget | None = None,
) -> Outcome:
    """Train from the last checkpoint of ``run``, or from the start, to the end of the plan.

    On SIGTERM or Ctrl-C, and where ``budget`` has a new plan, it finishes the step, saves a
    checkpoint and returns.
    """
    checkpoint.sweep(run)
    is_finished = partial(_is_finished, plan)
    state = checkpoint.resume(run, model, optimizer, progress, is_finished)
    if state.step:
        progress.note(f"going on from step {state.step} of {plan.steps}")
    journal = Journal(run, state.step)
    progress.start("training", plan.steps, "steps")
    progress.advance(state.step)
    loop = _Loop(work, model, optimizer, machine, plan, run, state, journal, progress, budget)
    try:
        with Stopper() as stopper:
            loop.run_until(stopper)
    finally:
        progress.finish()
        journal.close()
        give_back_freed_memory()
    if loop.state.step < plan.steps:
        replan = loop.replan if stopper.signal is None else None
        return Outcome(loop.state, stopper.signal, replan=replan)
    return Outcome(loop.state, None, stopper.signal)


def _is_finished(plan: Plan, state: State) -> bool:
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
        work: Work,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        machine: Machine,
        plan: Plan,
        run: Path,
        state: State,
        journal: Journal,
        progress: Progress,
        budget: TimeBudget | None,
    ) -> None:
        self.state = state
        self.replan: Replan | None = None
        self._budget = budget
        self._work, self._model, self._optimizer, self._machine = work, model, optimizer, machine
        self._plan, self._run, self._journal, self._progress = plan, run, journal, progress
        self._ceiling = plan.ceiling()
        self._saved = state.step
        self._shown: dict[str, str] = {}

    def run_until(self, stopper: Stopper) -> None:
        """Go to the end of the plan, or until a signal asks to stop; what was learnt is saved."""
        clock = _Clock(self.state.seconds)
        batches = self._work.pieces(self.state.step)
        self._model.train()
        if self._budget is not None:
            self._budget.start(self.state.seconds)
        while not (self.replan or stopper.signal or _is_finished(self._plan, self.state)):
            self._step(next(batches), clock)
            if self._evaluate() or self._due(self._plan.checkpoint_every):
                self._save()
            clock.skip()
            if self._budget is not None:
                self.replan = self._budget.replan(self.state.step, self._plan.steps)
        if self._saved < self.state.step:
            # A signal may come at any moment of a step, so it is here that what it stopped is
            # saved.
            self._save()

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self._plan.steps

    def _step(self, whole: list[Any], clock: _Clock) -> None:
        """Take a step, and tell of it."""
        plan, work, step = self._plan, self._work, self.state.step
        rate = plan.rate(step)
        told = (step + 1) % plan.log_every == 0 or step in (0, plan.steps - 1)
        result = take_step(
            work.losses, whole, self._model, self._optimizer, self._machine,
            step=step, seed=plan.seed, rate=rate, clip=plan.clip, whereabouts=work.whereabouts,
            watch=plan.watch if told else None,
        )  # fmt: skip
        seconds = clock.lap()
        if self._budget is not None:
            self._budget.add(seconds)
        self.state = replace(self.state, step=step + 1, seconds=clock.total)
        speed = work.tokens(whole) / seconds
        share = work.products(whole) / seconds / self._ceiling
        if told:
            line: dict[str, Any] = {"step": step + 1, "kind": "train", "loss": result.loss}
            line |= result.terms
            line |= {"lr": rate, "grad_norm": result.grad_norm, "seconds": round(clock.total, 3)}
            line |= {"gradients": result.gradients} if plan.watch else {}
            self._journal.write(line | {"tokens_per_second": round(speed), "ceiling_share": share})
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
        self._ceiling = max(self._ceiling, self._plan.ceiling())
        self._journal.write({"step": self.state.step, "kind": "heldout", **figures})
        found = figures[self._plan.best_by]
        self._shown = {"held-out": f"{found:.3f}"}
        if math.isnan(found):  # A correlation with a constant: no evaluation to remember.
            return False
        if self._plan.more_is_better:
            found = -found
        if self.state.best_loss is not None and found >= self.state.best_loss:
            return False
        self.state = replace(self.state, best_step=self.state.step, best_loss=found)
        return True

    def _save(self) -> None:
        self._journal.sync()
        checkpoint.save(self._run, self.state, self._model, self._optimizer, self._plan.keep)
        self._saved = self.state.step
