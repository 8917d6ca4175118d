"""Reading and writing of LevelDB's sorted tables, the format of TensorFlow's checkpoint indexes.

A table consists of blocks of sorted keys and values, an index block with the last key and the
position of each block, and a footer with the position of the index block. Within a block, a key is
stored without the prefix that it shares with the previous key. Every block has a checksum.
"""

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow.crc32c import crc32c, mask_crc
from bertsmith.interop.tensorflow.protobuf import encode_varint, read_bytes, read_varint

MAGIC: Final = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER_BYTES: Final = 48
#: Each block is followed by one byte for the compression type and four bytes for the checksum.
_TRAILER_BYTES: Final = 5
#: Maximum length of a key and maximum number of entries, so that a small damaged file cannot use
#: much memory. The checkpoint of a BERT with its optimizer state is far below these limits.
_MAX_KEY_BYTES, _MAX_ENTRIES = 1024, 1 << 16
#: LevelDB's defaults: every 16th key is stored with its prefix, and a block has about 4 KiB.
_RESTART_INTERVAL, _BLOCK_BYTES = 16, 4096


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Convert ValueError and OSError to a ModelError whose message contains the file name."""
    try:
        yield
    except ValueError as error:
        raise ModelError(
            f"{path}: the file is damaged or not a TensorFlow checkpoint: {error}; download it "
            "again"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


def map_file(path: Path) -> memoryview:
    """Return the memory-mapped bytes of a file.

    The mapping is copy-on-write, because NumPy and PyTorch warn about read-only memory.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def is_table(path: Path) -> bool:
    """Return whether a file ends with the magic number of sorted tables."""
    with name_file_in_errors(path), path.open("rb") as file:
        file.seek(max(path.stat().st_size - len(MAGIC), 0))
        return file.read() == MAGIC


def read_entries(path: Path) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the keys and values of a table in order, after verifying each block's checksum.

    Raises:
        ModelError: The file is not a sorted table, or is damaged.
    """
    with name_file_in_errors(path):
        data = map_file(path)
        if len(data) < _FOOTER_BYTES or data[-len(MAGIC) :] != MAGIC:
            raise ValueError("the magic number of a sorted table is missing at the end")
        footer = data[-_FOOTER_BYTES:]
        _, offset = _read_handle(footer, 0)
        index_handle, _ = _read_handle(footer, offset)
        block_end = 0
        last_key = b""
        count = 0
        for _, value in _iter_block(_read_block(data, index_handle)):
            handle, _ = _read_handle(value, 0)
            block_offset, block_size = handle
            # With overlapping blocks, a small file could have any number of entries.
            if block_offset < block_end:
                raise ValueError(f"the block at byte {block_offset:,} overlaps the previous block")
            block_end = block_offset + block_size
            for key, content in _iter_block(_read_block(data, handle)):
                count += 1
                if count > _MAX_ENTRIES:
                    raise ValueError(f"there are more than {_MAX_ENTRIES:,} entries")
                if count > 1 and key <= last_key:
                    raise ValueError(f"entry {count:,} is out of order")
                last_key = key
                yield key, content


def _read_handle(data: memoryview, offset: int) -> tuple[tuple[int, int], int]:
    """Return the offset and size of a block, and the offset of the byte after the handle."""
    block_offset, offset = read_varint(data, offset)
    block_size, offset = read_varint(data, offset)
    return (block_offset, block_size), offset


def _read_block(data: memoryview, handle: tuple[int, int]) -> memoryview:
    """Return the bytes of a block after verifying its checksum."""
    offset, size = handle
    stored = read_bytes(data, offset, size + _TRAILER_BYTES)
    expected = int.from_bytes(stored[size + 1 :], "little")
    if mask_crc(crc32c(stored[: size + 1])) != expected:
        raise ValueError(f"wrong checksum of the block at byte {offset:,}")
    compression_type = stored[size]
    if compression_type:
        raise ValueError(
            f"the block at byte {offset:,} is compressed (type {compression_type}, 1 is snappy), "
            "which TensorFlow does not write and this reader does not support"
        )
    return stored[:size]


def _iter_block(block: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the keys and values of a block."""
    if len(block) < 4:
        raise ValueError("a block is too short")
    num_restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * num_restarts
    if end < 0:
        raise ValueError("a block is too short for its restart points")
    body = block[:end]
    offset = 0
    key = b""
    while offset < end:
        shared_length, offset = read_varint(body, offset)
        suffix_length, offset = read_varint(body, offset)
        value_length, offset = read_varint(body, offset)
        if shared_length > len(key) or shared_length + suffix_length > _MAX_KEY_BYTES:
            raise ValueError(f"invalid key of {shared_length + suffix_length:,} bytes")
        key = key[:shared_length] + bytes(read_bytes(body, offset, suffix_length))
        offset += suffix_length
        yield key, read_bytes(body, offset, value_length)
        offset += value_length


def encode_table(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a table; ``entries`` are pairs of key and value, sorted by key."""
    blocks: list[list[tuple[bytes, bytes]]] = []
    # The first entry starts a block.
    size = _BLOCK_BYTES
    for key, value in entries:
        if size >= _BLOCK_BYTES:
            blocks.append([])
            size = 0
        blocks[-1].append((key, value))
        size += len(key) + len(value)
    result = bytearray()
    index = [(block[-1][0], _append_block(result, block)) for block in blocks]
    metaindex_handle = _append_block(result, [])
    footer = metaindex_handle + _append_block(result, index)
    return bytes(result) + footer.ljust(_FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC


def _count_shared_bytes(key: bytes, other_key: bytes) -> int:
    """Return the length of the common prefix of two keys."""
    length = 0
    while length < min(len(key), len(other_key)) and key[length] == other_key[length]:
        length += 1
    return length


def _append_block(file: bytearray, entries: list[tuple[bytes, bytes]]) -> bytes:
    """Append a block to ``file``, and return the encoded offset and size of the block."""
    block = bytearray()
    restarts = [0]
    last_key = b""
    for index, (key, value) in enumerate(entries):
        shared_length = 0
        if index % _RESTART_INTERVAL:
            shared_length = _count_shared_bytes(key, last_key)
        elif index:
            restarts.append(len(block))
        for length in (shared_length, len(key) - shared_length, len(value)):
            block += encode_varint(length)
        block += key[shared_length:] + value
        last_key = key
    # The block ends with the offsets of the entries with full keys, and the number of offsets.
    for number in (*restarts, len(restarts)):
        block += number.to_bytes(4, "little")
    handle = encode_varint(len(file)) + encode_varint(len(block))
    # The compression type 0 means no compression.
    block.append(0)
    file += block + mask_crc(crc32c(bytes(block))).to_bytes(4, "little")
    return handle
