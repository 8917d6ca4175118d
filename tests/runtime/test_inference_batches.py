"""``batch_by_length``."""

from hypothesis import given
from hypothesis import strategies as st

from bertsmith.runtime.inference_batches import batch_by_length


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
