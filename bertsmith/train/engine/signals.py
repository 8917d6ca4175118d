"""Defers SIGINT and SIGTERM to the end of the current step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Context manager that records the first SIGINT or SIGTERM instead of stopping the process.

    ``received`` is the number of the recorded signal, or None. A second signal stops the process as
    usual, unless repeated signals are ignored.
    """

    def __init__(self, *, ignore_repeated: bool = False) -> None:
        """Create the context manager; handlers are installed on entry.

        Args:
            ignore_repeated: Whether to ignore further signals. A process of torchrun can receive
                the same signal from the system and from torchrun, which sends SIGKILL if the
                process does not end.
        """
        self.received: int | None = None
        self._ignore_repeated = ignore_repeated
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers, which Python allows only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._record) for number in _SIGNALS
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous handlers."""
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        """Install the handlers that were active before entry."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous_handlers = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; the next one stops the process if handlers are restored."""
        if self.received is None:
            self.received = number
        if not self._ignore_repeated:
            self._restore_handlers()
