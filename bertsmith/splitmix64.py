"""The output function of SplitMix64, a hash of 64-bit integers.

Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with the constants of
Stafford's variant 13.
"""

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

#: The difference between consecutive counters: 2**64 / golden ratio, as an odd integer.
INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_27, _SHIFT_30, _SHIFT_31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mix(values: UInt64Array) -> UInt64Array:
    """Scramble 64-bit integers in place with a one-to-one function, and return them."""
    values ^= values >> _SHIFT_30
    values *= _MULTIPLIER_1
    values ^= values >> _SHIFT_27
    values *= _MULTIPLIER_2
    values ^= values >> _SHIFT_31
    return values
