"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, at hundreds of megabytes a second.

It never knows what it sums up, and needs numpy only.
"""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

#: The generator polynomial of RFC 3720, bits reversed.
_POLYNOMIAL: Final = 0x82F63B78
#: Words of 4 bytes that are worked on side by side; a power of two. 64 KiB stay in the cache.
_LANES: Final = 1 << 14
_ONES: Final = 0xFFFFFFFF


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``.

    A CRC is linear: the sum (xor) of each 4-byte word, moved on by as many zero bits as stand
    between it and the end. So the words are laid out in rows of ``_LANES``, each column is summed
    by itself, a row at a time, and the columns are folded in halves at the end.
    """
    view = memoryview(data).cast("B")
    if len(view) < 4:
        return _plain(view)
    row = 4 * _LANES
    # What does not fill a row stands in front, behind zeros, which change nothing. The register
    # starts with ones: that is the same as turning the first four bytes over.
    head = len(view) % row
    head += row if head < 4 else 0
    front = np.zeros(2 * row, dtype=np.uint8)
    front[2 * row - head :] = np.frombuffer(view[:head], dtype=np.uint8)
    front[2 * row - head :][:4] ^= 0xFF
    first, lanes = front.view("<u4").reshape(2, _LANES).astype(np.uint32)
    lanes ^= _moved(first, _LANES)
    rest = np.frombuffer(view[head:], dtype="<u4").reshape(-1, _LANES)
    for words in rest:
        lanes = _moved(lanes, _LANES)
        lanes ^= words
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = _moved(lanes[:half], half) ^ lanes[half:]
    return int(_moved(lanes, 1)[0]) ^ _ONES


def mask_crc(crc: int) -> int:
    """Return how a checksum is stored, turned and shifted, so that no file is its own checksum."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


def _plain(data: memoryview) -> int:
    """Return the checksum of a few bytes, bit by bit."""
    crc = _ONES
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _ONES


def _moved(registers: Words, words: int) -> Words:
    """Return each register after ``words`` (a power of two) words of zeros."""
    low, high = _tables(words.bit_length() - 1)
    moved: Words = low.take(registers & 0xFFFF)
    moved ^= high.take(registers >> 16)
    return moved


@cache
def _tables(power: int) -> tuple[Words, Words]:
    """Return what 2**power words of zeros make of each low and each high half of a register."""
    columns = _columns(power)
    tables = []
    for part in (columns[:16], columns[16:]):
        table = np.zeros(1, dtype=np.uint32)
        for column in part:
            table = np.concatenate([table, table ^ column])
        tables.append(table)
    return tables[0], tables[1]


@cache
def _columns(power: int) -> Words:
    """Return what 2**power words of zeros make of each single bit: uint32 [32]."""
    if power:
        once = _columns(power - 1)
        bits = once[:, None] >> np.arange(32, dtype=np.uint32) & 1  # [bit before, bit after]
        twice: Words = np.bitwise_xor.reduce(np.where(bits == 1, once, np.uint32(0)), axis=1)
        return twice
    columns = []
    for bit in range(32):
        register = 1 << bit
        for _ in range(32):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
        columns.append(register)
    return np.array(columns, dtype=np.uint32)
