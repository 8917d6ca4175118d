"""Random numbers that are looked up, not drawn in turn: a hash of a key and a counter.

It never knows what a number decides. Because nothing is drawn in turn, any part of an epoch can
be made alone, in any order, by any worker, and gives the same numbers on every machine and with
every version of NumPy.

The hash is the output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"), with the constants of Stafford's variant 13.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: 2**64 divided by the golden ratio, made odd: the step between two counters.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_WORD = 0xFFFFFFFFFFFFFFFF


def mix(words: Words) -> Words:
    """Scramble 64-bit words in place, one to one; return them."""
    words ^= words >> _30
    words *= _FIRST
    words ^= words >> _27
    words *= _SECOND
    words ^= words >> _31
    return words


def key_of(*numbers: int) -> int:
    """Return one 64-bit key for a few whole numbers in order, such as (seed, epoch)."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key ^= np.uint64(number & _WORD)
        key += np.uint64(_STEP)
        mix(key)
    return int(key[0])


def states(key: int, counters: Ints) -> Words:
    """Return a state [n] for each counter [n] under one key."""
    return mix(counters.astype(np.uint64) * np.uint64(_STEP) + np.uint64(key))


def draw(state: Words, number: int | Words) -> Words:
    """Return the random word [n] of this ``number`` from each state [n]: uniform in [0, 2**64)."""
    if isinstance(number, int):
        return mix(state + np.uint64((number + 1) * _STEP & _WORD))
    return mix(state + (number + np.uint64(1)) * np.uint64(_STEP))


def chance(words: Words, share: float) -> Flags:
    """Return True [n] with probability ``share`` (to 2**-53)."""
    limit = round(share * 2.0**53)
    return (words >> np.uint64(11)) < np.uint64(limit)


def below(words: Words, limits: Ints) -> Ints:
    """Return whole numbers [n], uniform in [0, limit) to within limit / 2**32 of a share."""
    return (((words >> _32) * limits.astype(np.uint64)) >> _32).astype(np.int64)


def heads(state: Words, first: int, counts: Ints) -> Ints:
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
        words = draw(state[lanes], number)
        spare = np.maximum(64 - left, 0).astype(np.uint64)
        result[lanes] += np.bitwise_count(words << spare)
        number += 2
    return result
