"""Defers SIGINT, SIGTERM and SIGHUP to the end of the current step."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DeferredSignals:
    """Context manager that records the first signal instead of stopping the process.

    ``received`` is the number of the recorded signal, or None. A second SIGINT or SIGTERM stops the
    process as usual, unless repeated signals are ignored. A second SIGHUP is ignored, because a
    process can receive several of them when its terminal is closed. Signals that are ignored on
    entry, such as SIGHUP under nohup, remain ignored.
    """

    def __init__(self, *, ignore_repeated: bool = False) -> None:
        """Create the context manager; handlers are installed on entry.

        Args:
            ignore_repeated: Whether to ignore further signals, also after an error in the block. A
                process of torchrun can receive the same signal from the system and from torchrun,
                which sends SIGKILL if the process does not end. torchrun also sends SIGTERM if
                another process has ended, which must not replace the error about this.
                ``join_process_group`` restores the handlers.
        """
        self.received: int | None = None
        self._ignore_repeated = ignore_repeated
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers, which Python allows only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._record)
                for number in _SIGNALS
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous handlers, unless there is an error and signals are ignored."""
        if kind is None or not self._ignore_repeated:
            self._restore_handlers(_SIGNALS)

    @contextmanager
    def allow_closed_terminal(self) -> Iterator[None]:
        """Ignore that output cannot be written, if the terminal of the process was closed."""
        try:
            yield
        except OSError:
            if self.received != signal.SIGHUP:
                raise

    def _restore_handlers(self, numbers: Sequence[int]) -> None:
        """Install the handlers of some signals that were active before entry."""
        for number in numbers:
            if number in self._previous_handlers:
                handler = self._previous_handlers.pop(number)
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; the next one stops the process if handlers are restored."""
        if self.received is None:
            self.received = number
        if not self._ignore_repeated:
            self._restore_handlers((signal.SIGINT, signal.SIGTERM))
