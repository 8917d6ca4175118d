"""Masked LM: which tokens are chosen, and what takes their place."""

import itertools

import numpy as np
import pytest

from bertsmith.data.counter_rng import IntArray, UInt64Array, init_states
from bertsmith.data.masking import VocabularyInfo, mask_tokens
from bertsmith.data.packing import CuSeqlens
from bertsmith.data.settings import DataSettings

Row = tuple[IntArray, CuSeqlens, UInt64Array]


def row_of(facts: VocabularyInfo, sizes: list[int], seed: int = 0) -> Row:
    """Return a row of sequences "[CLS] words [SEP]" with some [UNK], and their states."""
    chance = np.random.default_rng(seed)
    boundaries = np.cumsum([0, *sizes]).astype(np.int32)
    ids = chance.integers(5, facts.vocab_size, boundaries[-1])
    ids[chance.random(len(ids)) < 0.02] = 1
    ids[boundaries[:-1]] = facts.cls_id
    ids[boundaries[1:] - 1] = facts.sep_id
    return ids, boundaries, init_states(seed, np.arange(len(sizes)))


@pytest.mark.parametrize("share", [0.15, 0.4, 1.0])
def test_counts_are_exact(facts: VocabularyInfo, share: float) -> None:
    """Each sequence has max(1, round(share * tokens)) predictions, never more than it can."""
    ids, boundaries, state = row_of(facts, list(range(3, 200)))
    _, chosen, _ = mask_tokens(ids, boundaries, state, facts, DataSettings(masking_rate=share))
    for first, last in itertools.pairwise(boundaries):
        possible = int((~facts.is_special[ids[first:last]]).sum())
        wanted = min(max(1, round(share * int(last - first))), possible)
        assert ((chosen >= first) & (chosen < last)).sum() == wanted


def test_no_more_predictions_than_allowed(facts: VocabularyInfo) -> None:
    """``max_predictions`` bounds the predictions of each sequence."""
    ids, boundaries, state = row_of(facts, [128] * 10)
    settings = DataSettings(max_predictions=7)
    _, chosen, _ = mask_tokens(ids, boundaries, state, facts, settings)
    assert len(chosen) == 70


@pytest.mark.parametrize("whole_words", [False, True])
def test_special_tokens_are_left_alone(facts: VocabularyInfo, whole_words: bool) -> None:
    """No special token is chosen, changed or drawn as a random word."""
    ids, boundaries, state = row_of(facts, [9, 60, 128] * 200)
    settings = DataSettings(
        masking_rate=0.9, mask_token_share=0.0, random_share=1.0, whole_words=whole_words
    )
    result, chosen, labels = mask_tokens(ids, boundaries, state, facts, settings)
    assert not facts.is_special[labels].any()
    assert (labels == ids[chosen]).all()
    assert not facts.is_special[result[chosen]].any()
    assert set(np.unique(result[chosen])) == set(range(5, facts.vocab_size))
    kept = np.ones(len(ids), np.bool_)
    kept[chosen] = False
    assert (result[kept] == ids[kept]).all()
    assert (np.diff(chosen) > 0).all()


@pytest.mark.parametrize(("masked", "random"), [(0.8, 0.1), (1.0, 0.0), (0.0, 0.0), (0.3, 0.6)])
def test_mixture(facts: VocabularyInfo, masked: float, random: float) -> None:
    """[MASK], random words and kept tokens have their shares (5 sigma)."""
    ids, boundaries, state = row_of(facts, [128] * 2000)
    settings = DataSettings(mask_token_share=masked, random_share=random)
    result, chosen, labels = mask_tokens(ids, boundaries, state, facts, settings)
    count = len(chosen)
    # A random word is the one that stood there once in 92 times.
    changed = random * 91 / 92
    shares = {
        masked: np.mean(result[chosen] == facts.mask_id),
        changed: np.mean((result[chosen] != facts.mask_id) & (result[chosen] != labels)),
    }
    for expected, found in shares.items():
        bound = 5 * (expected * (1 - expected) / count) ** 0.5
        assert abs(found - expected) <= bound


def test_every_place_is_as_likely(facts: VocabularyInfo) -> None:
    """The predictions fall on every place between [CLS] and [SEP] equally often (5 sigma)."""
    ids, boundaries, state = row_of(facts, [42] * 20_000)
    ids[ids == 1] = 5
    _, chosen, _ = mask_tokens(ids, boundaries, state, facts, DataSettings())
    counts = np.bincount(chosen % 42, minlength=42)
    expected = len(chosen) / 40
    assert counts[0] == counts[41] == 0
    assert (abs(counts[1:41] - expected) < 5 * expected**0.5).all()


def test_a_sequence_is_masked_by_its_state_alone(facts: VocabularyInfo) -> None:
    """The same sequence with the same state gets the same masks, whatever stands beside it."""
    ids, boundaries, state = row_of(facts, [128, 30, 77, 128])
    whole, chosen, _ = mask_tokens(ids, boundaries, state, facts, DataSettings())
    first, last = int(boundaries[2]), int(boundaries[3])
    alone, places, _ = mask_tokens(
        ids[first:last], np.array([0, 77], np.int32), state[2:3], facts, DataSettings()
    )
    assert (alone == whole[first:last]).all()
    assert (places + first == chosen[(chosen >= first) & (chosen < last)]).all()
    other, _, _ = mask_tokens(ids, boundaries, init_states(1, np.arange(4)), facts, DataSettings())
    assert (other != whole).any()


def words_of(ids: IntArray, boundaries: CuSeqlens, facts: VocabularyInfo) -> list[list[int]]:
    """Return the indices of each whole word of a row, in plain Python."""
    words: list[list[int]] = []
    for place, word in enumerate(ids.tolist()):
        starts = place in boundaries or facts.is_special[word] or facts.is_special[ids[place - 1]]
        if facts.is_continuation[word] and not starts:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def test_whole_words(facts: VocabularyInfo) -> None:
    """A word is chosen whole or not at all, and what is chosen never exceeds the count."""
    ids, boundaries, state = row_of(facts, [128] * 100 + [12] * 50)
    settings = DataSettings(whole_words=True)
    _, chosen, _ = mask_tokens(ids, boundaries, state, facts, settings)
    taken = set(chosen.tolist())
    for word in words_of(ids, boundaries, facts):
        assert len(taken & set(word)) in {0, len(word)}
    counts = np.histogram(chosen, boundaries)[0]
    assert (counts[:100] <= 19).all()
    assert (counts[100:] <= 2).all()
    # With single-piece words about, the count is nearly always filled.
    assert np.mean(counts[:100] == 19) > 0.95


def test_whole_words_pass_over_what_does_not_fit(facts: VocabularyInfo) -> None:
    """A word longer than the predictions left is passed over for a shorter one (original rule)."""
    # Two predictions of twelve tokens: a word of 5 pieces, one of 4, and one of 1.
    ids = np.array([2, 10, 60, 61, 62, 63, 11, 60, 61, 62, 12, 3])
    boundaries = np.array([0, 12], np.int32)
    for seed in range(20):
        state = init_states(seed, np.arange(1))
        _, chosen, _ = mask_tokens(ids, boundaries, state, facts, DataSettings(whole_words=True))
        assert chosen.tolist() == [10]


def test_settings_that_exceed_one() -> None:
    """Shares of [MASK] and random words that add up to more than 1 are refused."""
    with pytest.raises(ValueError, match="must be at most 1"):
        DataSettings(mask_token_share=0.9, random_share=0.2)


def test_every_word_can_be_chosen(facts: VocabularyInfo) -> None:
    """With a share of 1 all ordinary tokens are chosen, also a piece right after a special one."""
    ids = np.array([2, 60, 61, 10, 62, 3, 63, 64, 1, 65, 11, 3])
    settings = DataSettings(masking_rate=1.0, whole_words=True)
    boundaries = np.array([0, 12], np.int32)
    _, chosen, _ = mask_tokens(ids, boundaries, init_states(0, np.arange(1)), facts, settings)
    assert chosen.tolist() == [1, 2, 3, 4, 6, 7, 9, 10]
