"""Formats a count and its noun, singular or plural, for messages."""


def count_noun(count: float, singular: str, plural: str | None = None) -> str:
    """Return a count and its noun, such as "1 document" or "1,234 documents".

    Args:
        count: A whole number.
        singular: The noun for a count of 1; more words, such as "is", may follow it.
        plural: The noun for other counts. Default: ``singular`` with an "s" at its end.
    """
    return f"{count:,.0f} {singular if count == 1 else plural or singular + 's'}"
