"""How long a run lasts, in steps or in wall-clock time, and how much of it is completed.

The learning rate, the phases of the data, and the evaluations and checkpoints are functions of the
completed fraction of the run.
"""

import math
import time
from collections.abc import Callable
from typing import Final, Protocol

#: Number of evaluations in a run if the user sets no interval.
DEFAULT_NUM_EVALUATIONS: Final = 20
#: Minimum steps between two evaluations or checkpoints if the user sets no interval, so that a
#: short run is not dominated by them.
MIN_DEFAULT_INTERVAL: Final = 10
#: Maximum fraction of a time budget for all evaluations, and for a single one. The end of a run is
#: as uncertain as the duration of its final evaluation.
EVALUATION_SHARE: Final = 0.1
SINGLE_EVALUATION_SHARE: Final = 0.025
#: The warm-up takes at most the run divided by this number.
WARMUP_DIVISOR: Final = 10


class RunProgress(Protocol):
    """How much of a run is completed. Steps are numbered from 0."""

    total_steps: int | None
    """Number of steps; None if it is not known in advance."""

    def compute_completed_fraction(self, step: int) -> float:
        """Return the fraction of the run that is completed before ``step``, from 0 to 1."""

    def is_in_first(self, step: int, fraction: float) -> bool:
        """Return whether ``step`` is in the first ``fraction`` of the run."""

    def is_in_last(self, step: int, fraction: float) -> bool:
        """Return whether ``step`` is in the last ``fraction`` of the run."""


class Duration(RunProgress, Protocol):
    """Length of a run.

    Several processes must call ``start``, ``begin_step``, ``record_step`` and ``record_evaluation``
    in the same order. All of them then take the same decisions.
    """

    @property
    def elapsed_seconds(self) -> float | None:
        """Wall-clock time of all processes of the run; None if it has no effect."""

    @property
    def start_seconds(self) -> float | None:
        """Value of ``elapsed_seconds`` at the first step of the run."""

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the last step ends; None if it has no effect."""

    def start(
        self,
        step: int,
        seconds: float,
        elapsed_seconds: float,
        start_seconds: float | None,
        remaining_seconds: float | None = None,
    ) -> None:
        """Start the first step of this process.

        Args:
            step: Number of the step; 0 in a new run.
            seconds: Time of the steps before it.
            elapsed_seconds: Value in the checkpoint; 0 in a new run.
            start_seconds: Value in the checkpoint; None if no step is completed.
            remaining_seconds: Value in the checkpoint; None if it is unknown.
        """

    def begin_step(self, step: int) -> None:
        """Start a step of this process, before its batch is requested."""

    def get_batch_progress(self, num_steps_ahead: int) -> RunProgress:
        """Return the progress on which the data of a batch depends, the same in all processes.

        Args:
            num_steps_ahead: Maximum number of steps between the last started step and the step
                whose batch a thread computes.
        """

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

    def start_checkpoint(self) -> None:
        """Record that a checkpoint is being written from now on."""

    def record_step(self, seconds: float, num_macs: float) -> None:
        """Record the duration of a step and its number of multiply-accumulates."""

    def record_evaluation(self, seconds: float) -> None:
        """Record the duration of an evaluation that has just ended."""

    def record_checkpoint(self, seconds: float) -> None:
        """Record the duration of writing a checkpoint."""


class StepDuration:
    """A run with a fixed number of steps.

    Its schedule is a pure function of the step. Only checkpoints can also depend on the time.
    """

    elapsed_seconds = start_seconds = remaining_seconds = None

    def __init__(
        self,
        steps: int,
        max_checkpoint_seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a duration.

        Args:
            steps: Number of steps.
            max_checkpoint_seconds: Maximum time between two checkpoints.
            clock: Returns the current time in seconds.
        """
        self.total_steps: int | None = steps
        self._steps = steps
        self._max_checkpoint_seconds = max_checkpoint_seconds
        self._clock = clock
        self._checkpoint_time = clock()

    def start(
        self,
        step: int,
        seconds: float,
        elapsed_seconds: float,
        start_seconds: float | None,
        remaining_seconds: float | None = None,
    ) -> None:
        """Start the time until the first checkpoint of this process."""
        self._checkpoint_time = self._clock()

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def get_batch_progress(self, num_steps_ahead: int) -> RunProgress:
        """Return the duration itself, because the progress is a function of the step."""
        return self

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
        warmup_steps = min(max_steps, self._steps // WARMUP_DIVISOR)
        return (step + 1) / warmup_steps if step < warmup_steps else None

    def is_finished(self, step: int) -> bool:
        """Return whether all steps are completed."""
        return step >= self._steps

    def is_evaluation_due(self, step: int, interval_steps: int | None) -> bool:
        """Return whether ``step`` is a multiple of the interval."""
        return step % (interval_steps or get_default_interval(self._steps)) == 0

    def is_checkpoint_due(self, step: int, interval_steps: int | None, *, is_best: bool) -> bool:
        """Return whether ``step`` is a multiple of the interval or the best one.

        A checkpoint is also due after the maximum time since the last one.
        """
        if is_best or step % (interval_steps or get_default_interval(self._steps)) == 0:
            return True
        return self._clock() - self._checkpoint_time >= self._max_checkpoint_seconds

    def start_checkpoint(self) -> None:
        """Start the time until the next checkpoint."""
        self._checkpoint_time = self._clock()

    def record_step(self, seconds: float, num_macs: float) -> None:
        """Do nothing."""

    def record_evaluation(self, seconds: float) -> None:
        """Do nothing."""

    def record_checkpoint(self, seconds: float) -> None:
        """Do nothing."""


def get_default_interval(steps: int) -> int:
    """Return the default interval of evaluations and checkpoints: a twentieth of the run.

    The interval is at least MIN_DEFAULT_INTERVAL or the whole run.
    """
    return max(min(MIN_DEFAULT_INTERVAL, steps), steps // DEFAULT_NUM_EVALUATIONS)
