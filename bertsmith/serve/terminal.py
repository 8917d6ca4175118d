"""Determines whether a process has a terminal, and ignores SIGHUP unless it was closed."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def has_terminal() -> bool:
    """Return whether the process has a terminal; False after the terminal was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextmanager
def ignore_hangups() -> Iterator[None]:
    """Ignore SIGHUP in the main thread, unless it says that the process's terminal was closed.

    The previous handler is called in that case. Unlike SIG_IGN, a server replaces this handler when
    it can reload.
    """
    previous_handler = signal.getsignal(signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous_handler is signal.SIG_IGN:
        yield
        return
    had_terminal = has_terminal()

    def handle(number: int, frame: FrameType | None) -> None:
        if had_terminal and not has_terminal() and callable(previous_handler):
            previous_handler(number, frame)

    signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous_handler)
