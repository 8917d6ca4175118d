"""What the user reads, and the exit status, when a command fails."""

import errno
import os
from collections.abc import Sequence

from bertsmith.errors import BertsmithError, SettingsError

#: The exit status of a bug.
EXIT_BUG = 1
#: The exit status of a user's mistake, as of a wrong option.
EXIT_USER_ERROR = 2
_NO_ROOM = {
    errno.ENOSPC: ("disk full", "free space"),
    errno.EDQUOT: ("disk quota exceeded", "free space"),
    errno.EFBIG: ("file size limit reached", "raise the limit (ulimit -f)"),
}
#: How PyTorch's allocators say that there is no memory; their errors have no class of their own.
_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise SettingsError for an argument that is not valid text."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            raise SettingsError(
                f"argument {number} is not valid in the locale's encoding: {shown!r}; give UTF-8, "
                "in a UTF-8 locale such as LC_ALL=C.UTF-8, and rename a file whose name is not"
            ) from None


def explain_error(error: Exception) -> tuple[str, int]:
    """Return a message for ``error`` and the exit status."""
    if isinstance(error, BertsmithError):
        return f"error: {error}", EXIT_USER_ERROR
    if _is_out_of_memory(error):
        return (
            "error: out of memory; take a smaller model, smaller batches or shorter inputs, or "
            "close other programs, and run the same command again"
        ), EXIT_USER_ERROR
    if isinstance(error, OSError):
        return f"error: {_explain_os_error(error)}", EXIT_USER_ERROR
    if isinstance(error, UnicodeEncodeError) and _has_surrogate(error):
        shown = error.object.encode("utf-8", "backslashreplace").decode()
        return (
            f"error: not valid Unicode: {shown[:200]!r}; correct this text or name",
            EXIT_USER_ERROR,
        )
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"error: {message[:500]}: this is a bug in bertsmith; rerun with --debug (bertsmith "
        "--debug COMMAND ...) and report it"
    ), EXIT_BUG


def _is_out_of_memory(error: Exception) -> bool:
    name, text = type(error).__name__, str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (name == "OutOfMemoryError" or any(phrase in text for phrase in _NO_MEMORY))
    )


def _explain_os_error(error: OSError) -> str:
    place = str(error.filename) if error.filename else ""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        what, remedy = _NO_ROOM[error.errno]
        where = f" while writing {place}" if place else ""
        return (
            f"{what}: {reason}{where}; {remedy} and run the same command again: prepare, pretrain "
            "and finetune continue where they stopped"
        )
    if error.errno == errno.EBADF and place in ("", "standard output"):
        return (
            "standard input or output is closed, and this command needs it; redirect it to a file"
        )
    return f"{place}: {reason}" if place else reason


def _has_surrogate(error: UnicodeEncodeError) -> bool:
    return 0xD800 <= ord(error.object[error.start]) <= 0xDFFF
