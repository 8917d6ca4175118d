"""Formats a count and its noun, singular or plural, for messages."""


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
