"""The share of [UNK] among tokens, and the warning that every command gives about it.

Special tokens other than [UNK] count neither as tokens nor as unknown.
"""

from dataclasses import dataclass
from typing import Final, Protocol

#: The share of [UNK] above which a text does not suit a vocabulary. WordPiece vocabularies that
#: suit a text leave well under 1 % unknown.
MAX_UNKNOWN_SHARE: Final = 0.02


class TokenCounter(Protocol):
    """Is told how many tokens were encoded; see ``Tokenizer.counting``."""

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """Add the counts of some text: all tokens, and those that are [UNK]."""


@dataclass
class TokenCounts:
    """A running count of tokens and of [UNK] among them. Not safe for several threads."""

    num_tokens: int = 0
    num_unknown: int = 0

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """See ``TokenCounter``."""
        self.num_tokens += num_tokens
        self.num_unknown += num_unknown

    @property
    def unknown_share(self) -> float:
        """The share of the tokens that are [UNK], 0 to 1; 0 without tokens."""
        return self.num_unknown / max(self.num_tokens, 1)

    def warning(self, tokens: str = "the tokens") -> str | None:
        """Return ``unknown_warning`` of the share."""
        return unknown_warning(self.unknown_share, tokens)


def unknown_warning(share: float, tokens: str = "the tokens") -> str | None:
    """Return the warning about a share of [UNK] (0 to 1), or None up to MAX_UNKNOWN_SHARE.

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
