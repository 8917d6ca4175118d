"""Exceptions for errors that users can correct.

The command line prints the message of such an error without a traceback, and exits with status 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "out of memory", "not enough memory")


class BertsmithError(Exception):
    """Base class of all errors that users can correct.

    The message contains what is wrong, what was found and what to do about it.
    """


class SettingsError(BertsmithError):
    """A setting is unknown, has the wrong type or is out of range."""


class CorpusError(BertsmithError):
    """A text source cannot be read."""


class TokenizerError(BertsmithError):
    """A vocabulary or tokenizer is missing, damaged or incompatible."""


class StoreError(BertsmithError):
    """A token store is missing, damaged, too small or incompatible."""


class ModelError(BertsmithError):
    """A model directory is missing, damaged or cannot be used for the requested operation."""


class InputError(BertsmithError):
    """An input of a model (a text, a pair, a line, a file) is invalid."""


class TaskError(BertsmithError):
    """The data of a task is invalid: a file, a column, a label or a text."""


class RunError(BertsmithError):
    """A training run cannot start, continue or finish."""


class DivergedError(RunError):
    """A loss or gradient is not finite."""


class StoppedError(BertsmithError):
    """A signal stopped a stage of the lab after its progress was saved.

    The command line exits with the status of the signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__("stopped, progress is saved; run the same command to resume")
        self.signal = signal_number


class PeerError(BertsmithError):
    """Another process of the same run has failed and reports the error, so this one does not."""


class MissingExtraError(BertsmithError):
    """An optional package is not installed; the message contains the install command."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Compose the message.

        Args:
            package: Name of the missing package.
            extra: Extra of bertsmith that installs the package.
            purpose: What needs the package, as the subject of a sentence, such as "reading a file".
        """
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'bertsmith[{extra}]'"
        )


@contextmanager
def require_extra(extra: str, purpose: str, package: str | None = None) -> Iterator[None]:
    """Raise MissingExtraError if a package that is imported in the block is not installed.

    Args:
        extra: Extra of bertsmith that installs the package.
        purpose: What needs the package, as the subject of a sentence.
        package: Name of the package for the message. Default: the module that is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(package or str(error.name), extra, purpose) from None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether Python, PyTorch or CUDA could not allocate memory."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # Compared by name because torch may not be loaded.
    is_cuda_error = type(error).__name__ == "OutOfMemoryError"
    return is_cuda_error or any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES)
