"""Describes the share of [UNK] in the splits of a token store."""

from collections.abc import Mapping
from typing import Final

from bertsmith.data.store import SplitName
from bertsmith.text.unknown import TokenCounts

_SPLIT_TITLES: Final[dict[SplitName, str]] = {"train": "training", "heldout": "held-out"}


def format_unknown_shares(counts: Mapping[SplitName, TokenCounts | None]) -> list[str]:
    """Return lines with the share of [UNK] in each split, and a warning if a share is high.

    Splits without a count or without tokens are left out. The warning is about the split with the
    highest share.
    """
    counts_by_title = {
        _SPLIT_TITLES[name]: split_counts
        for name, split_counts in counts.items()
        if split_counts and split_counts.num_tokens
    }
    if not counts_by_title:
        return []
    shares = ", ".join(
        f"{split_counts.unknown_share:.2%} of the {title} tokens"
        for title, split_counts in counts_by_title.items()
    )
    lines = [f"[UNK]: {shares}"]
    highest = max(counts_by_title, key=lambda title: counts_by_title[title].unknown_share)
    warning = counts_by_title[highest].format_warning(f"the {highest} tokens")
    if warning:
        lines.append(warning)
    return lines
