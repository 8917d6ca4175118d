"""Runs a command whose output goes to a file."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_logged(
    command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
) -> int:
    """Run a command, append its output to a file, and return its exit status.

    Ctrl-C also reaches the command, which may take a while to save its state. The exception is
    raised when the command has ended. (`subprocess.run` would kill it after a quarter of a second.)

    Args:
        command: The program and its arguments.
        log_file: The file for its output; its folder must exist.
        environment: Environment variables in addition to those of this process.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    variables = {**os.environ, **(environment or {})}
    with (
        log_file.open("ab") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=variables) as process,
    ):
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
