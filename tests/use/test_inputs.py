"""``chunked``."""

import itertools
from collections.abc import Iterator

import pytest

from bertsmith.errors import InputError
from bertsmith.use import inputs
from bertsmith.use.inputs import chunked


def test_chunks_read_no_further_than_needed() -> None:
    """A chunk is yielded before the next item is read, so endless input can be processed."""
    numbers_read: list[int] = []

    def yield_numbers() -> Iterator[int]:
        for number in itertools.count():
            numbers_read.append(number)
            yield number

    stream = chunked(yield_numbers(), 3)
    assert next(stream) == [0, 1, 2]
    assert numbers_read == [0, 1, 2]
    assert next(stream) == [3, 4, 5]
    assert list(chunked(iter("abcd"), 3)) == [["a", "b", "c"], ["d"]]
    assert list(chunked([], 3)) == []


def test_items_before_an_error_are_yielded() -> None:
    """If the iterable raises an error, the items before it are yielded first."""

    def yield_five_numbers() -> Iterator[int]:
        yield from range(5)
        raise InputError("the sixth")

    stream = chunked(yield_five_numbers(), 3)
    assert [next(stream), next(stream)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(InputError, match="the sixth"):
        next(stream)


def test_long_items_end_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk ends with the item that reaches the maximum number of characters."""
    monkeypatch.setattr(inputs, "MAX_CHUNK_CHARACTERS", 4)
    assert list(chunked(["ab", "c", "d", "efghij", "k", "l"], 3, len)) == [
        ["ab", "c", "d"], ["efghij"], ["k", "l"],
    ]  # fmt: skip
    assert list(chunked(["abcd", "efgh"], 3, len)) == [["abcd"], ["efgh"]]
