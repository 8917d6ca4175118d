"""The progress protocol: library code reports progress and messages, the caller displays them."""

from typing import Protocol


class Progress(Protocol):
    """Displays one progress bar at a time, and messages."""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Start a bar and finish the previous one; ``total`` is None if unknown."""

    def advance(self, amount: float, **fields: str) -> None:
        """Advance the bar by ``amount`` units; ``fields`` are short values to display."""

    def log(self, text: str) -> None:
        """Display a message of one line."""

    def finish(self) -> None:
        """Finish the bar, if there is one."""


class NullProgress:
    """A progress that displays nothing."""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: float, **fields: str) -> None:
        """Do nothing."""

    def log(self, text: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
