"""Counts [UNK] among the tokens of a text and warns if its share is high.

Special tokens other than [UNK] are not counted as tokens.
"""

from dataclasses import dataclass
from typing import Final, Protocol

#: Maximum share of [UNK] without a warning. A WordPiece vocabulary that fits a text leaves well
#: under 1 % of it unknown.
MAX_UNKNOWN_SHARE: Final = 0.02


class TokenCounter(Protocol):
    """Receives the token counts of encoded texts; see ``Tokenizer.with_counter``."""

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """Add the numbers of all tokens and of [UNK] tokens in some texts."""


@dataclass
class TokenCounts:
    """Running counts of tokens and of [UNK] among them. Not thread-safe."""

    num_tokens: int = 0
    num_unknown: int = 0

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """See ``TokenCounter``."""
        self.num_tokens += num_tokens
        self.num_unknown += num_unknown

    @property
    def unknown_share(self) -> float:
        """The share of [UNK] among the tokens, 0 to 1; 0 without tokens."""
        return self.num_unknown / max(self.num_tokens, 1)

    def format_warning(self, tokens: str = "the tokens") -> str | None:
        """Return ``format_unknown_warning`` for the share."""
        return format_unknown_warning(self.unknown_share, tokens)


def format_unknown_warning(share: float, tokens: str = "the tokens") -> str | None:
    """Return a warning about the share of [UNK]; None if it is at most MAX_UNKNOWN_SHARE.

    Args:
        share: Number of [UNK] tokens / number of tokens.
        tokens: What was counted, for example "the training tokens".
    """
    if share <= MAX_UNKNOWN_SHARE:
        return None
    return (
        f"warning: {share:.1%} of {tokens} are [UNK]: the vocabulary does not cover this text; "
        "learn a vocabulary from this text (bertsmith vocab), or choose a model for its language"
    )
