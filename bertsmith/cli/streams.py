"""Standard streams that work when closed, piped or in a locale that is not UTF-8."""

import io
import os
import sys
from contextlib import suppress

#: What the user can set to choose the encoding of the standard streams.
_CHOICE = "PYTHONIOENCODING"


def configure_streams() -> None:
    """Open closed standard streams, and have output in UTF-8 where no terminal reads it.

    Without this a closed descriptor is taken by the next file that is opened, and a character that
    the locale lacks ends the program. Such a character is written as an escape .
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        terminal = stream.isatty() or _CHOICE in os.environ
        encoding = stream.encoding if terminal else "utf-8"
        stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _open_closed() -> None:
    """Give each closed descriptor a file that refuses to be used; messages to stderr are lost."""
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor is this one: those below it are open.
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def discard_stdout() -> None:
    """Send what is still to be written nowhere, so that Python does not complain at its end."""
    # There may be no file behind it.
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
