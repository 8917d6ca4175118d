"""How long a run lasts, in steps or in wall-clock time, and how much of it is completed.

The learning rate, the phases of the data, and the evaluations and checkpoints are functions of the
completed fraction of the run.
"""

from typing import Final, Protocol

from bertsmith.train.engine.run_clock import RunClock

#: Number of evaluations in a run if the user sets no interval.
DEFAULT_NUM_EVALUATIONS: Final = 20
#: Maximum fraction of a time budget for all evaluations, and for a single one. The end of a run is
#: as uncertain as the duration of its final evaluation.
EVALUATION_SHARE: Final = 0.1
SINGLE_EVALUATION_SHARE: Final = 0.025
#: The warm-up takes at most the run divided by this number.
_WARMUP_DIVISOR: Final = 10
#: Minimum fraction of a time budget between the first and the last step. A run whose start takes
#: longer than the rest of the budget exceeds the budget.
_MIN_TRAINING_SHARE: Final = 0.1
#: Interval of checkpoints in a run with a time budget: a twentieth of the budget, within these
#: limits in seconds. If the budget is short, the lower limit is a sixth of it.
_MIN_CHECKPOINT_SECONDS: Final = 30.0
_MIN_CHECKPOINT_DIVISOR: Final = 6
_MAX_CHECKPOINT_SECONDS: Final = 600.0
#: Maximum fraction of a time budget for checkpoints.
_CHECKPOINT_SHARE: Final = 0.05
#: Time of writing the model, as a fraction of the time of writing a checkpoint. A checkpoint is
#: three times as large as the model.
_MODEL_SHARE: Final = 0.5
#: Time from the end of the command to the end of its process, as a fraction of the time of drawing
#: the curve (measured on a busy machine).
_EXIT_SHARE: Final = 3.0
#: Weight of the newest step in the moving averages.
_STEP_WEIGHT: Final = 0.1


class Duration(Protocol):
    """Length of a run. Steps are numbered from 0."""

    total_steps: int | None
    """Number of steps; None if it is not known in advance."""

    @property
    def elapsed_seconds(self) -> float | None:
        """Wall-clock time of all processes of the run; None if it has no effect."""

    @property
    def start_seconds(self) -> float | None:
        """Value of ``elapsed_seconds`` at the first step of the run."""

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the last step ends; None if it has no effect."""

    def start(self, step: int, seconds: float, elapsed: float, start: float | None) -> None:
        """Start the first step of this process.

        Args:
            step: Number of the step; 0 in a new run.
            seconds: Time of the steps before it.
            elapsed: ``elapsed_seconds`` of the checkpoint.
            start: ``start_seconds`` of the checkpoint; None if no step is completed.
        """

    def compute_completed_fraction(self, step: int) -> float:
        """Return the fraction of the run that is completed before ``step``, from 0 to 1."""

    def is_in_first(self, step: int, fraction: float) -> bool:
        """Return whether ``step`` is in the first ``fraction`` of the run."""

    def is_in_last(self, step: int, fraction: float) -> bool:
        """Return whether ``step`` is in the last ``fraction`` of the run."""

    def compute_warmup_factor(self, step: int, max_steps: int) -> float | None:
        """Return the learning rate factor of a step in the warm-up; None after the warm-up.

        The warm-up takes at most ``max_steps`` steps, and at most a tenth of the run.
        """

    def is_finished(self, step: int) -> bool:
        """Return whether the run is finished when ``step`` steps are completed."""

    def is_evaluation_due(self, step: int, interval_steps: int | None) -> bool:
        """Return whether an evaluation is due after ``step`` steps, before the end of the run.

        Args:
            step: Completed steps.
            interval_steps: Steps between two evaluations; None: about 20 evaluations in the run.
        """

    def is_checkpoint_due(self, step: int, interval_steps: int | None, *, is_best: bool) -> bool:
        """Return whether a checkpoint is due after ``step`` steps, before the end of the run.

        Args:
            step: Completed steps.
            interval_steps: Steps between two checkpoints; None: the default interval.
            is_best: Whether the evaluation of this step is the best so far.
        """

    def record_step(self, seconds: float, num_macs: float) -> None:
        """Record the duration of a step and its number of multiply-accumulates."""

    def record_evaluation(self, seconds: float) -> None:
        """Record the duration of an evaluation that has just ended."""

    def record_checkpoint(self, seconds: float) -> None:
        """Record the duration of writing a checkpoint that has just been written."""


class StepDuration:
    """A run with a fixed number of steps. Its schedule is a pure function of the step."""

    elapsed_seconds = start_seconds = remaining_seconds = None

    def __init__(self, steps: int) -> None:
        """Create a duration of ``steps`` steps."""
        self.total_steps: int | None = steps
        self._steps = steps

    def start(self, step: int, seconds: float, elapsed: float, start: float | None) -> None:
        """Do nothing."""

    def compute_completed_fraction(self, step: int) -> float:
        """Return the fraction of the steps before ``step``."""
        return step / self._steps

    def is_in_first(self, step: int, fraction: float) -> bool:
        """Return whether ``step`` is in the first ``fraction`` of the steps."""
        return step < round(self._steps * fraction)

    def is_in_last(self, step: int, fraction: float) -> bool:
        """Return whether ``step`` is in the last ``fraction`` of the steps."""
        return step >= self._steps - round(self._steps * fraction)

    def compute_warmup_factor(self, step: int, max_steps: int) -> float | None:
        """Return (step + 1) / warm-up steps; None after the warm-up."""
        warmup_steps = min(max_steps, self._steps // _WARMUP_DIVISOR)
        return (step + 1) / warmup_steps if step < warmup_steps else None

    def is_finished(self, step: int) -> bool:
        """Return whether all steps are completed."""
        return step >= self._steps

    def is_evaluation_due(self, step: int, interval_steps: int | None) -> bool:
        """Return whether ``step`` is a multiple of the interval."""
        return step % (interval_steps or get_default_interval(self._steps)) == 0

    def is_checkpoint_due(self, step: int, interval_steps: int | None, *, is_best: bool) -> bool:
        """Return whether ``step`` is a multiple of the interval or the best one."""
        return is_best or step % (interval_steps or get_default_interval(self._steps)) == 0

    def record_step(self, seconds: float, num_macs: float) -> None:
        """Do nothing."""

    def record_evaluation(self, seconds: float) -> None:
        """Do nothing."""

    def record_checkpoint(self, seconds: float) -> None:
        """Do nothing."""


class _Load:
    """Moving averages of the duration of a step, and of a multiply-accumulate in the steps."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.mac_seconds: float | None = None
        self._is_warm = False

    def add_step(self, seconds: float, num_macs: float) -> None:
        """Add a step, unless it is the first one of the process, which is a warm-up."""
        if not self._is_warm:
            self._is_warm = True
            return
        if self.mac_seconds is None:
            self.step_seconds = seconds
            self.mac_seconds = seconds / num_macs
        self.step_seconds += _STEP_WEIGHT * (seconds - self.step_seconds)
        self.mac_seconds += _STEP_WEIGHT * (seconds / num_macs - self.mac_seconds)


class _Estimate:
    """Estimates the duration of an operation from its last one and the load of the machine.

    If multiply-accumulates take twice as long as at the last measurement, the operation is assumed
    to take twice as long, too.
    """

    def __init__(self, load: _Load, seconds: float) -> None:
        self._load = load
        self.record(seconds)

    def record(self, seconds: float) -> None:
        """Record a measured duration."""
        self._measured_seconds = seconds
        self._mac_seconds = self._load.mac_seconds

    @property
    def seconds(self) -> float:
        """The expected duration."""
        if self._mac_seconds is None:
            # The first measurement takes place before the first step.
            self._mac_seconds = self._load.mac_seconds
        if self._mac_seconds is None or self._load.mac_seconds is None:
            return self._measured_seconds
        return self._measured_seconds * self._load.mac_seconds / self._mac_seconds


class TimeDuration:
    """A run with a time budget.

    The budget covers everything from the start of the command to its end. Training ends early
    enough for the final evaluation, the last checkpoint, the model and the loss curve, whose
    durations are measured.
    """

    def __init__(
        self,
        seconds: float,
        clock: RunClock,
        *,
        step_seconds: float,
        evaluation_seconds: float,
        checkpoint_seconds: float,
        curve_seconds: float,
        min_steps: int = 1,
    ) -> None:
        """Create a duration.

        Args:
            seconds: The time budget.
            clock: Measures the time used by the run.
            step_seconds: Estimated time of a step.
            evaluation_seconds: Estimated time of an evaluation.
            checkpoint_seconds: Estimated time of writing a checkpoint.
            curve_seconds: Estimated time of drawing the loss curve.
            min_steps: Minimum number of steps.
        """
        self.total_steps: int | None = None
        self._seconds = seconds
        self._clock = clock
        self._min_steps = min_steps
        self._load = _Load(step_seconds)
        self._evaluation = _Estimate(self._load, evaluation_seconds)
        self._checkpoint = _Estimate(self._load, checkpoint_seconds)
        self._curve = _Estimate(self._load, curve_seconds)
        self._start_seconds = clock.elapsed_seconds
        self._evaluated_fraction = 0.0
        self._evaluation_time = self._checkpoint_time = self._start_seconds

    @property
    def elapsed_seconds(self) -> float | None:
        """Wall-clock time used by the run, including earlier processes."""
        return self._clock.elapsed_seconds

    @property
    def start_seconds(self) -> float | None:
        """Value of ``elapsed_seconds`` at the first step of the run."""
        return self._start_seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the last step ends, at least 0."""
        return max(self._end_seconds - self._clock.elapsed_seconds, 0.0)

    @property
    def _end_seconds(self) -> float:
        """Value of ``elapsed_seconds`` at which the last step should end."""
        saving_seconds = (1.0 + _MODEL_SHARE) * self._checkpoint.seconds
        curve_seconds = (1.0 + _EXIT_SHARE) * self._curve.seconds
        reserve = self._evaluation.seconds + saving_seconds + curve_seconds
        return max(
            self._seconds - reserve, self._start_seconds + _MIN_TRAINING_SHARE * self._seconds
        )

    def start(self, step: int, seconds: float, elapsed: float, start: float | None) -> None:
        """Continue from the later of the checkpoint's time and the time that the clock knows."""
        self._clock.advance_to(elapsed)
        now = self._clock.elapsed_seconds
        self._start_seconds = now if start is None else start
        if step:
            self._load.step_seconds = seconds / step
        self._evaluated_fraction = self.compute_completed_fraction(step)
        self._evaluation_time = self._checkpoint_time = now

    def compute_completed_fraction(self, step: int) -> float:
        """Return the fraction of the time between the first and the last step.

        The fraction is limited by the steps, if fewer than the minimum are completed.
        """
        used = self._clock.elapsed_seconds - self._start_seconds
        fraction = used / (self._end_seconds - self._start_seconds)
        return max(0.0, min(fraction, step / self._min_steps, 1.0))

    def is_in_first(self, step: int, fraction: float) -> bool:
        """Return whether less than ``fraction`` of the time is used."""
        return self.compute_completed_fraction(step) < fraction

    def is_in_last(self, step: int, fraction: float) -> bool:
        """Return whether less than ``fraction`` of the time is left."""
        return self.compute_completed_fraction(step) >= 1.0 - fraction

    def compute_warmup_factor(self, step: int, max_steps: int) -> float | None:
        """Return the larger of the completed fractions of ``max_steps`` and of a tenth of the run.

        None after the warm-up.
        """
        if step >= max_steps:
            return None
        time_factor = self.compute_completed_fraction(step) * _WARMUP_DIVISOR
        factor = max((step + 1) / max_steps, time_factor)
        return factor if time_factor < 1.0 else None

    def is_finished(self, step: int) -> bool:
        """Return whether less than half of a step fits into the remaining time."""
        if step < self._min_steps:
            return False
        return self._clock.elapsed_seconds + self._load.step_seconds / 2 >= self._end_seconds

    def is_evaluation_due(self, step: int, interval_steps: int | None) -> bool:
        """Return whether an evaluation is due, and evaluations take at most a tenth of the time.

        Shortly before the end, only the final evaluation is due.
        """
        fraction = self.compute_completed_fraction(step)
        if interval_steps:
            is_scheduled = step % interval_steps == 0
        else:
            is_scheduled = int(fraction * DEFAULT_NUM_EVALUATIONS) > int(
                self._evaluated_fraction * DEFAULT_NUM_EVALUATIONS
            )
        min_interval = self._evaluation.seconds / EVALUATION_SHARE
        now = self._clock.elapsed_seconds
        return (
            is_scheduled
            and now - self._evaluation_time >= min_interval
            and self._end_seconds - now >= min_interval / 2
        )

    def is_checkpoint_due(self, step: int, interval_steps: int | None, *, is_best: bool) -> bool:
        """Return whether a checkpoint is due, by the interval in steps or by the time."""
        if interval_steps:
            return is_best or step % interval_steps == 0
        min_interval = max(
            min(_MIN_CHECKPOINT_SECONDS, self._seconds / _MIN_CHECKPOINT_DIVISOR),
            self._checkpoint.seconds / _CHECKPOINT_SHARE,
        )
        interval = min(self._seconds / DEFAULT_NUM_EVALUATIONS, _MAX_CHECKPOINT_SECONDS)
        since_last = self._clock.elapsed_seconds - self._checkpoint_time
        return since_last >= (min_interval if is_best else max(min_interval, interval))

    def record_step(self, seconds: float, num_macs: float) -> None:
        """Update the moving averages of the step time and the load."""
        self._load.add_step(seconds, num_macs)

    def record_evaluation(self, seconds: float) -> None:
        """Record the duration and the end time of an evaluation."""
        self._evaluation.record(seconds)
        self._evaluation_time = self._clock.elapsed_seconds
        self._evaluated_fraction = self.compute_completed_fraction(self._min_steps)

    def record_checkpoint(self, seconds: float) -> None:
        """Record the duration and the end time of writing a checkpoint."""
        self._checkpoint.record(seconds)
        self._checkpoint_time = self._clock.elapsed_seconds


def get_default_interval(steps: int) -> int:
    """Return the default interval of evaluations and checkpoints: a twentieth of the run.

    The interval is at least 10 steps, so that a short run is not dominated by evaluations.
    """
    return max(min(10, steps), steps // DEFAULT_NUM_EVALUATIONS)
