"""How questions are put into batches."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.errors import InputError
from bertsmith.model.packed import batch_by_length
from bertsmith.use.masked_lm import chunked


@given(st.lists(st.integers(1, 50)), st.integers(1, 200))
def test_groups_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int) -> None:
    """Each number stands in one group, and count times longest stays in the budget."""
    found = list(batch_by_length(lengths, budget))
    assert sorted(number for group in found for number in group) == list(range(len(lengths)))
    for group in found:
        assert len(group) == 1 or len(group) * max(lengths[number] for number in group) <= budget


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(50, 200))
def test_groups_are_full(lengths: list[int], budget: int) -> None:
    """A group leaves no room for the first sequence of the next."""
    found = list(batch_by_length(lengths, budget))
    for group in found[:-1]:
        assert (len(group) + 1) * max(lengths[number] for number in group) > budget


def test_windows_read_no_further_than_asked() -> None:
    """Lists come as soon as they are full, so endless input can be worked on."""
    seen: list[int] = []

    def endless() -> Iterator[int]:
        number = 0
        while True:
            seen.append(number)
            yield number
            number += 1

    stream = chunked(endless(), 3)
    assert next(stream) == [0, 1, 2]
    assert seen == [0, 1, 2]
    assert next(stream) == [3, 4, 5]
    assert list(chunked(iter("abcd"), 3)) == [["a", "b", "c"], ["d"]]
    assert list(chunked([], 3)) == []


def test_what_stands_before_an_error_is_a_window() -> None:
    """An error of the items is raised after the window of those before it, not instead of it."""

    def items() -> Iterator[int]:
        yield from range(5)
        raise InputError("the sixth")

    stream = chunked(items(), 3)
    assert [next(stream), next(stream)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(InputError, match="the sixth"):
        next(stream)
