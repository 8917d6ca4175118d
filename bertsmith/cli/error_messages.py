"""Error messages and exit statuses of failed commands."""

import errno
import os
from collections.abc import Sequence

from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET
from bertsmith.errors import BertsmithError, SettingsError, StoppedError, is_out_of_memory

EXIT_BUG = 1
#: The same status that Typer uses for invalid options.
EXIT_USER_ERROR = 2
#: Errors of a full disk: description and remedy.
_STORAGE_ERRORS = {
    errno.ENOSPC: ("disk full", "free space"),
    errno.EDQUOT: ("disk quota exceeded", "free space"),
    errno.EFBIG: ("file size limit reached", "raise the limit (ulimit -f)"),
}


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise SettingsError for an argument that cannot be encoded as UTF-8."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            escaped = os.fsencode(argument).decode("utf-8", "backslashreplace")
            raise SettingsError(
                f"argument {number} is not valid in the locale's encoding: {escaped!r}; use UTF-8 "
                "and a UTF-8 locale such as LC_ALL=C.UTF-8, and rename files whose names are not "
                "UTF-8"
            ) from None


def explain_error(error: Exception) -> tuple[str, int]:
    """Return a one-line message about ``error``, and the exit status of the program."""
    if isinstance(error, StoppedError):
        return str(error), SIGNAL_EXIT_OFFSET + error.signal
    if isinstance(error, BertsmithError):
        return f"error: {error}", EXIT_USER_ERROR
    if is_out_of_memory(error):
        return (
            "error: out of memory; use a smaller model, smaller batches or shorter inputs, or "
            "close other programs, and run the same command again"
        ), EXIT_USER_ERROR
    if isinstance(error, OSError):
        return f"error: {_explain_os_error(error)}", EXIT_USER_ERROR
    if isinstance(error, UnicodeEncodeError) and _has_surrogate(error):
        escaped = error.object.encode("utf-8", "backslashreplace").decode()
        message = f"error: not valid Unicode: {escaped[:200]!r}; correct this text or name"
        return message, EXIT_USER_ERROR
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"error: {message[:500]}: this is a bug in bertsmith; rerun with --debug (bertsmith "
        "--debug COMMAND ...) and report it"
    ), EXIT_BUG


def _explain_os_error(error: OSError) -> str:
    """Return the file and the reason of an OSError, and for a full disk what to do."""
    filename = str(error.filename) if error.filename else ""
    reason = error.strerror or str(error)
    if error.errno in _STORAGE_ERRORS:
        problem, remedy = _STORAGE_ERRORS[error.errno]
        location = f" while writing {filename}" if filename else ""
        return (
            f"{problem}: {reason}{location}; {remedy} and run the same command again: prepare, "
            "pretrain, finetune, distill and embed continue where they stopped"
        )
    if error.errno == errno.EBADF and filename in ("", "standard output"):
        return "standard input or output is closed, but the command needs it; redirect it to a file"
    return f"{filename}: {reason}" if filename else reason


def _has_surrogate(error: UnicodeEncodeError) -> bool:
    """Return whether the character that cannot be encoded is a surrogate, U+D800 to U+DFFF."""
    return 0xD800 <= ord(error.object[error.start]) <= 0xDFFF
