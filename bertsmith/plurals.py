"""Formats counts with their nouns, durations and long lists, for messages."""

from collections.abc import Sequence
from typing import Final

#: Maximum number of items of a list that is printed in full.
MAX_LISTED_ITEMS: Final = 10


def count_noun(count: float, singular: str, plural: str | None = None) -> str:
    """Return a count and its noun, such as "1 document" or "1,234 documents".

    Args:
        count: A whole number.
        singular: The noun for a count of 1. It may include a verb, as in "line repeats".
        plural: The noun for other counts. Default: ``singular`` with an "s" at its end.
    """
    if plural is None:
        plural = singular + "s"
    return f"{count:,.0f} {singular if count == 1 else plural}"


def format_minutes(minutes: float) -> str:
    """Return a duration as text, such as "1 minute" or "0.5 minutes"."""
    return f"{minutes:g} {'minute' if minutes == 1 else 'minutes'}"


def shorten_list(items: Sequence[str], max_items: int = MAX_LISTED_ITEMS) -> list[str]:
    """Return the items to print: all, or the first ``max_items`` and "… and 590 more"."""
    num_omitted = len(items) - max_items
    if num_omitted <= 0:
        return list(items)
    return [*items[:max_items], f"… and {num_omitted:,} more"]
