"""Ctrl-C and SIGTERM, turned into a wish that the loop grants between two steps.

It never knows what is saved before the process leaves.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """While it is entered, the first signal is noted, and the second one acts as it always does."""

    def __init__(self) -> None:
        """Nothing has been asked for yet."""
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Take over the signals, in the main thread (no other can)."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._give_back()
