"""The family of errors that a user can mend.

It never knows how an error is shown; the command line prints the message and exits with 2.
"""


class BertsmithError(Exception):
    """A mistake outside the code: what was found, what was expected, where, and what to do."""


class SettingsError(BertsmithError):
    """A setting is unknown, of the wrong type or out of range."""


class CorpusError(BertsmithError):
    """A text source cannot be read as it stands."""


class TokenizerError(BertsmithError):
    """A vocabulary or tokenizer is missing, broken or does not fit."""


class StoreError(BertsmithError):
    """A token store is missing, broken, too small or was made from something else."""


class ModelError(BertsmithError):
    """A model directory is missing, broken or does not fit what is asked of it."""


class InputError(BertsmithError):
    """What a model is asked about (a text, a pair, a line) cannot be answered as it stands."""


class TaskError(BertsmithError):
    """A task's data cannot be used as it stands: a file, a column, a label, a text."""


class RunError(BertsmithError):
    """A training run cannot start, go on or finish."""


class DivergedError(RunError):
    """A loss or its gradient is not finite any more: the run cannot go on."""


class MissingExtraError(BertsmithError):
    """An optional dependency is needed; the message gives the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'bertsmith[{extra}]'"
        )
