"""Runs a command whose output goes to a file."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def run_logged(
    command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
) -> int:
    """Run a command, append its output to a file, and return its exit status.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP are sent to the command, which may take a while to save its
    state. This process ends after it. (`subprocess.run` would kill it after a quarter of a second.)

    Args:
        command: The program and its arguments.
        log_file: The file for its output; its folder must exist.
        environment: Environment variables in addition to those of this process.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C.
        SystemExit: SIGTERM or SIGHUP.
    """
    variables = {**os.environ, **(environment or {})}
    with (
        log_file.open("ab") as file,
        # In its own process group, the command does not also receive the signals of this one. A
        # second SIGTERM would stop it before it has saved its state.
        subprocess.Popen(
            command, stdout=file, stderr=file, env=variables, process_group=0
        ) as process,
        _forward_signals(process) as received,
    ):
        status = process.wait()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        sys.exit(128 + received[0])
    return status


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Send signals to a process, and yield a list to which they are appended."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        # Some programs send a signal to a process and to its group. Ctrl-C can be repeated.
        if number == signal.SIGINT or number not in received:
            process.send_signal(number)
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # `nohup` ignores SIGHUP.
    handlers = {number: signal.getsignal(number) for number in numbers}
    forwarded = [number for number in numbers if handlers[number] is not signal.SIG_IGN]
    for number in forwarded:
        signal.signal(number, forward)
    try:
        yield received
    finally:
        for number in forwarded:
            signal.signal(number, handlers[number])
