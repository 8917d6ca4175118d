"""The protocol with which library code reports progress and messages to its caller."""

from typing import Protocol


class Progress(Protocol):
    """Receives progress and messages, and may display them; there is one progress bar at a time."""

    def start(self, description: str, total: float | None, unit: str, initial: float = 0) -> None:
        """Start a progress bar, and finish the previous one.

        Args:
            description: Name of the work in progress.
            total: Number of units of the work; None if unknown.
            unit: Name of a unit, such as "lines".
            initial: Number of units that were completed earlier, such as before a resume. They do
                not count for the rate.
        """

    def advance(self, amount: float, **fields: str) -> None:
        """Advance the progress bar by ``amount`` units; ``fields`` are shown next to it."""

    def log(self, text: str) -> None:
        """Display a message of one line."""

    def finish(self) -> None:
        """Finish the progress bar, if there is one."""


class NullProgress:
    """Ignores progress and messages."""

    def start(self, description: str, total: float | None, unit: str, initial: float = 0) -> None:
        """Do nothing."""

    def advance(self, amount: float, **fields: str) -> None:
        """Do nothing."""

    def log(self, text: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
