"""Watches whether a run will meet its time budget, and plans it anew once if it will not."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: A run is planned anew if it would take this many times its budget, or finish that much early.
TOLERANCE: Final = 1.5
#: The share of the budget over which the pace of a run is measured, twice before a new plan: the
#: second time only steps after the pace has changed.
_WINDOW: Final = 0.05
#: Steps that are measured at least. The first one of a process is left out: it warms up.
_LEAST_MEASURED: Final = 2
#: Time for evaluations and checkpoints, as a share of the steps' time, until it is measured.
_ASSUMED_OVERHEAD: Final = 0.05
#: The learning rate falls to 0 over this share of the steps at least, however late a run is.
_LEAST_REMAINING: Final = 0.05


@dataclass(frozen=True)
class RevisedSchedule:
    """A new number of steps, decided after ``step`` steps.

    step_seconds: the measured time of a step. expected: the seconds that the old plan would take.
    """

    step: int
    steps: int
    step_seconds: float
    expected_seconds: float


class TimeBudget:
    """Compares the pace of a run with its time budget, and plans it anew at most once."""

    def __init__(
        self,
        seconds: float,
        start_time: float,
        min_steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``start_time``: the clock when the budget began to run, before the start-up of the run."""
        self._seconds, self._began, self._clock = seconds, start_time, clock
        self._min_steps = min_steps
        self._before = 0.0
        self._laps: deque[float] = deque()
        self._window = 0.0
        self._trained, self._count = 0.0, 0
        self._is_confirming = False
        self._loop_began = start_time

    def start(self, trained: float) -> None:
        """Begin to measure; ``trained``: seconds of training before this process."""
        self._before, self._loop_began = trained, self._clock()

    def add_step(self, seconds: float) -> None:
        """Count the training time of one step."""
        self._trained += seconds
        self._count += 1
        if self._count == 1:
            return
        self._laps.append(seconds)
        self._window += seconds
        limit = _WINDOW * self._seconds
        while len(self._laps) > _LEAST_MEASURED and self._window - self._laps[0] >= limit:
            self._window -= self._laps.popleft()

    def revise(self, step: int, steps: int) -> RevisedSchedule | None:
        """Return a new number of steps if ``steps`` would miss the budget, else None.

        step: the steps taken. The caller asks no more once it got a new number.
        """
        if step >= steps:
            return None
        if self._window < _WINDOW * self._seconds or len(self._laps) < _LEAST_MEASURED:
            return None
        pace, now = self._window / len(self._laps), self._clock()
        overhead = (now - self._loop_began - self._trained) / self._trained
        cost = pace * (1 + max(overhead, _ASSUMED_OVERHEAD))
        elapsed = self._before + now - self._began
        expected = elapsed + (steps - step) * cost
        if self._seconds / TOLERANCE <= expected <= self._seconds * TOLERANCE:
            self._is_confirming = False
            return None
        if not self._is_confirming:
            self._is_confirming = True
            self._laps.clear()
            self._window = 0.0
            return None
        fitting = step + int((self._seconds - elapsed) / cost)
        least = step + max(1, math.ceil(_LEAST_REMAINING * step))
        new = max(fitting, least, self._min_steps)
        if expected > self._seconds:
            new = min(new, steps)
        return None if new == steps else RevisedSchedule(step, new, pace, expected)
