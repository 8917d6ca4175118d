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

    Ctrl-C also reaches the command, and SIGTERM and SIGHUP are sent to it. It may take a while to
    save its state, so this process ends after it. (`subprocess.run` would kill it after a quarter
    of a second.)

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
        subprocess.Popen(command, stdout=file, stderr=file, env=variables) as process,
        _forward_signals(process) as received,
    ):
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
    if received:
        sys.exit(128 + received[0])
    return status


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Send SIGTERM and SIGHUP to a process, and yield a list to which they are appended."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
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
