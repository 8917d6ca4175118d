"""Warns if too many tokens of a command's input are [UNK]."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from bertsmith.cli.console import log
from bertsmith.text.unknown import TokenCounts

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle, PretrainedBundle

BundleWithTokenizer = TypeVar("BundleWithTokenizer", "PretrainedBundle", "FineTunedBundle")


class UnknownTokenWarning:
    """Counts the tokens of a command and warns once if too many are [UNK].

    A command calls ``warn`` at its end. A command that reads standard input also calls it after
    each result, because the input may never end.
    """

    def __init__(self, counts: TokenCounts | None = None) -> None:
        """Initialize the warning.

        Args:
            counts: Token counts of the command's input, if a tokenizer already updates them.
                Default: new counts, updated by the tokenizers of ``with_token_counter``.
        """
        self.counts = TokenCounts() if counts is None else counts
        self._has_warned = False

    def with_token_counter(self, bundle: BundleWithTokenizer) -> BundleWithTokenizer:
        """Return a copy of the bundle whose tokenizer adds to ``counts``."""
        return replace(bundle, tokenizer=bundle.tokenizer.with_counter(self.counts))

    def warn(self) -> None:
        """Print the warning if too many tokens were [UNK], and it has not been printed yet."""
        warning = None if self._has_warned else self.counts.format_warning()
        if warning is not None:
            self._has_warned = True
            log(warning)
