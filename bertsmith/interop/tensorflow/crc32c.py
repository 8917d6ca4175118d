"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, computed with NumPy."""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

#: The generator polynomial of RFC 3720, with its bits reversed.
_POLYNOMIAL: Final = 0x82F63B78
#: Number of 4-byte words that are processed in parallel: a power of two. 64 KiB fit in the cache.
_LANES: Final = 1 << 14
_ALL_ONES: Final = 0xFFFFFFFF
#: The constant that LevelDB adds to masked CRCs.
_MASK_DELTA: Final = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``.

    A CRC is linear: it is the xor of the CRCs of all 4-byte words, where each word is followed by
    zeros in place of the words after it. The words are therefore arranged in rows of ``_LANES``
    words. All columns are reduced in parallel, row by row. Then the first half of the columns is
    combined with the second half until one column is left.
    """
    view = memoryview(data).cast("B")
    if len(view) < 4:
        return _crc_bitwise(view)
    row_bytes = 4 * _LANES
    # The head contains the bytes before the first full row. It is padded with leading zeros, which
    # do not change a CRC whose register starts at 0. A register that starts with all bits set is
    # equivalent to inverting the first four bytes.
    head_bytes = len(view) % row_bytes
    if head_bytes < 4:
        # The head must contain the first four bytes.
        head_bytes += row_bytes
    head = np.zeros(2 * row_bytes, dtype=np.uint8)
    start = len(head) - head_bytes
    head[start:] = np.frombuffer(view[:head_bytes], dtype=np.uint8)
    head[start : start + 4] ^= 0xFF
    first_row, lanes = head.view("<u4").reshape(2, _LANES).astype(np.uint32)
    lanes ^= _append_zeros(first_row, _LANES)
    rows = np.frombuffer(view[head_bytes:], dtype="<u4").reshape(-1, _LANES)
    for row in rows:
        lanes = _append_zeros(lanes, _LANES)
        lanes ^= row
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = _append_zeros(lanes[:half], half) ^ lanes[half:]
    return int(_append_zeros(lanes, 1)[0]) ^ _ALL_ONES


def mask_crc(crc: int) -> int:
    """Return the masked form in which LevelDB and TensorFlow store a CRC."""
    rotated = crc >> 15 | crc << 17
    return (rotated + _MASK_DELTA) & _ALL_ONES


def _crc_bitwise(data: memoryview) -> int:
    """Return the CRC-32C of a few bytes."""
    crc = _ALL_ONES
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _ALL_ONES


def _append_zeros(registers: Words, num_words: int) -> Words:
    """Return each CRC register after processing ``num_words`` words of zeros, a power of two."""
    low, high = _zero_tables(num_words.bit_length() - 1)
    result: Words = low.take(registers & 0xFFFF)
    result ^= high.take(registers >> 16)
    return result


@cache
def _zero_tables(power: int) -> tuple[Words, Words]:
    """Return tables for the effect of 2**power words of zeros on a CRC register.

    Returns:
        The tables for the low and for the high 16 bits of the register, each uint32 [65536].
    """
    columns = _zero_matrix(power)
    tables = []
    for half in (columns[:16], columns[16:]):
        table = np.zeros(1, dtype=np.uint32)
        for column in half:
            table = np.concatenate([table, table ^ column])
        tables.append(table)
    return tables[0], tables[1]


@cache
def _zero_matrix(power: int) -> Words:
    """Return the effect of 2**power words of zeros on each bit of a register, uint32 [32]."""
    if power:
        # The effect of half the zeros, applied twice.
        matrix = _zero_matrix(power - 1)
        # The axes are input bit and output bit.
        bits = matrix[:, None] >> np.arange(32, dtype=np.uint32) & 1
        squared_matrix: Words = np.bitwise_xor.reduce(
            np.where(bits == 1, matrix, np.uint32(0)), axis=1
        )
        return squared_matrix
    columns = []
    for bit in range(32):
        register = 1 << bit
        for _ in range(32):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
        columns.append(register)
    return np.array(columns, dtype=np.uint32)
