"""Counter-based random numbers: each number is a hash of a key and a counter.

No generator keeps state, so any part of an epoch can be computed alone, in any order and by any
worker. The numbers are the same on every machine and with every version of NumPy.

The hash is the output function of SplitMix64.
"""

import numpy as np
from numpy.typing import NDArray

from bertsmith.splitmix64 import INCREMENT, UInt64Array, mix

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_UINT64_MAX = 0xFFFFFFFFFFFFFFFF


def derive_key(*numbers: int) -> int:
    """Hash integers, such as (seed, epoch), into one 64-bit key. Their order matters."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key ^= np.uint64(number & _UINT64_MAX)
        key += np.uint64(INCREMENT)
        mix(key)
    return int(key[0])


def init_states(key: int, counters: IntArray) -> UInt64Array:
    """Return one random state per counter, uint64 [n], for counters int64 [n] under one key."""
    return mix(counters.astype(np.uint64) * np.uint64(INCREMENT) + np.uint64(key))


def random_bits(states: UInt64Array, index: int | UInt64Array) -> UInt64Array:
    """Return 64 random bits from each state: uint64 [n], uniform in [0, 2**64).

    Args:
        states: States from ``init_states``, uint64 [n].
        index: Which random value of each state to return, counted from 0: the same index for all
            states, or one index per state, uint64 [n].
    """
    if isinstance(index, int):
        return mix(states + np.uint64((index + 1) * INCREMENT & _UINT64_MAX))
    return mix(states + (index + np.uint64(1)) * np.uint64(INCREMENT))


def draw_bernoulli(bits: UInt64Array, probability: float) -> BoolArray:
    """Turn random bits, uint64 [n], into booleans [n] that are True with ``probability``.

    The probability is rounded to a multiple of 2**-53.
    """
    threshold = np.uint64(round(probability * 2.0**53))
    upper_53_bits = bits >> np.uint64(64 - 53)
    return upper_53_bits < threshold


def draw_uniform_integers(bits: UInt64Array, limits: IntArray) -> IntArray:
    """Turn random bits, uint64 [n], into integers int64 [n], uniform in [0, limits[i]).

    The relative error of a probability is at most limits[i] / 2**32.
    """
    half = np.uint64(32)
    return (((bits >> half) * limits.astype(np.uint64)) >> half).astype(np.int64)


def draw_fair_binomial(states: UInt64Array, first_index: int, counts: IntArray) -> IntArray:
    """Flip ``counts[i]`` fair coins with each of n states; return the number of heads, int64 [n].

    The flips are the bits, lowest first, of the random values with index ``first_index``,
    ``first_index`` + 2, ``first_index`` + 4, ... Every second index is used, so that two series of
    flips with consecutive first indices never share a value.
    """
    num_heads = np.zeros(len(states), np.int64)
    active = np.flatnonzero(counts > 0)
    index = first_index
    while len(active):
        # The previous indices gave 64 flips each.
        remaining = counts[active] - 64 * ((index - first_index) // 2)
        is_unfinished = remaining > 0
        active, remaining = active[is_unfinished], remaining[is_unfinished]
        bits = random_bits(states[active], index)
        num_unused = np.maximum(64 - remaining, 0).astype(np.uint64)
        num_heads[active] += np.bitwise_count(bits << num_unused)
        index += 2
    return num_heads
