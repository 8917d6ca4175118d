"""The warning of commands whose text is mostly [UNK] to the model."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from bertsmith.cli.console import log
from bertsmith.text.unknown import TokenCounts

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle, PretrainedBundle

AnyBundle = TypeVar("AnyBundle", "PretrainedBundle", "FineTunedBundle")


class UnknownWarning:
    """Counts the tokens of a command and warns once if too many are [UNK].

    A command warns at its end; one that reads standard input also after each answer, because its
    input may have no end.
    """

    def __init__(self, counts: TokenCounts | None = None) -> None:
        """``counts``: where the command's tokens are counted, if something counts them already."""
        self.counts = TokenCounts() if counts is None else counts
        self._is_done = False

    def with_token_counts(self, bundle: AnyBundle) -> AnyBundle:
        """Return a model with a tokenizer that adds to ``counts``."""
        return replace(bundle, tokenizer=bundle.tokenizer.with_counter(self.counts))

    def warn(self) -> None:
        """Say the warning, if it is due and was not said before."""
        warning = None if self._is_done else self.counts.warning()
        if warning is not None:
            self._is_done = True
            log(warning)
