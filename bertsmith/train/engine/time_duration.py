"""The duration of a run with a time budget.

It ends at a given wall-clock time, which all decisions depend on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

from bertsmith.train.engine.duration import (
    DEFAULT_NUM_EVALUATIONS,
    EVALUATION_SHARE,
    WARMUP_DIVISOR,
    RunProgress,
)
from bertsmith.train.engine.run_clock import RunClock

#: Minimum fraction of a time budget between the first and the last step of a process, unless less
#: time was left at its checkpoint. If the start of a process leaves less, the run exceeds its
#: budget, so that the learning rate still falls to 0.
_MIN_TRAINING_SHARE: Final = 0.1
#: Interval of checkpoints in a run with a time budget: a twentieth of the budget, and at least this
#: many seconds. If the budget is short, the limit is a sixth of it.
_MIN_CHECKPOINT_SECONDS: Final = 30.0
_MIN_CHECKPOINT_DIVISOR: Final = 6
#: Maximum fraction of a time budget for checkpoints.
_CHECKPOINT_SHARE: Final = 0.05
#: Time of writing the model, as a fraction of the time of writing a checkpoint. A checkpoint is
#: three times as large as the model.
_MODEL_SHARE: Final = 0.5
#: Time from the end of the command to the end of its process, as a fraction of the time of drawing
#: the curve (measured on a busy machine).
_EXIT_SHARE: Final = 3.0
#: Number of steps whose completed fraction is stored, more than the steps computed ahead.
_MAX_STORED_FRACTIONS: Final = 16
#: Weight of the newest step in the moving averages, and the limit of its duration as a multiple of
#: the average. A single slow step hardly changes the averages.
_STEP_WEIGHT: Final = 0.1
_MAX_STEP_RATIO: Final = 3.0
#: A step that takes more than this many seconds, and this multiple of the average step, was
#: interrupted: the process or the machine was stopped.
_MIN_PAUSE_SECONDS: Final = 30.0
_MIN_PAUSE_RATIO: Final = 20.0


class _StepAverages:
    """Moving averages of the duration of a step, and of a multiply-accumulate in the steps.

    ``step_seconds`` is 0 until a duration is known.
    """

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.mac_seconds: float | None = None
        self._is_warm = False

    def add_step(self, seconds: float, num_macs: float) -> None:
        """Add a step, unless it is the first one of the process, which is a warm-up."""
        if not self._is_warm:
            self._is_warm = True
            if self.step_seconds == 0.0:
                self.step_seconds = seconds
            return
        seconds = min(seconds, _MAX_STEP_RATIO * self.step_seconds)
        if self.mac_seconds is None:
            self.step_seconds = seconds
            self.mac_seconds = seconds / num_macs
        self.step_seconds += _STEP_WEIGHT * (seconds - self.step_seconds)
        self.mac_seconds += _STEP_WEIGHT * (seconds / num_macs - self.mac_seconds)


class _Estimate:
    """Estimates the duration of an operation from its last duration and the speed of the machine.

    If multiply-accumulates take twice as long as at the last measurement, the operation is assumed
    to take twice as long, too.
    """

    def __init__(self, averages: _StepAverages, seconds: float) -> None:
        self._averages = averages
        self.record(seconds)

    def record(self, seconds: float) -> None:
        """Record a measured duration."""
        self._measured_seconds = seconds
        self._mac_seconds = self._averages.mac_seconds

    @property
    def seconds(self) -> float:
        """The expected duration."""
        if self._mac_seconds is None:
            # The first measurement takes place before the first step.
            self._mac_seconds = self._averages.mac_seconds
        if self._mac_seconds is None or self._averages.mac_seconds is None:
            return self._measured_seconds
        return self._measured_seconds * self._averages.mac_seconds / self._mac_seconds


@dataclass(frozen=True)
class _Times:
    """The measured and estimated times on which all decisions depend, in seconds.

    Attributes:
        now: Wall-clock time used by the run.
        end: Value of ``now`` at which the last step should end.
        step_seconds: Time of a step.
        evaluation_seconds: Time of an evaluation.
        checkpoint_seconds: Time of writing a checkpoint.
    """

    now: float
    end: float
    step_seconds: float
    evaluation_seconds: float
    checkpoint_seconds: float


class _DelayedProgress:
    """The progress of an earlier step, which all processes know when a batch is computed."""

    total_steps: int | None = None

    def __init__(self, duration: "TimeDuration", num_steps: int) -> None:
        self._duration = duration
        self._num_steps = num_steps

    def compute_completed_fraction(self, step: int) -> float:
        """Return the fraction that was completed before an earlier step."""
        return self._duration.get_start_fraction(step - self._num_steps)

    def is_in_first(self, step: int, fraction: float) -> bool:
        """Return whether less than ``fraction`` of the time was used."""
        return self.compute_completed_fraction(step) < fraction

    def is_in_last(self, step: int, fraction: float) -> bool:
        """Return whether less than ``fraction`` of the time was left."""
        return self.compute_completed_fraction(step) >= 1.0 - fraction


class TimeDuration:
    """A run with a time budget.

    The budget covers everything from the start of the command to its end. Training ends early
    enough for the final evaluation, the last checkpoint, the model and the loss curve, whose
    durations are measured.

    With several processes, the times of the main process apply to all of them. They are sent at the
    start, after each step and after each evaluation, and stay the same in between.
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
        max_checkpoint_seconds: float = math.inf,
        share_numbers: Callable[[Sequence[float]], Sequence[float]] | None = None,
    ) -> None:
        """Create a duration.

        Args:
            seconds: The time budget.
            clock: Measures the time used by the run.
            step_seconds: Estimated time of a step; 0 if it is not known.
            evaluation_seconds: Estimated time of an evaluation.
            checkpoint_seconds: Estimated time of writing a checkpoint.
            curve_seconds: Estimated time of drawing the loss curve.
            min_steps: Minimum number of steps.
            max_checkpoint_seconds: Maximum time between two checkpoints, unless they would take
                more than a twentieth of the time.
            share_numbers: Returns the numbers of the main process in all processes; None with a
                single process.
        """
        self.total_steps: int | None = None
        self._seconds = seconds
        self._clock = clock
        self._min_steps = min_steps
        self._max_checkpoint_seconds = max_checkpoint_seconds
        self._averages = _StepAverages(step_seconds)
        self._evaluation = _Estimate(self._averages, evaluation_seconds)
        self._checkpoint = _Estimate(self._averages, checkpoint_seconds)
        self._curve = _Estimate(self._averages, curve_seconds)
        self._start_seconds = self._process_start_seconds = clock.elapsed_seconds
        self._min_training_seconds = _MIN_TRAINING_SHARE * seconds
        self._share_numbers = share_numbers
        #: Times of the main process; None in a run with a single process.
        self._shared_times: _Times | None = None
        self._first_step = 0
        #: Completed fraction before each of the last steps of this process.
        self._start_fractions: dict[int, float] = {}
        self._evaluated_fraction = 0.0
        self._evaluation_time = self._checkpoint_time = self._start_seconds

    @property
    def elapsed_seconds(self) -> float | None:
        """Wall-clock time used by the run, including earlier processes."""
        return self._times.now

    @property
    def start_seconds(self) -> float | None:
        """Value of ``elapsed_seconds`` at the first step of the run."""
        return self._start_seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the last step ends, at least 0."""
        times = self._times
        return max(times.end - times.now, 0.0)

    @property
    def _times(self) -> _Times:
        """The times now, or the last times of the main process."""
        return self._shared_times or self._measure_times()

    def _measure_times(self) -> _Times:
        return _Times(
            now=self._clock.elapsed_seconds,
            end=self._estimate_end(),
            step_seconds=self._averages.step_seconds,
            evaluation_seconds=self._evaluation.seconds,
            checkpoint_seconds=self._checkpoint.seconds,
        )

    def _share_times(self) -> None:
        """Send the times of the main process to the other processes."""
        if self._share_numbers is not None:
            self._shared_times = _Times(*self._share_numbers(astuple(self._measure_times())))

    def _estimate_end(self) -> float:
        """Return the value of ``elapsed_seconds`` at which the last step should end."""
        saving_seconds = (1.0 + _MODEL_SHARE) * self._checkpoint.seconds
        curve_seconds = (1.0 + _EXIT_SHARE) * self._curve.seconds
        reserve = self._evaluation.seconds + saving_seconds + curve_seconds
        min_end = self._process_start_seconds + self._min_training_seconds
        return max(self._seconds - reserve, min_end)

    def start(
        self,
        step: int,
        seconds: float,
        elapsed_seconds: float,
        start_seconds: float | None,
        remaining_seconds: float | None = None,
    ) -> None:
        """Continue from the checkpoint's time or the clock's time, whichever is later."""
        self._clock.advance_to(elapsed_seconds)
        self._share_times()
        now = self._times.now
        self._process_start_seconds = now
        self._start_seconds = now if start_seconds is None else start_seconds
        if remaining_seconds is not None:
            self._min_training_seconds = min(self._min_training_seconds, remaining_seconds)
        if step:
            self._averages.step_seconds = seconds / step
        # Again, because the end depends on the start.
        self._share_times()
        self._first_step = step
        self._evaluated_fraction = self.compute_completed_fraction(step)
        self._evaluation_time = self._checkpoint_time = now

    def begin_step(self, step: int) -> None:
        """Record the completed fraction before ``step`` for the batches of later steps."""
        self._start_fractions[step] = self.compute_completed_fraction(step)
        if len(self._start_fractions) > _MAX_STORED_FRACTIONS:
            del self._start_fractions[min(self._start_fractions)]

    def get_start_fraction(self, step: int) -> float:
        """Return the completed fraction before ``step`` or the first step of this process.

        Only the fractions of the last few steps are stored.
        """
        return self._start_fractions[max(step, self._first_step)]

    def get_batch_progress(self, num_steps_ahead: int) -> RunProgress:
        """Return the current progress; with several processes that of an earlier step."""
        if self._share_numbers is None:
            return self
        return _DelayedProgress(self, num_steps_ahead)

    def compute_completed_fraction(self, step: int) -> float:
        """Return the fraction of the time between the first and the last step.

        The fraction is limited by the steps, if fewer than the minimum are completed.
        """
        times = self._times
        fraction = (times.now - self._start_seconds) / (times.end - self._start_seconds)
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
        # Including this step, so that the first step of a run changes the weights.
        times = self._times
        step_fraction = times.step_seconds / (times.end - self._start_seconds)
        time_factor = (self.compute_completed_fraction(step) + step_fraction) * WARMUP_DIVISOR
        factor = max((step + 1) / max_steps, time_factor)
        return factor if time_factor < 1.0 else None

    def is_finished(self, step: int) -> bool:
        """Return whether less than half of a step fits into the remaining time."""
        if step < self._min_steps:
            return False
        times = self._times
        return times.now + times.step_seconds / 2 >= times.end

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
        times = self._times
        min_interval = times.evaluation_seconds / EVALUATION_SHARE
        return (
            is_scheduled
            and times.now - self._evaluation_time >= min_interval
            and times.end - times.now >= min_interval / 2
        )

    def is_checkpoint_due(self, step: int, interval_steps: int | None, *, is_best: bool) -> bool:
        """Return whether a checkpoint is due, by the interval in steps or by the time."""
        times = self._times
        since_last = times.now - self._checkpoint_time
        min_interval = times.checkpoint_seconds / _CHECKPOINT_SHARE
        if interval_steps:
            is_overdue = since_last >= max(min_interval, self._max_checkpoint_seconds)
            return is_best or is_overdue or step % interval_steps == 0
        shortest = min(
            _MIN_CHECKPOINT_SECONDS,
            self._seconds / _MIN_CHECKPOINT_DIVISOR,
            self._max_checkpoint_seconds,
        )
        min_interval = max(min_interval, shortest)
        interval = min(self._seconds / DEFAULT_NUM_EVALUATIONS, self._max_checkpoint_seconds)
        return since_last >= (min_interval if is_best else max(min_interval, interval))

    def start_checkpoint(self) -> None:
        """Start the time until the next checkpoint."""
        self._checkpoint_time = self._times.now

    def record_step(self, seconds: float, num_macs: float) -> None:
        """Update the moving averages of the steps.

        If the process was stopped during the step, the learning rate still has time to fall to 0,
        as after the start of a process.
        """
        times = self._measure_times()
        is_pause = seconds > max(_MIN_PAUSE_SECONDS, _MIN_PAUSE_RATIO * times.step_seconds)
        if is_pause and self._averages.mac_seconds is not None:
            remaining_seconds = max(times.end - (times.now - seconds), 0.0)
            self._process_start_seconds = times.now
            self._min_training_seconds = min(self._min_training_seconds, remaining_seconds)
        self._averages.add_step(seconds, num_macs)
        self._share_times()

    def record_evaluation(self, seconds: float) -> None:
        """Record the duration and the end time of an evaluation."""
        self._evaluation.record(seconds)
        self._share_times()
        self._evaluation_time = self._times.now
        self._evaluated_fraction = self.compute_completed_fraction(self._min_steps)

    def record_checkpoint(self, seconds: float) -> None:
        """Update the estimated duration of writing a checkpoint."""
        self._checkpoint.record(seconds)
