"""Counts the [UNK] tokens in a text, and warns if their share is high.

Special tokens other than [UNK] are not counted.
"""

from dataclasses import dataclass
from typing import Final, Protocol

#: Maximum share of [UNK] without a warning. With a WordPiece vocabulary that fits the text, the
#: share is well under 1 %.
MAX_UNKNOWN_SHARE: Final = 0.02


class TokenCounter(Protocol):
    """An object that receives the token counts of encoded texts; see ``Tokenizer.with_counter``."""

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """Add the counts of encoded texts: the number of tokens, and how many of them are [UNK]."""


@dataclass
class TokenCounts:
    """Running counts of all tokens and of [UNK] tokens. This class is not thread-safe."""

    num_tokens: int = 0
    num_unknown: int = 0

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """Add the counts of encoded texts."""
        self.num_tokens += num_tokens
        self.num_unknown += num_unknown

    @property
    def unknown_share(self) -> float:
        """The share of the tokens that are [UNK], 0 to 1; 0 if there are no tokens."""
        return self.num_unknown / max(self.num_tokens, 1)

    def format_warning(self, description: str = "the tokens") -> str | None:
        """Return a warning about the share of [UNK], or None; see ``format_unknown_warning``."""
        return format_unknown_warning(self.unknown_share, description)


def format_unknown_warning(share: float, description: str = "the tokens") -> str | None:
    """Return a warning about the share of [UNK]; None if the share is at most MAX_UNKNOWN_SHARE.

    Args:
        share: Number of [UNK] tokens / number of tokens.
        description: What the warning calls the counted tokens, such as "the training tokens".
    """
    if share <= MAX_UNKNOWN_SHARE:
        return None
    return (
        f"warning: {share:.1%} of {description} are [UNK]: the vocabulary does not cover this "
        "text; learn a vocabulary from this text (bertsmith vocab), or a larger one (--size), or "
        "choose a model for its language"
    )
