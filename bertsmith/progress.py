"""How long work tells of itself: a protocol that library code calls and the command line shows.

It never knows whether anybody watches; ``NullProgress`` is for when nobody does.
"""

from typing import Protocol


class Progress(Protocol):
    """What long work reports to. One bar at a time; ``start`` ends the one before."""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Begin a bar named ``description`` of ``total`` units (None: unknown)."""

    def advance(self, amount: float, **fields: str) -> None:
        """Move the bar on by ``amount`` units; ``fields`` are short facts shown beside it."""

    def log(self, text: str) -> None:
        """Say one line for people, above the bar."""

    def finish(self) -> None:
        """End the bar, if one stands."""


class NullProgress:
    """The progress that nobody watches."""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: float, **fields: str) -> None:
        """Do nothing."""

    def log(self, text: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
