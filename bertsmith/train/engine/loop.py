"""The training loop: optimizer steps, evaluations, checkpoints and safe interruption."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.progress import Progress
from bertsmith.runtime.device import Machine, trim_memory
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.averaging import WeightAverage
from bertsmith.train.engine.budget import RevisedSchedule, TimeBudget
from bertsmith.train.engine.checkpoint import TrainingState
from bertsmith.train.engine.metrics_log import MetricsLog
from bertsmith.train.engine.optimizer import Optimizer
from bertsmith.train.engine.signals import DeferredSignals
from bertsmith.train.engine.step import take_step


class Objective(Protocol):
    """The data and losses of a training task.

    The batch of a step is a list of micro-batches. Their type differs between objectives.
    """

    def iter_batches(self, first_step: int) -> Iterator[list[Any]]:
        """Yield the list of micro-batches of each step, starting at ``first_step``."""

    def compute_losses(
        self, micro_batch: Any, micro_batches: list[Any], dropout_seed: DropoutSeed
    ) -> dict[str, Tensor]:
        """Return the named losses of a micro-batch, float32 [].

        Each is the sum over ``micro_batch``, divided by the number of targets in all
        ``micro_batches``. The loss of a step is therefore the sum over all names and micro-batches.
        """

    def describe_batch(self, step: int) -> str:
        """Return the examples in the batch of ``step`` (from 0) as text, for error messages."""

    def count_tokens(self, micro_batches: list[Any]) -> int:
        """Return the number of tokens in a batch."""

    def count_macs(self, micro_batches: list[Any]) -> float:
        """Return the number of multiply-accumulates of a step: forward and backward pass."""

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the held-out data."""


@dataclass(frozen=True)
class LoopOptions:
    """Options of the training loop.

    Attributes:
        steps: Total number of steps.
        seed: Seed of the dropout masks.
        max_grad_norm: Gradients are clipped to this global norm.
        lr_at_step: Returns the learning rate of a step, numbered from 0.
        log_every: Steps between two training lines of the metrics log.
        eval_every: Steps between two evaluations.
        checkpoint_every: Steps between two checkpoints.
        keep_checkpoints: Number of recent checkpoints to keep.
        selection_metric: The held-out metric that selects the best checkpoint.
        measure_peak_macs_per_second: Measures the machine's peak matrix-multiply throughput, in
            multiply-accumulates per second.
        higher_is_better: Whether a higher selection metric is better.
        patience: Training ends after this many evaluations without improvement; None: no early
            stopping.
        grad_norm_groups: Named parameter groups. The norms of their gradients before clipping are
            logged.
        use_tensorboard: Whether to write the metrics as TensorBoard event files, too.
        average_fraction: Fraction of the completed steps over which the weights are averaged for
            evaluations and at the end; 0: no averaging.
    """

    steps: int
    seed: int
    max_grad_norm: float
    lr_at_step: Callable[[int], float]
    log_every: int
    eval_every: int
    checkpoint_every: int
    keep_checkpoints: int
    selection_metric: str
    measure_peak_macs_per_second: Callable[[], float]
    higher_is_better: bool = False
    patience: int | None = None
    grad_norm_groups: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)
    use_tensorboard: bool = False
    average_fraction: float = 0.0


@dataclass(frozen=True)
class TrainingOutcome:
    """How training ended.

    Attributes:
        state: State after the last step.
        signal: Number of the signal that stopped training; None if no signal stopped it.
        late_signal: Number of a signal that arrived during the last step, which changes nothing.
        revised_schedule: The new schedule if training stopped to change the number of steps.
    """

    state: TrainingState
    signal: int | None
    late_signal: int | None = None
    revised_schedule: RevisedSchedule | None = None


class _Stopwatch:
    """Measures the training time, without the time of evaluations and checkpoints."""

    def __init__(self, previous_seconds: float) -> None:
        self.total_seconds = previous_seconds
        self._lap_start = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, after adding them to the total."""
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        self.total_seconds += seconds
        return seconds

    def skip(self) -> None:
        """Start a new lap without adding the current one to the total."""
        self._lap_start = time.perf_counter()


def train(
    objective: Objective,
    model: nn.Module,
    optimizer: Optimizer,
    machine: Machine,
    options: LoopOptions,
    run: Path,
    progress: Progress,
    budget: TimeBudget | None = None,
) -> TrainingOutcome:
    """Train from the last checkpoint of ``run``, or from the start, for ``options.steps`` steps.

    On SIGTERM or Ctrl-C, or if ``budget`` revises the number of steps, the function finishes the
    current step, saves a checkpoint and returns. When training is finished, the model has the
    averaged weights if ``options.average_fraction`` is set.
    """
    checkpoint.remove_partial_checkpoints(run)
    is_finished = partial(_is_finished, options)
    average = None
    if options.average_fraction:
        average = WeightAverage(model, options.average_fraction)
    state = checkpoint.resume(run, model, optimizer, progress, is_finished, average)
    if state.step:
        progress.log(f"resuming from step {state.step} of {options.steps}")
    metrics_log = MetricsLog(run, state.step, use_tensorboard=options.use_tensorboard)
    progress.start("training", options.steps, "steps")
    progress.advance(state.step)
    loop = _Loop(
        objective, model, optimizer, average, machine, options, run, state, metrics_log, progress,
        budget,
    )  # fmt: skip
    try:
        with DeferredSignals() as signals:
            loop.run_until(signals)
    finally:
        progress.finish()
        metrics_log.close()
        trim_memory()
    if average is not None and is_finished(loop.state):
        average.copy_to_model()
    if loop.state.step < options.steps:
        revised_schedule = loop.revised_schedule if signals.received is None else None
        return TrainingOutcome(loop.state, signals.received, revised_schedule=revised_schedule)
    return TrainingOutcome(loop.state, None, signals.received)


def _is_finished(options: LoopOptions, state: TrainingState) -> bool:
    """Return whether all steps are completed or early stopping applies."""
    if state.step >= options.steps:
        return True
    if options.patience is None or state.best_step is None:
        return False
    return state.step - state.best_step >= options.patience * options.eval_every


class _Loop:
    """The state of a running training loop."""

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        optimizer: Optimizer,
        average: WeightAverage | None,
        machine: Machine,
        options: LoopOptions,
        run: Path,
        state: TrainingState,
        metrics_log: MetricsLog,
        progress: Progress,
        budget: TimeBudget | None,
    ) -> None:
        self.state = state
        self.revised_schedule: RevisedSchedule | None = None
        self._budget = budget
        self._objective, self._model, self._optimizer = objective, model, optimizer
        self._average = average
        self._machine, self._options, self._run = machine, options, run
        self._metrics_log, self._progress = metrics_log, progress
        self._peak_macs_per_second = options.measure_peak_macs_per_second()
        self._saved_step = state.step
        self._progress_fields: dict[str, str] = {}

    def run_until(self, signals: DeferredSignals) -> None:
        """Train until training is finished or a signal arrives, and save the last step."""
        stopwatch = _Stopwatch(self.state.seconds)
        batches = self._objective.iter_batches(self.state.step)
        self._model.train()
        if self._budget is not None:
            self._budget.start(self.state.seconds)
        while not (
            self.revised_schedule or signals.received or _is_finished(self._options, self.state)
        ):
            self._take_step(next(batches), stopwatch)
            if self._evaluate_if_due() or self._is_due(self._options.checkpoint_every):
                self._save_checkpoint()
            stopwatch.skip()
            if self._budget is not None:
                self.revised_schedule = self._budget.revise(self.state.step, self._options.steps)
        # A signal or a revision can end the loop at any step, which may not have been saved.
        if self._saved_step < self.state.step:
            self._save_checkpoint()

    def _is_due(self, interval: int) -> bool:
        """Return whether the current step is a multiple of ``interval``, or the last step."""
        return self.state.step % interval == 0 or self.state.step == self._options.steps

    def _take_step(self, micro_batches: list[Any], stopwatch: _Stopwatch) -> None:
        """Take one optimizer step, and write its metrics to the log if a log line is due."""
        options, objective, step = self._options, self._objective, self.state.step
        lr = options.lr_at_step(step)
        should_log = (step + 1) % options.log_every == 0 or step in (0, options.steps - 1)
        result = take_step(
            objective.compute_losses, micro_batches, self._model, self._optimizer, self._machine,
            step=step, seed=options.seed, lr=lr, max_grad_norm=options.max_grad_norm,
            describe_batch=objective.describe_batch,
            grad_norm_groups=options.grad_norm_groups if should_log else None,
        )  # fmt: skip
        if self._average is not None:
            self._average.update(step + 1)
        seconds = stopwatch.lap()
        if self._budget is not None:
            self._budget.add_step(seconds)
        self.state = replace(self.state, step=step + 1, seconds=stopwatch.total_seconds)
        tokens_per_second = objective.count_tokens(micro_batches) / seconds
        mfu = objective.count_macs(micro_batches) / seconds / self._peak_macs_per_second
        if should_log:
            line: dict[str, Any] = {"step": step + 1, "kind": "train", "loss": result.loss}
            line |= result.losses
            line |= {"lr": lr, "grad_norm": result.grad_norm}
            line |= {"seconds": round(stopwatch.total_seconds, 3)}
            if options.grad_norm_groups:
                line["grad_norms"] = result.grad_norms
            line |= {"tokens_per_second": round(tokens_per_second), "mfu": mfu}
            self._metrics_log.write(line)
        self._progress.advance(
            1, loss=f"{result.loss:.3f}", **self._progress_fields,
            **{"tokens/s": f"{tokens_per_second:,.0f}", "at": f"{mfu:.0%} of peak matmul speed"},
        )  # fmt: skip

    def _evaluate_if_due(self) -> bool:
        """Evaluate if an evaluation is due; return whether it is the best evaluation so far."""
        if not self._is_due(self._options.eval_every):
            return False
        self._model.eval()
        with nullcontext() if self._average is None else self._average.applied():
            metrics = self._objective.evaluate()
        self._model.train()
        # The maximum of several measurements, because other processes can slow down some of them.
        self._peak_macs_per_second = max(
            self._peak_macs_per_second, self._options.measure_peak_macs_per_second()
        )
        self._metrics_log.write({"step": self.state.step, "kind": "heldout", **metrics})
        score = metrics[self._options.selection_metric]
        self._progress_fields = {"held-out": f"{score:.3f}"}
        if math.isnan(score):  # For example the correlation with a constant is NaN.
            return False
        if self._options.higher_is_better:
            score = -score
        if self.state.best_loss is not None and score >= self.state.best_loss:
            return False
        self.state = replace(self.state, best_step=self.state.step, best_loss=score)
        return True

    def _save_checkpoint(self) -> None:
        """Write a checkpoint, after the metrics log up to its step."""
        self._metrics_log.sync()
        checkpoint.save(
            self._run, self.state, self._model, self._optimizer, self._options.keep_checkpoints,
            self._average,
        )  # fmt: skip
        self._saved_step = self.state.step
