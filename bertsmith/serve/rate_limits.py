"""Rate limits of a client: requests or tokens per minute."""

import time
from collections.abc import Callable
from typing import Final

from bertsmith.serve.shared_table import CounterTable, Entry, LocalTable

#: Maximum rounding error of the level.
_TOLERANCE: Final = 1e-6


class TokenBucket:
    """Allows an amount per minute; thread-safe. A minute's amount may be used at once."""

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        table: CounterTable | None = None,
        name: str = "",
    ) -> None:
        """Start with a minute's amount, or continue with the level in a table.

        Args:
            per_minute: amount per minute.
            clock: returns the time in seconds.
            table: table that contains the level; None for a table of its own.
            name: name of the level in the table.
        """
        self.per_minute = per_minute
        # A request needs 1, which a limit below 1 per minute provides after more than a minute.
        self._capacity = max(per_minute, 1.0)
        self._clock = clock
        self._table = table or LocalTable()
        self._name = name

    def take(self, amount: float) -> float:
        """Use an amount, unless earlier amounts have left less than 1 in the bucket.

        An amount may be larger than the level, and even than the amount per minute. The next
        caller then waits longer.

        Returns:
            0.0 if the amount was used, else the seconds until 1 is left.
        """
        now = self._clock()
        wait_seconds = 0.0

        def use_amount(entry: Entry | None) -> Entry:
            nonlocal wait_seconds
            level, updated_at = entry or (self._capacity, now)
            level = min(level + (now - updated_at) * self.per_minute / 60, self._capacity)
            if level < 1 - _TOLERANCE:
                wait_seconds = max((1.0 - level) * 60 / self.per_minute, 1e-3)
            else:
                level -= amount
            return level, now

        self._table.update(self._name, use_amount)
        return wait_seconds

    def refund(self, amount: float) -> None:
        """Return an amount that was used."""
        now = self._clock()

        def return_amount(entry: Entry | None) -> Entry:
            level, updated_at = entry or (self._capacity, now)
            return level + amount, updated_at

        self._table.update(self._name, return_amount)
