"""Measures the training time of a run, without the time of evaluations and checkpoints."""

import time


class Stopwatch:
    """Measures the training time, without the time of evaluations and checkpoints.

    Attributes:
        total_seconds: The training time in seconds.
    """

    def __init__(self, previous_seconds: float) -> None:
        """Start the first lap.

        Args:
            previous_seconds: Training time of earlier processes.
        """
        self.total_seconds = previous_seconds
        self._lap_start = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, after adding them to the total."""
        now = time.perf_counter()
        seconds = now - self._lap_start
        self._lap_start = now
        self.total_seconds += seconds
        return seconds

    def skip(self) -> None:
        """Start a new lap without adding the current one to the total."""
        self._lap_start = time.perf_counter()
