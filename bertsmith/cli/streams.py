"""Prepares the standard streams, which may be closed, piped, or not UTF-8."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path

#: Environment variable with which users choose the encoding of the standard streams.
_ENCODING_VARIABLE = "PYTHONIOENCODING"


def configure_streams() -> None:
    """Open closed standard streams and write UTF-8 unless stdout is a terminal.

    Without this, the next file that is opened would get the descriptor of a closed stream, and a
    character that the locale cannot encode would end the program. Such characters are written as
    escapes.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        keep_encoding = stream.isatty() or _ENCODING_VARIABLE in os.environ
        encoding = stream.encoding if keep_encoding else "utf-8"
        stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _open_closed_streams() -> None:
    """Open closed descriptors, so that no other file gets them.

    Reading stdin and writing stdout then raise OSError (EBADF); messages to stderr are lost.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open returns the lowest free descriptor, which is this one.
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def discard_output() -> None:
    """Discard everything that this process prints through ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the exit
    sys.stderr = sys.stdout


def discard_stdout() -> None:
    """Redirect stdout to /dev/null so that flushing it at exit raises no error."""
    # A replaced stdout may have no file descriptor.
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
