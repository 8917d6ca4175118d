"""Masked LM: how many tokens are chosen, which ones, and what replaces them."""

import itertools

import numpy as np
import pytest

from bertsmith.data.counter_rng import IntArray, init_states
from bertsmith.data.masking import VocabularyInfo, mask_tokens
from bertsmith.data.packing import CuSeqlens
from bertsmith.data.settings import DataSettings
from bertsmith.splitmix64 import UInt64Array

#: Token ids, cu_seqlens and random states of a batch.
PackedRow = tuple[IntArray, CuSeqlens, UInt64Array]


def draw_sequences(vocabulary: VocabularyInfo, sizes: list[int], seed: int = 0) -> PackedRow:
    """Return random sequences [CLS] ... [SEP] of the given sizes, with 2 % [UNK] tokens."""
    rng = np.random.default_rng(seed)
    cu_seqlens = np.cumsum([0, *sizes]).astype(np.int32)
    ids = rng.integers(5, vocabulary.vocab_size, cu_seqlens[-1])
    ids[rng.random(len(ids)) < 0.02] = vocabulary.unk_id
    ids[cu_seqlens[:-1]] = vocabulary.cls_id
    ids[cu_seqlens[1:] - 1] = vocabulary.sep_id
    return ids, cu_seqlens, init_states(seed, np.arange(len(sizes)))


@pytest.mark.parametrize("share", [0.15, 0.4, 1.0])
def test_number_of_predictions_is_exact(vocabulary: VocabularyInfo, share: float) -> None:
    """A sequence has max(1, round(share * tokens)) predictions, or all its ordinary tokens."""
    ids, cu_seqlens, states = draw_sequences(vocabulary, list(range(3, 200)))
    settings = DataSettings(masking_rate=share)
    _, positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    for first, last in itertools.pairwise(cu_seqlens):
        num_ordinary = int((~vocabulary.is_special[ids[first:last]]).sum())
        expected = min(max(1, round(share * int(last - first))), num_ordinary)
        assert ((positions >= first) & (positions < last)).sum() == expected


def test_max_predictions_per_seq_limits_each_sequence(vocabulary: VocabularyInfo) -> None:
    """``max_predictions_per_seq`` limits the predictions of each sequence."""
    ids, cu_seqlens, states = draw_sequences(vocabulary, [128] * 10)
    settings = DataSettings(max_predictions_per_seq=7)
    _, positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    assert len(positions) == 10 * 7


@pytest.mark.parametrize("whole_word_masking", [False, True])
def test_special_tokens_are_never_masked(
    vocabulary: VocabularyInfo, whole_word_masking: bool
) -> None:
    """No special token is chosen, changed or drawn as a random token."""
    ids, cu_seqlens, states = draw_sequences(vocabulary, [9, 60, 128] * 200)
    settings = DataSettings(
        masking_rate=0.9,
        mask_replace_prob=0.0,
        random_replace_prob=1.0,
        whole_word_masking=whole_word_masking,
    )
    masked_ids, positions, labels = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    assert not vocabulary.is_special[labels].any()
    assert (labels == ids[positions]).all()
    assert not vocabulary.is_special[masked_ids[positions]].any()
    assert set(np.unique(masked_ids[positions])) == set(range(5, vocabulary.vocab_size))
    is_unmasked = np.ones(len(ids), np.bool_)
    is_unmasked[positions] = False
    assert (masked_ids[is_unmasked] == ids[is_unmasked]).all()
    assert (np.diff(positions) > 0).all()


@pytest.mark.parametrize(
    ("mask_replace_prob", "random_replace_prob"), [(0.8, 0.1), (1.0, 0.0), (0.0, 0.0), (0.3, 0.6)]
)
def test_replacements_have_the_configured_shares(
    vocabulary: VocabularyInfo, mask_replace_prob: float, random_replace_prob: float
) -> None:
    """[MASK], random tokens and unchanged tokens have the configured shares (5 sigma)."""
    ids, cu_seqlens, states = draw_sequences(vocabulary, [128] * 2000)
    settings = DataSettings(
        mask_replace_prob=mask_replace_prob, random_replace_prob=random_replace_prob
    )
    masked_ids, positions, labels = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    new_ids = masked_ids[positions]
    # One in 92 random tokens is the original token, because 92 tokens are not special.
    changed_share = random_replace_prob * 91 / 92
    is_mask = new_ids == vocabulary.mask_id
    is_changed = ~is_mask & (new_ids != labels)
    for expected, share in (
        (mask_replace_prob, np.mean(is_mask)),
        (changed_share, np.mean(is_changed)),
    ):
        bound = 5 * (expected * (1 - expected) / len(positions)) ** 0.5
        assert abs(share - expected) <= bound


def test_all_positions_are_equally_likely(vocabulary: VocabularyInfo) -> None:
    """Every position between [CLS] and [SEP] is chosen equally often (5 sigma)."""
    length = 42
    ids, cu_seqlens, states = draw_sequences(vocabulary, [length] * 20_000)
    # [UNK] is never chosen, so this test has another token in its place.
    ids[ids == vocabulary.unk_id] = 5
    _, positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, DataSettings())
    counts = np.bincount(positions % length, minlength=length)
    expected = len(positions) / (length - 2)
    assert counts[0] == counts[-1] == 0
    assert (abs(counts[1:-1] - expected) < 5 * expected**0.5).all()


def test_masks_depend_only_on_state_and_ids(vocabulary: VocabularyInfo) -> None:
    """A sequence with the same state gets the same masks, alone or in a batch."""
    ids, cu_seqlens, states = draw_sequences(vocabulary, [128, 30, 77, 128])
    settings = DataSettings()
    batch_ids, batch_positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    first, last = int(cu_seqlens[2]), int(cu_seqlens[3])
    single_ids, single_positions, _ = mask_tokens(
        ids[first:last], np.array([0, 77], np.int32), states[2:3], vocabulary, settings
    )
    assert (single_ids == batch_ids[first:last]).all()
    is_inside = (batch_positions >= first) & (batch_positions < last)
    assert (single_positions + first == batch_positions[is_inside]).all()
    other_states = init_states(1, np.arange(4))
    other_ids, _, _ = mask_tokens(ids, cu_seqlens, other_states, vocabulary, settings)
    assert (other_ids != batch_ids).any()


def find_words(ids: IntArray, cu_seqlens: CuSeqlens, vocabulary: VocabularyInfo) -> list[list[int]]:
    """Return the token indices of each word in a row, computed in plain Python."""
    words: list[list[int]] = []
    is_special = vocabulary.is_special
    for index, token_id in enumerate(ids.tolist()):
        is_first = index in cu_seqlens or is_special[token_id] or is_special[ids[index - 1]]
        if vocabulary.is_continuation[token_id] and not is_first:
            words[-1].append(index)
        else:
            words.append([index])
    return words


def test_whole_words_are_masked(vocabulary: VocabularyInfo) -> None:
    """All pieces of a word are chosen or none, and the number of predictions is not exceeded."""
    ids, cu_seqlens, states = draw_sequences(vocabulary, [128] * 100 + [12] * 50)
    settings = DataSettings(whole_word_masking=True)
    _, positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    masked = set(positions.tolist())
    for word in find_words(ids, cu_seqlens, vocabulary):
        assert len(masked & set(word)) in {0, len(word)}
    counts = np.histogram(positions, cu_seqlens)[0]
    # 15 % of 128 tokens are 19 predictions, and 15 % of 12 tokens are 2.
    assert (counts[:100] <= 19).all()
    assert (counts[100:] <= 2).all()
    # Many words have a single piece, so 19 predictions are nearly always reached.
    assert np.mean(counts[:100] == 19) > 0.95


def test_too_long_words_are_skipped(vocabulary: VocabularyInfo) -> None:
    """A word with more pieces than remaining predictions is skipped, as in the original code."""
    # Twelve tokens have two predictions. The words have 5 pieces, 4 pieces and 1 piece, so only the
    # last word, at position 10, can be masked.
    ids = np.array([2, 10, 60, 61, 62, 63, 11, 60, 61, 62, 12, 3])
    cu_seqlens = np.array([0, 12], np.int32)
    settings = DataSettings(whole_word_masking=True)
    for seed in range(20):
        states = init_states(seed, np.arange(1))
        _, positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
        assert positions.tolist() == [10]


def test_shares_above_one_are_rejected() -> None:
    """The shares of [MASK] and random tokens must not add up to more than 1."""
    with pytest.raises(ValueError, match="must be at most 1"):
        DataSettings(mask_replace_prob=0.9, random_replace_prob=0.2)


def test_all_ordinary_tokens_can_be_chosen(vocabulary: VocabularyInfo) -> None:
    """With a share of 1 all ordinary tokens are chosen, even a "##" piece after a special token."""
    # [CLS] is 2, [SEP] is 3 and [UNK] is 1; ids from 60 on continue a word.
    ids = np.array([2, 60, 61, 10, 62, 3, 63, 64, 1, 65, 11, 3])
    cu_seqlens = np.array([0, 12], np.int32)
    states = init_states(0, np.arange(1))
    settings = DataSettings(masking_rate=1.0, whole_word_masking=True)
    _, positions, _ = mask_tokens(ids, cu_seqlens, states, vocabulary, settings)
    assert positions.tolist() == [1, 2, 3, 4, 6, 7, 9, 10]
