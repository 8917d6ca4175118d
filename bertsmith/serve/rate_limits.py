"""Rate limits of a client: requests or tokens per minute."""

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Allows an amount per minute; thread-safe. A minute's amount may be used at once."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._level = per_minute
        self._updated_at = clock()

    def take(self, amount: float) -> float:
        """Use an amount, unless earlier amounts have emptied the bucket.

        An amount may be larger than the level, and even than the amount per minute. The next
        caller then waits longer.

        Returns:
            0.0 if the amount was used, else the seconds until something is left.
        """
        with self._lock:
            now = self._clock()
            refill = (now - self._updated_at) * self.per_minute / 60
            self._level = min(self._level + refill, self.per_minute)
            self._updated_at = now
            if self._level <= 0:
                return max((1.0 - self._level) * 60 / self.per_minute, 1e-3)
            self._level -= amount
            return 0.0
