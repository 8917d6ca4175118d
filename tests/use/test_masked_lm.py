"""``batch_by_length`` and ``chunked``."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.errors import InputError
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.use.masked_lm import chunked


@given(st.lists(st.integers(1, 50)), st.integers(1, 200))
def test_batches_contain_every_sequence_once(lengths: list[int], max_tokens: int) -> None:
    """Each sequence is in one batch, and batches have at most ``max_tokens`` padded tokens."""
    batches = list(batch_by_length(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded_size = len(batch) * max(lengths[index] for index in batch)
        assert len(batch) == 1 or padded_size <= max_tokens


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(50, 200))
def test_batches_are_full(lengths: list[int], max_tokens: int) -> None:
    """No batch except the last has room for another sequence of its maximum length."""
    batches = list(batch_by_length(lengths, max_tokens))
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[index] for index in batch) > max_tokens


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
