"""Masked LM: which tokens of a batch are predicted, and what stands in their place.

It never knows how the sequences came about; it needs their ids and where they start.

The rules are the original program's (paper, section 3.1): of each sequence a fixed share of its
tokens, special ones counted but never chosen; of those 80 % become [MASK], 10 % a random word,
10 % stay as they are.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.data.counter_rng import (
    BoolArray,
    IntArray,
    UInt64Array,
    bernoulli,
    random_bits,
    uniform_integers,
)
from bertsmith.data.packing import CuSeqlens, concat_ranges
from bertsmith.data.settings import DataSettings
from bertsmith.text.wordpiece import Tokenizer

#: The random words of a token are numbered from here, above those of the pairs, three a token.
_BASE = 1 << 40
_CHOICE, _FATE, _WORD = range(3)


@dataclass(frozen=True)
class VocabularyInfo:
    """What masking must know of a vocabulary of V words.

    ``special`` bool [V]: never predicted, never drawn; ``continuations`` bool [V]: the pieces
    that go on with a word ("##"); ``unk_id``: the id of [UNK], one of ``special``.
    """

    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int
    is_special: BoolArray
    is_continuation: BoolArray
    unk_id: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "VocabularyInfo":
        """Take the facts from a tokenizer."""
        special = np.zeros(tokenizer.vocab_size, np.bool_)
        special[
            [
                tokenizer.pad_id,
                tokenizer.unk_id,
                tokenizer.cls_id,
                tokenizer.sep_id,
                tokenizer.mask_id,
            ]
        ] = True
        return cls(
            vocab_size=tokenizer.vocab_size,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            mask_id=tokenizer.mask_id,
            is_special=special,
            is_continuation=np.asarray(tokenizer.is_continuation, np.bool_),
            unk_id=tokenizer.unk_id,
        )


@dataclass(frozen=True)
class _Units:
    """What is chosen or left as a whole, tokens or words: U of them, in the order of the row.

    ``first`` int64 [U]: index of its first token in the row; ``size`` int64 [U]: its tokens;
    ``sequence`` int64 [U]; ``starts`` int64 [B + 1]: where each sequence's units start.
    """

    first: IntArray
    size: IntArray
    sequence: IntArray
    starts: IntArray


def mask_tokens(
    ids: IntArray,
    boundaries: CuSeqlens,
    state: UInt64Array,
    facts: VocabularyInfo,
    settings: DataSettings,
) -> tuple[IntArray, IntArray, IntArray]:
    """Choose the predictions of B sequences and put masks or random words in their place.

    Args:
        ids: int64 [T], without masks.
        boundaries: int32 [B + 1].
        state: uint64 [B], the random state of each sequence, on which alone its masks depend.
        facts: of the vocabulary.
        settings: the shares.

    Returns:
        The ids with masks int64 [T]; the places int64 [P], ascending; the ids there int64 [P].
    """
    special = facts.is_special[ids]
    units = _units(ids, boundaries, special, facts if settings.whole_words else None)
    usable = ~special[units.first]
    keys = _shuffled(units, boundaries, state, usable)
    wanted = _predictions(boundaries, special, settings)
    if settings.whole_words:
        keys = keys[_fitting(keys, units, boundaries, usable, wanted)]
    else:
        keys = keys[concat_ranges(units.starts[:-1], wanted)]
    sequence, place = _unpacked(keys, boundaries)
    first = boundaries[sequence] + place
    if settings.whole_words:
        size = units.size[np.searchsorted(units.first, first)]
        first = concat_ranges(first, size)
    chosen = np.sort(first)
    return _replaced(ids, chosen, boundaries, state, facts, settings)


def _predictions(boundaries: CuSeqlens, special: BoolArray, settings: DataSettings) -> IntArray:
    """Return how many tokens of each sequence are predicted, int64 [B]."""
    sizes = np.diff(boundaries).astype(np.int64)
    wanted = np.maximum(np.rint(settings.masking_rate * sizes).astype(np.int64), 1)
    if settings.max_predictions is not None:
        wanted = np.minimum(wanted, settings.max_predictions)
    usable: IntArray = sizes - np.add.reduceat(special, boundaries[:-1], dtype=np.int64)
    possible: IntArray = np.minimum(wanted, usable)
    return possible


def _units(
    ids: IntArray, boundaries: CuSeqlens, special: BoolArray, words: VocabularyInfo | None
) -> _Units:
    """Return the tokens as units, or the words if the facts about ``words`` are given."""
    sizes = np.diff(boundaries).astype(np.int64)
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    if words is None:
        first, size = np.arange(len(ids)), np.ones(len(ids), np.int64)
        return _Units(first, size, sequence, boundaries.astype(np.int64))
    begins = ~words.is_continuation[ids] | special
    # A segment that was cut at its front begins with the rest of a word: a unit of its own.
    begins[1:] |= special[:-1]
    begins[boundaries[:-1]] = True
    first = np.flatnonzero(begins)
    size = np.diff(first, append=len(ids))
    return _Units(first, size, sequence[first], np.searchsorted(first, boundaries))


def _bits(boundaries: CuSeqlens) -> tuple[np.uint64, np.uint64]:
    """Return the bits of a place in a sequence, and the bits left for chance, in a 64-bit key."""
    place = int(np.diff(boundaries).max(initial=1)).bit_length()
    sequence = len(boundaries).bit_length()
    return np.uint64(place), np.uint64(64 - place - sequence)


def _shuffled(
    units: _Units, boundaries: CuSeqlens, state: UInt64Array, usable: BoolArray
) -> UInt64Array:
    """Return a sorted key for each unit: its sequence, chance, its place; uint64 [U].

    Sorting such keys shuffles the units of every sequence at once; those that are not usable
    come last in their sequence.
    """
    place_bits, chance_bits = _bits(boundaries)
    place = (units.first - boundaries[units.sequence]).astype(np.uint64)
    numbers = place * np.uint64(3) + np.uint64(_BASE + _CHOICE)
    # The top bit of chance is kept for what is not usable.
    keys = random_bits(state[units.sequence], numbers) >> (np.uint64(65) - chance_bits)
    keys[~usable] |= np.uint64(1) << (chance_bits - np.uint64(1))
    keys |= units.sequence.astype(np.uint64) << chance_bits
    keys <<= place_bits
    keys |= place
    keys.sort()
    return keys


def _unpacked(keys: UInt64Array, boundaries: CuSeqlens) -> tuple[IntArray, IntArray]:
    """Return the sequence and the place in it of each key, int64."""
    place_bits, chance_bits = _bits(boundaries)
    place = keys & ((np.uint64(1) << place_bits) - np.uint64(1))
    return (keys >> (place_bits + chance_bits)).astype(np.int64), place.astype(np.int64)


def _fitting(
    keys: UInt64Array, units: _Units, boundaries: CuSeqlens, usable: BoolArray, wanted: IntArray
) -> IntArray:
    """Return the indices into the sorted keys of the words that are taken.

    The original's rule: word by word in random order, and a word that would exceed the number
    of predictions is passed over. All sequences take their next word together.
    """
    sequence, place = _unpacked(keys, boundaries)
    size = units.size[np.searchsorted(units.first, boundaries[sequence] + place)]
    last = units.starts[:-1] + np.add.reduceat(usable, units.starts[:-1], dtype=np.int64)
    word, left = units.starts[:-1].copy(), wanted.copy()
    taken: list[IntArray] = []
    lanes = np.flatnonzero((word < last) & (left > 0))
    while len(lanes):
        fits = size[word[lanes]] <= left[lanes]
        taken.append(word[lanes[fits]])
        left[lanes[fits]] -= size[word[lanes[fits]]]
        word[lanes] += 1
        lanes = lanes[(word[lanes] < last[lanes]) & (left[lanes] > 0)]
    return np.concatenate(taken) if taken else np.zeros(0, np.int64)


def _replaced(
    ids: IntArray,
    chosen: IntArray,
    boundaries: CuSeqlens,
    state: UInt64Array,
    facts: VocabularyInfo,
    settings: DataSettings,
) -> tuple[IntArray, IntArray, IntArray]:
    """Put [MASK], a random word or nothing new at the ``chosen`` [P] places of the row."""
    sequence = np.searchsorted(boundaries, chosen, "right") - 1
    numbers = (chosen - boundaries[sequence]).astype(np.uint64) * np.uint64(3)
    state = state[sequence]
    fate = random_bits(state, numbers + np.uint64(_BASE + _FATE))
    masked = bernoulli(fate, settings.mask_token_share)
    changed = bernoulli(fate, settings.mask_token_share + settings.random_share)
    ordinary = np.flatnonzero(~facts.is_special)
    limits = np.full(len(chosen), len(ordinary))
    words = ordinary[
        uniform_integers(random_bits(state, numbers + np.uint64(_BASE + _WORD)), limits)
    ]
    labels = ids[chosen]
    result = ids.copy()
    result[chosen] = np.where(masked, facts.mask_id, np.where(changed, words, labels))
    return result, chosen, labels
