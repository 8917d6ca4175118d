"""Counts with a noun in messages."""


def count_noun(count: float, singular: str, plural: str | None = None) -> str:
    """Return a count and its noun, such as "1 document" or "1,234 documents".

    Args:
        count: A whole number.
        singular: The noun, and what follows it, for a count of 1.
        plural: The same for other counts; None: the last word of the singular with an "s".
    """
    return f"{count:,.0f} {singular if count == 1 else plural or singular + 's'}"
