"""Masked LM: chooses the tokens to predict and replaces them.

The rules are those of the paper (section 3.1) and the original code: a fixed share of each
sequence's tokens is predicted. Special tokens count towards the length of the sequence but are
never chosen. By default, 80 % of the chosen tokens become [MASK], 10 % become a random token, and
10 % stay unchanged.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.data.counter_rng import (
    BoolArray,
    IntArray,
    draw_bernoulli,
    draw_uniform_integers,
    random_bits,
)
from bertsmith.data.packing import CuSeqlens, concat_ranges
from bertsmith.data.settings import DataSettings
from bertsmith.splitmix64 import UInt64Array
from bertsmith.text.wordpiece import Tokenizer

#: Index of the first random value used for masking, far above the indices used for sentence pairs.
#: Each position of a sequence has three random values.
_FIRST_RNG_INDEX = 1 << 40
_RNG_ORDER, _RNG_REPLACEMENT, _RNG_RANDOM_TOKEN = range(3)


@dataclass(frozen=True)
class VocabularyInfo:
    """The properties of a vocabulary that masking depends on.

    Attributes:
        vocab_size: Number of ids in the vocabulary (V).
        cls_id: Id of [CLS].
        sep_id: Id of [SEP].
        mask_id: Id of [MASK].
        is_special: Whether each id is a special token, bool [V]. Special tokens are never
            predicted and never drawn as random tokens.
        is_continuation: Whether each id is a piece that continues a word ("##"), bool [V].
        unk_id: Id of [UNK], one of the special tokens.
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
        """Read the information from a tokenizer."""
        is_special = np.zeros(tokenizer.vocab_size, np.bool_)
        is_special[
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
            is_special=is_special,
            is_continuation=np.asarray(tokenizer.is_continuation, np.bool_),
            unk_id=tokenizer.unk_id,
        )


@dataclass(frozen=True)
class _Units:
    """Units of tokens that are masked together, U in number, in the order of the batch.

    With whole-word masking a unit is a word, else a single token.

    Attributes:
        first_token: Index in the batch of each unit's first token, int64 [U].
        size: Number of tokens in each unit, int64 [U].
        sequence: Index of the sequence that each unit is in, int64 [U].
        sequence_offsets: Index of each sequence's first unit, int64 [B + 1]; the last entry is U.
    """

    first_token: IntArray
    size: IntArray
    sequence: IntArray
    sequence_offsets: IntArray


def mask_tokens(
    ids: IntArray,
    cu_seqlens: CuSeqlens,
    states: UInt64Array,
    vocabulary: VocabularyInfo,
    settings: DataSettings,
) -> tuple[IntArray, IntArray, IntArray]:
    """Choose the tokens to predict in B sequences and replace them.

    Args:
        ids: Token ids without masks, int64 [T]; they are not changed.
        cu_seqlens: Start of each sequence, int32 [B + 1].
        states: Random state of each sequence, uint64 [B]. The masks of a sequence depend only on
            its state and its ids.
        vocabulary: Special tokens and continuation pieces.
        settings: Shares of chosen and replaced tokens.

    Returns:
        The ids with masks, int64 [T]; the positions to predict, int64 [P], ascending; the
        original ids at these positions, int64 [P].
    """
    is_special = vocabulary.is_special[ids]
    units = _find_units(
        ids, cu_seqlens, is_special, vocabulary if settings.whole_word_masking else None
    )
    is_maskable = ~is_special[units.first_token]
    keys = _shuffle_units(units, cu_seqlens, states, is_maskable)
    num_predictions = _count_predictions(cu_seqlens, is_special, settings)
    if settings.whole_word_masking:
        selected = _select_words(keys, units, cu_seqlens, is_maskable, num_predictions)
    else:
        # The first units of each sequence.
        selected = concat_ranges(units.sequence_offsets[:-1], num_predictions)
    sequence, position = _unpack_keys(keys[selected], cu_seqlens)
    masked_positions = cu_seqlens[sequence] + position
    if settings.whole_word_masking:
        # So far these are only the first tokens of the chosen words.
        word_sizes = units.size[np.searchsorted(units.first_token, masked_positions)]
        masked_positions = concat_ranges(masked_positions, word_sizes)
    masked_positions = np.sort(masked_positions)
    return _replace_tokens(ids, masked_positions, cu_seqlens, states, vocabulary, settings)


def _count_predictions(
    cu_seqlens: CuSeqlens, is_special: BoolArray, settings: DataSettings
) -> IntArray:
    """Return the number of tokens to predict in each sequence, int64 [B]."""
    sizes = np.diff(cu_seqlens).astype(np.int64)
    num_predictions = np.maximum(np.rint(settings.masking_rate * sizes).astype(np.int64), 1)
    if settings.max_predictions_per_seq is not None:
        num_predictions = np.minimum(num_predictions, settings.max_predictions_per_seq)
    num_maskable: IntArray = sizes - np.add.reduceat(is_special, cu_seqlens[:-1], dtype=np.int64)
    limited: IntArray = np.minimum(num_predictions, num_maskable)
    return limited


def _find_units(
    ids: IntArray,
    cu_seqlens: CuSeqlens,
    is_special: BoolArray,
    vocabulary: VocabularyInfo | None,
) -> _Units:
    """Group the tokens into words; without a ``vocabulary`` each token is a unit."""
    sizes = np.diff(cu_seqlens).astype(np.int64)
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    if vocabulary is None:
        first_token, size = np.arange(len(ids)), np.ones(len(ids), np.int64)
        return _Units(first_token, size, sequence, cu_seqlens.astype(np.int64))
    starts_word = ~vocabulary.is_continuation[ids] | is_special
    # A segment truncated at its front may start inside a word. The rest of that word is a unit.
    starts_word[1:] |= is_special[:-1]
    starts_word[cu_seqlens[:-1]] = True
    first_token = np.flatnonzero(starts_word)
    size = np.diff(first_token, append=len(ids))
    return _Units(
        first_token, size, sequence[first_token], np.searchsorted(first_token, cu_seqlens)
    )


def _count_key_bits(cu_seqlens: CuSeqlens) -> tuple[np.uint64, np.uint64]:
    """Return the number of position bits and of random bits in a 64-bit sort key."""
    position_bits = int(np.diff(cu_seqlens).max(initial=1)).bit_length()
    sequence_bits = len(cu_seqlens).bit_length()
    return np.uint64(position_bits), np.uint64(64 - position_bits - sequence_bits)


def _shuffle_units(
    units: _Units, cu_seqlens: CuSeqlens, states: UInt64Array, is_maskable: BoolArray
) -> UInt64Array:
    """Shuffle the units of every sequence with one sort.

    Returns:
        Sorted keys, one for each unit, uint64 [U]. From the highest bit on, a key consists of the
        index of the unit's sequence, random bits, and the unit's position in the sequence. Units
        that must not be masked are the last units of their sequence.
    """
    position_bits, num_random_bits = _count_key_bits(cu_seqlens)
    position = (units.first_token - cu_seqlens[units.sequence]).astype(np.uint64)
    index = position * np.uint64(3) + np.uint64(_FIRST_RNG_INDEX + _RNG_ORDER)
    # The highest of the random bits is 1 for units that must not be masked, else 0. The shift
    # leaves the other random bits.
    keys = random_bits(states[units.sequence], index) >> (np.uint64(65) - num_random_bits)
    keys[~is_maskable] |= np.uint64(1) << (num_random_bits - np.uint64(1))
    keys |= units.sequence.astype(np.uint64) << num_random_bits
    keys <<= position_bits
    keys |= position
    keys.sort()
    return keys


def _unpack_keys(keys: UInt64Array, cu_seqlens: CuSeqlens) -> tuple[IntArray, IntArray]:
    """Return the sequence of each sort key, and the position in that sequence, int64."""
    position_bits, num_random_bits = _count_key_bits(cu_seqlens)
    position = keys & ((np.uint64(1) << position_bits) - np.uint64(1))
    return (keys >> (position_bits + num_random_bits)).astype(np.int64), position.astype(np.int64)


def _select_words(
    keys: UInt64Array,
    units: _Units,
    cu_seqlens: CuSeqlens,
    is_maskable: BoolArray,
    num_predictions: IntArray,
) -> IntArray:
    """Choose the words to mask, as indices into the sorted ``keys``.

    As in the original code, words are tried in random order, and a word is skipped if it has more
    tokens than the number of predictions that remain for its sequence. Each iteration tries one
    word of every sequence.
    """
    sequence, position = _unpack_keys(keys, cu_seqlens)
    word_sizes = units.size[np.searchsorted(units.first_token, cu_seqlens[sequence] + position)]
    starts = units.sequence_offsets[:-1]
    # For each sequence: the next word to try, the end of its words, and its remaining predictions.
    next_word = starts.copy()
    end = starts + np.add.reduceat(is_maskable, starts, dtype=np.int64)
    remaining = num_predictions.copy()
    selected: list[IntArray] = []
    active = np.flatnonzero((next_word < end) & (remaining > 0))
    while len(active):
        words = next_word[active]
        fits = word_sizes[words] <= remaining[active]
        selected.append(words[fits])
        remaining[active[fits]] -= word_sizes[words[fits]]
        next_word[active] += 1
        active = active[(next_word[active] < end[active]) & (remaining[active] > 0)]
    return np.concatenate(selected) if selected else np.zeros(0, np.int64)


def _replace_tokens(
    ids: IntArray,
    masked_positions: IntArray,
    cu_seqlens: CuSeqlens,
    states: UInt64Array,
    vocabulary: VocabularyInfo,
    settings: DataSettings,
) -> tuple[IntArray, IntArray, IntArray]:
    """Replace the tokens at ``masked_positions`` [P] by [MASK] or a random token, or keep them.

    Returns:
        The same values as ``mask_tokens``.
    """
    sequence = np.searchsorted(cu_seqlens, masked_positions, "right") - 1
    index = (masked_positions - cu_seqlens[sequence]).astype(np.uint64) * np.uint64(3)
    states = states[sequence]
    bits = random_bits(states, index + np.uint64(_FIRST_RNG_INDEX + _RNG_REPLACEMENT))
    # Both are drawn from the same bits, so a token that becomes [MASK] is also replaced.
    is_mask_token = draw_bernoulli(bits, settings.mask_replace_prob)
    is_replaced = draw_bernoulli(bits, settings.mask_replace_prob + settings.random_replace_prob)
    ordinary_ids = np.flatnonzero(~vocabulary.is_special)
    limits = np.full(len(masked_positions), len(ordinary_ids))
    token_bits = random_bits(states, index + np.uint64(_FIRST_RNG_INDEX + _RNG_RANDOM_TOKEN))
    random_ids = ordinary_ids[draw_uniform_integers(token_bits, limits)]
    labels = ids[masked_positions]
    new_ids = np.where(is_replaced, random_ids, labels)
    new_ids[is_mask_token] = vocabulary.mask_id
    masked_ids = ids.copy()
    masked_ids[masked_positions] = new_ids
    return masked_ids, masked_positions, labels
