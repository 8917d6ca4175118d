"""Counts and their nouns in messages."""

from bertsmith.plurals import count_noun, format_minutes, shorten_list


def test_noun_agrees_with_its_count() -> None:
    """Only a count of 1 takes the singular."""
    counts = [count_noun(count, "document") for count in (0, 1, 2, 1234)]
    assert counts == ["0 documents", "1 document", "2 documents", "1,234 documents"]
    assert count_noun(1, "value is", "values are") == "1 value is"
    assert count_noun(2.0, "value is", "values are") == "2 values are"


def test_one_minute_is_singular() -> None:
    """Only a duration of 1 takes the singular."""
    assert [format_minutes(value) for value in (1, 1.0, 0.5, 30)] == [
        "1 minute", "1 minute", "0.5 minutes", "30 minutes",
    ]  # fmt: skip


def test_long_list_is_shortened() -> None:
    """A list with more items than the maximum ends with the number of omitted items."""
    items = [str(number) for number in range(1600)]
    assert shorten_list(items, 2) == ["0", "1", "… and 1,598 more"]
    assert shorten_list(items[:10]) == items[:10]
    assert shorten_list(items)[-2:] == ["9", "… and 1,590 more"]
