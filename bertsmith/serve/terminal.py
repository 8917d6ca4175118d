"""Determines whether a process has a terminal."""

import os


def has_terminal() -> bool:
    """Return whether the process has a terminal; False after the terminal was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
