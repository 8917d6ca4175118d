"""The training loop: optimizer steps, evaluations, checkpoints and safe interruption."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from bertsmith.train.engine.averaging import WeightAverage
from bertsmith.train.engine.checkpoint import TrainingState
from bertsmith.train.engine.checkpoint_writer import CheckpointWriter
from bertsmith.train.engine.duration import Duration
from bertsmith.train.engine.metrics_log import MetricsLog
from bertsmith.train.engine.optimizer import Optimizer, can_skip_step
from bertsmith.train.engine.signals import DeferredSignals
from bertsmith.train.engine.step import StartedStep, take_step
from bertsmith.train.engine.stopwatch import Stopwatch

_CPU = torch.device("cpu")

#: Seconds of training on the CPU after which freed memory is returned to the OS.
TRIM_INTERVAL_SECONDS = 60.0
#: Minimum seconds between two measurements of the peak matrix-multiply speed.
PEAK_INTERVAL_SECONDS = 30.0


class Objective(Protocol):
    """The data and losses of a training task.

    The batch of a step is a list of micro-batches. Their type differs between objectives.
    """

    @property
    def data_state(self) -> Mapping[str, int] | None:
        """Position in the data after the last batch; None if it is a function of the step."""

    def iter_batches(
        self, first_step: int, data_state: Mapping[str, int] | None = None
    ) -> Iterator[list[Any]]:
        """Yield the list of micro-batches of each step, starting at ``first_step``.

        ``data_state`` is the position of the checkpoint of this step, if it has one.
        """

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
        duration: Length of the run.
        seed: Seed of the dropout masks.
        max_grad_norm: Gradients are clipped to this global norm.
        lr_at_step: Returns the learning rate of a step, numbered from 0.
        log_every: Steps between two training lines of the metrics log.
        eval_every: Steps between two evaluations; None: about 20 evaluations in the run.
        checkpoint_every: Steps between two checkpoints; None: about 20 checkpoints in the run.
        keep_checkpoints: Number of recent checkpoints to keep.
        has_asynchronous_checkpoints: Whether a thread writes checkpoints while training continues.
        selection_metric: The held-out metric that selects the best checkpoint.
        measure_peak_macs_per_second: Measures the machine's peak matrix-multiply throughput, in
            multiply-accumulates per second.
        higher_is_better: Whether a higher selection metric is better.
        patience: Training ends after this many evaluations without improvement, which requires
            ``eval_every``; None: no early stopping.
        grad_norm_groups: Named parameter groups. The norms of their gradients before clipping are
            logged.
        use_tensorboard: Whether to also write the metrics as TensorBoard event files.
        average_fraction: Fraction of the completed steps over which the weights are averaged for
            evaluations and at the end; 0: no averaging.
        evaluates_start: Whether to evaluate before the first step, too. This is logged as step 0,
            and does not select the best checkpoint.
    """

    duration: Duration
    seed: int
    max_grad_norm: float
    lr_at_step: Callable[[int], float]
    log_every: int
    eval_every: int | None
    checkpoint_every: int | None
    keep_checkpoints: int
    selection_metric: str
    measure_peak_macs_per_second: Callable[[], float]
    higher_is_better: bool = False
    patience: int | None = None
    grad_norm_groups: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)
    use_tensorboard: bool = False
    average_fraction: float = 0.0
    has_asynchronous_checkpoints: bool = False
    evaluates_start: bool = False


@dataclass(frozen=True)
class TrainingOutcome:
    """How training ended.

    Attributes:
        state: State after the last step.
        signal: Number of the signal that stopped training; None if no signal stopped it.
        late_signal: Number of a signal that arrived during the last step, which changes nothing.
    """

    state: TrainingState
    signal: int | None
    late_signal: int | None = None


def train(
    objective: Objective,
    model: nn.Module,
    optimizer: Optimizer,
    machine: Machine,
    options: LoopOptions,
    run: Path,
    progress: Progress,
) -> TrainingOutcome:
    """Train from the last checkpoint of ``run``, or from the start, until the run is finished.

    On SIGTERM, SIGHUP or Ctrl-C, the function finishes the current step, saves a checkpoint and
    returns. When training is finished, the model has the averaged weights if
    ``options.average_fraction`` is set.

    With several processes, only the main process uses the directory ``run``. A signal to any of
    them stops all.
    """
    processes = machine.processes
    duration = options.duration
    is_finished = partial(_is_finished, options)
    average = None
    if options.average_fraction:
        average = WeightAverage(model, options.average_fraction)
    state = TrainingState()
    metrics_log = None
    if processes.is_main:
        checkpoint.remove_partial_files(run)
        state = checkpoint.resume(run, model, optimizer, progress, is_finished, average)
        metrics_log = MetricsLog(run, state.step, use_tensorboard=options.use_tensorboard)
    state = checkpoint.broadcast(state, model, optimizer, average, processes)
    if state.step:
        _log_resumed_step(run, state.step, progress, options, is_finished=is_finished(state))
    duration.start(
        state.step,
        state.seconds,
        state.elapsed_seconds or 0.0,
        state.start_seconds if state.step else None,
        state.remaining_seconds,
    )
    state = replace(state, start_seconds=duration.start_seconds)
    if duration.total_steps is None:
        progress.start("training", duration.remaining_seconds, "seconds")
    else:
        progress.start("training", duration.total_steps, "steps", state.step)
    writer = CheckpointWriter(
        run, options.keep_checkpoints, is_asynchronous=options.has_asynchronous_checkpoints
    )
    loop = _Loop(
        objective, model, optimizer, average, machine, options, state, metrics_log, writer, progress
    )
    try:
        with DeferredSignals(ignore_repeated=processes.world_size > 1) as signals, writer:
            loop.run_until(signals)
    finally:
        progress.finish()
        if metrics_log is not None:
            metrics_log.close()
        trim_memory()
    if not loop.is_finished():
        return TrainingOutcome(loop.state, loop.signal)
    if average is not None:
        average.copy_to_model()
    return TrainingOutcome(loop.state, None, signals.received)


def _log_resumed_step(
    run: Path, step: int, progress: Progress, options: LoopOptions, *, is_finished: bool
) -> None:
    """Log from which step a run continues, or that it is already finished."""
    total_steps = options.duration.total_steps
    if is_finished and total_steps is not None:
        progress.log(
            f"{run}: this run is already finished (step {step} of {total_steps}); give --out "
            "another directory to start a new one"
        )
        return
    total = "" if total_steps is None else f" of {total_steps}"
    progress.log(f"resuming from step {step}{total}")


def _is_finished(options: LoopOptions, state: TrainingState) -> bool:
    """Return whether the run has its full length or early stopping ends it."""
    return options.duration.is_finished(state.step) or _is_out_of_patience(options, state)


def _is_out_of_patience(options: LoopOptions, state: TrainingState) -> bool:
    """Return whether early stopping ends the run now."""
    if options.patience is None or options.eval_every is None or state.best_step is None:
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
        state: TrainingState,
        metrics_log: MetricsLog | None,
        writer: CheckpointWriter,
        progress: Progress,
    ) -> None:
        self.state = state
        self.signal: int | None = None
        self._has_ended = _is_finished(options, state)
        self._duration = options.duration
        self._objective = objective
        self._loss_fn = machine.processes.synchronize_gradients(objective.compute_losses, model)
        self._model = model
        self._optimizer = optimizer
        self._average = average
        self._machine = machine
        self._options = options
        self._metrics_log = metrics_log
        self._writer = writer
        self._progress = progress
        self._peak_macs_per_second = 0.0
        self._peak_time = -math.inf
        self._measure_peak_if_due()
        self._saved_step = state.step
        self._stopwatch = Stopwatch(state.seconds)
        #: Seconds of training after which freed memory was last returned to the OS.
        self._trim_seconds = state.seconds
        self._signals = DeferredSignals()
        #: The last step, if its result has not been read yet.
        self._started_step: StartedStep | None = None
        self._displayed_seconds = options.duration.elapsed_seconds or 0.0
        self._progress_fields: dict[str, str] = {}

    def is_finished(self) -> bool:
        """Return whether the run has its full length or early stopping ends it."""
        return self._has_ended or _is_out_of_patience(self._options, self.state)

    def _measure_peak_if_due(self) -> None:
        """Measure the peak of all processes, as if each had the peak of this one."""
        if time.perf_counter() - self._peak_time >= PEAK_INTERVAL_SECONDS:
            processes = self._machine.processes
            peak = processes.world_size * self._options.measure_peak_macs_per_second()
            # The maximum, because other programs can slow down some of the measurements.
            self._peak_macs_per_second = max(self._peak_macs_per_second, peak)
            self._peak_time = time.perf_counter()

    def _poll_signals(self, signals: DeferredSignals) -> bool:
        """Record a signal that any process has received; return whether there is one."""
        # On the CPU, because a GPU would first have to finish the current step.
        (number,) = self._machine.processes.max([signals.received or 0], _CPU)
        self.signal = number or None
        return self.signal is not None

    def run_until(self, signals: DeferredSignals) -> None:
        """Train until training is finished or a signal arrives, and save the last step."""
        self._signals = signals
        batches = self._objective.iter_batches(self.state.step, self.state.data_state)
        self._model.train()
        if self._options.evaluates_start and self.state.step == 0 and not self._is_evaluated():
            self._log_evaluation()
        while not (self._poll_signals(signals) or self.is_finished()):
            self._duration.begin_step(self.state.step)
            self._take_step(next(batches))
            self._trim_memory_if_due()
            self._record_written_checkpoint()
            is_best = self._evaluate_if_due()
            if self._has_ended or self._duration.is_checkpoint_due(
                self.state.step, self._options.checkpoint_every, is_best=is_best
            ):
                self._save_checkpoint()
        # On a GPU, a signal leaves the result of the last step unread.
        self._finish_started_step()
        if self._has_ended and not self._is_evaluated():
            # The time budget was used up before the first step of this process, or the user has
            # removed the metrics log.
            self._evaluate()
        # A signal can end the loop at any step, which may not have been saved.
        if self._saved_step < self.state.step:
            self._save_checkpoint()

    def _trim_memory_if_due(self) -> None:
        """Return freed memory to the OS once a minute of training on the CPU.

        The sizes of the tensors differ from batch to batch. After thousands of steps the free
        memory between them would be several times the memory in use.
        """
        is_due = self.state.seconds - self._trim_seconds >= TRIM_INTERVAL_SECONDS
        if is_due and self._machine.device.type == "cpu":
            trim_memory()
            self._trim_seconds = self.state.seconds

    def _is_evaluated(self) -> bool:
        """Return whether the metrics log has an evaluation of the last step."""
        log = self._metrics_log
        return self._machine.processes.run_on_main(
            lambda: log is not None and log.last_heldout_step >= self.state.step
        )

    def _take_step(self, micro_batches: list[Any]) -> None:
        """Start one optimizer step, and log the metrics of the finished ones."""
        options = self._options
        objective = self._objective
        step = self.state.step
        duration = options.duration
        lr = options.lr_at_step(step)
        should_log = (
            step == 0 or (step + 1) % options.log_every == 0 or step + 1 == duration.total_steps
        )
        describe_batch: Callable[[int], str] = objective.describe_batch
        if objective.data_state is not None:
            # The objective describes the last batch, but a GPU's result is read after the next one.
            describe_batch = {step: describe_batch(step)}.__getitem__
        previous = self._started_step
        pending = take_step(
            self._loss_fn,
            micro_batches,
            self._model,
            self._optimizer,
            self._machine,
            step=step,
            seed=options.seed,
            lr=lr,
            max_grad_norm=options.max_grad_norm,
            describe_batch=describe_batch,
            grad_norm_groups=options.grad_norm_groups if should_log else None,
            previous=previous.pending if previous else None,
        )
        if self._average is not None:
            self._average.update(step + 1)
        self._finish_started_step()
        self._started_step = StartedStep(
            pending,
            step=step,
            lr=lr,
            should_log=should_log,
            num_tokens=objective.count_tokens(micro_batches),
            num_macs=objective.count_macs(micro_batches),
        )
        self.state = replace(self.state, step=step + 1, data_state=objective.data_state)
        is_pending = can_skip_step(self._machine.device)
        if is_pending:
            self._has_ended = duration.is_finished(step + 1)
        if self._has_ended or not is_pending:
            self._finish_started_step()

    def _finish_started_step(self) -> None:
        """Wait for the last started step, log its metrics if a line is due, and show progress."""
        started, self._started_step = self._started_step, None
        if started is None:
            return
        result = started.pending.read()
        seconds = self._stopwatch.lap()
        self._duration.record_step(seconds, started.num_macs)
        self.state = replace(self.state, seconds=self._stopwatch.total_seconds)
        self._has_ended = self._duration.is_finished(self.state.step)
        tokens_per_second = started.num_tokens / seconds
        macs_per_second = started.num_macs / seconds
        # A step that is faster than the peak shows that other processes slowed its measurement.
        self._peak_macs_per_second = max(self._peak_macs_per_second, macs_per_second)
        mfu = macs_per_second / self._peak_macs_per_second
        if self._metrics_log is not None and (started.should_log or self._has_ended):
            line: dict[str, Any] = {"step": started.step + 1, "kind": "train", "loss": result.loss}
            line |= result.losses
            line |= {"lr": started.lr, "grad_norm": result.grad_norm}
            line |= {"seconds": round(self.state.seconds, 3), **self._format_elapsed()}
            if result.grad_norms:
                line["grad_norms"] = result.grad_norms
            line["tokens"] = started.num_tokens
            line |= {"tokens_per_second": round(tokens_per_second), "mfu": mfu}
            self._metrics_log.write(line)
        fields = {"loss": f"{result.loss:.3f}"} | self._progress_fields
        fields |= {"tokens/s": f"{tokens_per_second:,.0f}", "at": f"{mfu:.0%} of peak matmul speed"}
        with self._signals.allow_closed_terminal():
            self._update_progress(started.step + 1, fields)

    def _update_progress(self, num_steps: int, fields: dict[str, str]) -> None:
        """Advance the progress display by one step, or by the elapsed time with a time budget.

        Args:
            num_steps: Number of finished steps.
            fields: Texts to display.
        """
        if self._duration.total_steps is not None:
            self._progress.advance(1, **fields)
            return
        now = self._duration.elapsed_seconds or 0.0
        step = f"{num_steps:,}"
        self._progress.advance(now - self._displayed_seconds, step=step, **fields)
        self._displayed_seconds = now

    def _format_elapsed(self) -> dict[str, float]:
        """Return the wall-clock time of a run with a time budget, for the metrics log."""
        seconds = self._duration.elapsed_seconds
        return {} if seconds is None else {"elapsed_seconds": round(seconds, 3)}

    def _evaluate_if_due(self) -> bool:
        """Evaluate if an evaluation is due; return whether it is the best evaluation so far."""
        is_due = self._has_ended or self._duration.is_evaluation_due(
            self.state.step, self._options.eval_every
        )
        return self._evaluate() if is_due else False

    def _evaluate(self) -> bool:
        """Evaluate and log the metrics; return whether it is the best evaluation so far."""
        score = self._log_evaluation()
        if math.isnan(score):  # For example the correlation with a constant is NaN.
            return False
        if self._options.higher_is_better:
            score = -score
        if self.state.best_loss is not None and score >= self.state.best_loss:
            return False
        self.state = replace(self.state, best_step=self.state.step, best_loss=score)
        return True

    def _log_evaluation(self) -> float:
        """Evaluate and log the metrics; return the metric that selects the best checkpoint."""
        self._finish_started_step()
        start_time = time.perf_counter()
        self._model.eval()
        with nullcontext() if self._average is None else self._average.applied():
            metrics = self._objective.evaluate()
        # The metrics select the best step and end a run early. On GPUs, the same evaluation can
        # differ by rounding between processes.
        metrics = self._machine.processes.broadcast(metrics)
        self._model.train()
        self._measure_peak_if_due()
        self._duration.record_evaluation(time.perf_counter() - start_time)
        self._stopwatch.skip()
        metrics |= self._format_elapsed()
        if self._metrics_log is not None:
            self._metrics_log.write({"step": self.state.step, "kind": "heldout", **metrics})
        metric = self._options.selection_metric
        self._progress_fields = {f"held-out {metric.replace('_', ' ')}": f"{metrics[metric]:.3f}"}
        return metrics[metric]

    def _save_checkpoint(self) -> None:
        """Write a checkpoint, after the metrics log up to its step; only in the main process."""
        self._finish_started_step()
        self.state = replace(
            self.state,
            elapsed_seconds=self._duration.elapsed_seconds,
            remaining_seconds=self._duration.remaining_seconds,
        )
        self._duration.start_checkpoint()
        if self._metrics_log is not None:
            self._metrics_log.sync()
            self._writer.save(self.state, self._model, self._optimizer, self._average)
            self._record_written_checkpoint()
        self._saved_step = self.state.step
        self._stopwatch.skip()

    def _record_written_checkpoint(self) -> None:
        """Record the duration of a checkpoint that is now written; raise an error of its thread."""
        self._writer.check()
        seconds = self._writer.pop_seconds()
        if seconds is not None:
            self._duration.record_checkpoint(seconds)
