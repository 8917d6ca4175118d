"""Checks whether a run will meet its time budget, and revises its number of steps once if not."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: The number of steps is revised if the expected duration is more than this factor above or below
#: the budget.
TOLERANCE: Final = 1.5
#: The step time is measured over this fraction of the budget. If it calls for a revision, it is
#: measured again over later steps, and only the second measurement causes the revision.
_WINDOW_FRACTION: Final = 0.05
#: Minimum number of measured steps. The first step of a process is a warm-up and is not measured.
_MIN_WINDOW_STEPS: Final = 2
#: Minimum time of evaluations and checkpoints that is assumed, as a fraction of the training time.
_MIN_OVERHEAD: Final = 0.05
#: Minimum number of steps after a revision, in which the learning rate decays, as a fraction of
#: the completed steps.
_MIN_REMAINING_FRACTION: Final = 0.05


@dataclass(frozen=True)
class RevisedSchedule:
    """A new total number of steps.

    Attributes:
        step: Steps completed at the time of the revision.
        steps: New total number of steps.
        step_seconds: Measured time of a step.
        expected_seconds: Expected duration of the run with the old number of steps.
    """

    step: int
    steps: int
    step_seconds: float
    expected_seconds: float


class TimeBudget:
    """Measures steps, and revises their number if the run would miss its time budget."""

    def __init__(
        self,
        seconds: float,
        start_time: float,
        min_steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a budget.

        Args:
            seconds: The budget, including the start-up of the run.
            start_time: Value of ``clock`` at the start of the run.
            min_steps: Lower bound of a revised number of steps.
            clock: Returns the current time in seconds.
        """
        self._seconds, self._start_time, self._clock = seconds, start_time, clock
        self._min_steps = min_steps
        self._previous_seconds = 0.0
        self._window: deque[float] = deque()
        self._window_seconds = 0.0
        self._training_seconds, self._num_steps = 0.0, 0
        self._is_confirming = False
        self._loop_start_time = start_time

    def start(self, previous_seconds: float) -> None:
        """Start the measurement when the first step of this process starts.

        Args:
            previous_seconds: Training time of earlier processes, stored in the checkpoint.
        """
        self._previous_seconds, self._loop_start_time = previous_seconds, self._clock()

    def add_step(self, seconds: float) -> None:
        """Add the training time of one step to the measurement."""
        self._training_seconds += seconds
        self._num_steps += 1
        if self._num_steps == 1:
            return
        self._window.append(seconds)
        self._window_seconds += seconds
        limit = _WINDOW_FRACTION * self._seconds
        while (
            len(self._window) > _MIN_WINDOW_STEPS
            and self._window_seconds - self._window[0] >= limit
        ):
            self._window_seconds -= self._window.popleft()

    def revise(self, step: int, steps: int) -> RevisedSchedule | None:
        """Return a revised schedule if the run would miss the budget, else None.

        Must not be called again after it has returned a schedule.

        Args:
            step: Completed steps.
            steps: Current total number of steps.
        """
        if step >= steps:
            return None
        if (
            self._window_seconds < _WINDOW_FRACTION * self._seconds
            or len(self._window) < _MIN_WINDOW_STEPS
        ):
            return None
        step_seconds, now = self._window_seconds / len(self._window), self._clock()
        overhead = (now - self._loop_start_time - self._training_seconds) / self._training_seconds
        seconds_per_step = step_seconds * (1 + max(overhead, _MIN_OVERHEAD))
        elapsed = self._previous_seconds + now - self._start_time
        expected_seconds = elapsed + (steps - step) * seconds_per_step
        if self._seconds / TOLERANCE <= expected_seconds <= self._seconds * TOLERANCE:
            self._is_confirming = False
            return None
        if not self._is_confirming:
            self._is_confirming = True
            self._window.clear()
            self._window_seconds = 0.0
            return None
        fitting_steps = step + int((self._seconds - elapsed) / seconds_per_step)
        min_steps = step + max(1, math.ceil(_MIN_REMAINING_FRACTION * step))
        new_steps = max(fitting_steps, min_steps, self._min_steps)
        if expected_seconds > self._seconds:
            new_steps = min(new_steps, steps)
        if new_steps == steps:
            return None
        return RevisedSchedule(step, new_steps, step_seconds, expected_seconds)
