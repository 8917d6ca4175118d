"""Random numbers that are looked up, not drawn in turn: a hash of a key and a counter.

It never knows what a number decides. Because nothing is drawn in turn, any part of an epoch can
be made alone, in any order, by any worker, and gives the same numbers on every machine and with
every version of NumPy.

The hash is the output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"), with the constants of Stafford's variant 13.
"""

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: 2**64 divided by the golden ratio, made odd: the step between two counters.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_WORD = 0xFFFFFFFFFFFFFFFF


def mix(words: UInt64Array) -> UInt64Array:
    """Scramble 64-bit words in place, one to one; return them."""
    words ^= words >> _30
    words *= _FIRST
    words ^= words >> _27
    words *= _SECOND
    words ^= words >> _31
    return words


def derive_key(*numbers: int) -> int:
    """Return one 64-bit key for a few whole numbers in order, such as (seed, epoch)."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key ^= np.uint64(number & _WORD)
        key += np.uint64(_STEP)
        mix(key)
    return int(key[0])


def init_states(key: int, counters: IntArray) -> UInt64Array:
    """Return a state [n] for each counter [n] under one key."""
    return mix(counters.astype(np.uint64) * np.uint64(_STEP) + np.uint64(key))


def random_bits(state: UInt64Array, number: int | UInt64Array) -> UInt64Array:
    """Return the random word [n] of this ``number`` from each state [n]: uniform in [0, 2**64)."""
    if isinstance(number, int):
        return mix(state + np.uint64((number + 1) * _STEP & _WORD))
    return mix(state + (number + np.uint64(1)) * np.uint64(_STEP))


def bernoulli(words: UInt64Array, share: float) -> BoolArray:
    """Return True [n] with probability ``share`` (to 2**-53)."""
    limit = round(share * 2.0**53)
    return (words >> np.uint64(11)) < np.uint64(limit)


def uniform_integers(words: UInt64Array, limits: IntArray) -> IntArray:
    """Return whole numbers [n], uniform in [0, limit) to within limit / 2**32 of a share."""
    return (((words >> _32) * limits.astype(np.uint64)) >> _32).astype(np.int64)


def fair_binomial(state: UInt64Array, first: int, counts: IntArray) -> IntArray:
    """Return how many of ``counts`` [n] fair coins fall heads, exactly binomial.

    The coins are the bits, lowest first, of the words number ``first``, ``first`` + 2, + 4, ...
    of each state (every second number, so that two runs of coins never meet).
    """
    result = np.zeros(len(state), np.int64)
    lanes = np.flatnonzero(counts > 0)
    number = first
    while len(lanes):
        left = counts[lanes] - 32 * (number - first)
        lanes, left = lanes[left > 0], left[left > 0]
        words = random_bits(state[lanes], number)
        spare = np.maximum(64 - left, 0).astype(np.uint64)
        result[lanes] += np.bitwise_count(words << spare)
        number += 2
    return result
