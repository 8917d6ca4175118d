"""Turns SIGTERM and SIGHUP into an exception, so that temporary files are removed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: A program that is ended by signal N exits with status 128 + N, the convention of shells.
SIGNAL_EXIT_OFFSET = 128
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: Commands that continue where they stopped if they are run again.
_RESUMABLE_COMMANDS = ("demo", "prepare", "pretrain", "finetune", "distill", "lab")
#: Commands that write their output atomically when it is complete.
_ATOMIC_COMMANDS = ("vocab", "import", "export")


class Terminated(BaseException):
    """The process received SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupted(BaseException):
    """Ctrl-C stopped a command."""

    def __init__(self, command: str) -> None:
        super().__init__(command)
        self.command = command

    def explain(self) -> str:
        """Return a message: whether the command wrote anything, and how to continue it."""
        if self.command in _RESUMABLE_COMMANDS:
            return "stopped; run the same command again to continue"
        if self.command in _ATOMIC_COMMANDS:
            return "stopped; nothing was written"
        return "stopped"


def describe_stop(step: int, total_steps: int | None) -> str:
    """Return a text that says at which step a signal has stopped training."""
    if step == 0:
        return "stopped before the first step"
    total = "" if total_steps is None else f" of {total_steps}"
    return f"stopped after step {step}{total} and saved a checkpoint"


@contextmanager
def raise_terminated() -> Iterator[None]:
    """Raise Terminated in the main thread at the first SIGTERM or SIGHUP.

    A second SIGTERM ends the process at once. A second SIGHUP is ignored, because a process can
    receive several of them when its terminal is closed. Ignored signals, as under nohup, remain
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _raise_once)
    try:
        yield
    finally:
        for number in numbers:
            if number == signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN:
                # join_process_group ignores it after the connection to another process is lost.
                continue
            signal.signal(number, signal.SIG_DFL)


def _raise_once(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signature of handlers
    """Restore the default effect of SIGTERM, ignore SIGHUP, and raise Terminated."""
    for other, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_IGN)):
        if signal.getsignal(other) is _raise_once:
            signal.signal(other, handler)
    raise Terminated(number)
