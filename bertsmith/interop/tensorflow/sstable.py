"""Sorted tables, the files of keys and values that LevelDB invented, both ways.

They never say what a key or a value means. A table is a row of blocks, an index block that says
where each ends and begins, and a footer that says where the index block is. In a block each key
gives only what differs from the key before it; each block carries a checksum.
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
_FOOTER: Final = 48
#: After a block: one byte that says how it is compressed, four of its checksum.
_TRAILER: Final = 5
#: Far beyond what a BERT's optimizer needs, so that a small file cannot ask for much memory:
#: bytes of a key, and entries.
_LONGEST_KEY, _MOST_ENTRIES = 1024, 1 << 16
#: Keys after which a block spells one out, and the bytes of a block: LevelDB's own choices.
_RESTART, _BLOCK = 16, 4096


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Turn what is found wrong with the bytes of a file into a ModelError that names the file."""
    try:
        yield
    except ValueError as error:
        raise ModelError(
            f"{path}: damaged, or not a TensorFlow checkpoint: {error}; get the file again"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


def map_file(path: Path) -> memoryview:
    """Return a file's bytes, mapped into memory; what is not looked at takes none.

    The copy-on-write mapping is for numpy and torch, which warn of memory that is read-only.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def is_table(path: Path) -> bool:
    """Tell whether a file ends as a sorted table does."""
    with name_file_in_errors(path), path.open("rb") as file:
        file.seek(max(path.stat().st_size - len(MAGIC), 0))
        return file.read() == MAGIC


def read_entries(path: Path) -> Iterator[tuple[bytes, memoryview]]:
    """Yield every key and value of a table in order, each block's checksum verified first.

    Raises ModelError for a file that is none, or is damaged.
    """
    with name_file_in_errors(path):
        data = map_file(path)
        if len(data) < _FOOTER or data[-len(MAGIC) :] != MAGIC:
            raise ValueError("the mark of a sorted table is not at its end")
        footer = data[-_FOOTER:]
        _, place = _handle(footer, 0)
        index, _ = _handle(footer, place)
        end, last, count = 0, b"", 0
        for _, value in _pairs(_block(data, index)):
            handle, _ = _handle(value, 0)
            # Blocks that overlap would let a small file be read without end.
            if handle[0] < end:
                raise ValueError(f"the block at byte {handle[0]:,} overlaps the one before")
            end = sum(handle)
            for key, content in _pairs(_block(data, handle)):
                count += 1
                if count > _MOST_ENTRIES or (count > 1 and key <= last):
                    raise ValueError(f"entry {count:,} is one too many or out of order")
                last = key
                yield key, content


def _handle(data: memoryview, place: int) -> tuple[tuple[int, int], int]:
    """Return where a block stands, offset and size, and the place after these two."""
    offset, place = read_varint(data, place)
    size, place = read_varint(data, place)
    return (offset, size), place


def _block(data: memoryview, handle: tuple[int, int]) -> memoryview:
    """Return a block's bytes, verified."""
    offset, size = handle
    stored = read_bytes(data, offset, size + _TRAILER)
    expected = int.from_bytes(stored[size + 1 :], "little")
    if mask_crc(crc32c(stored[: size + 1])) != expected:
        raise ValueError(f"the checksum of the block at byte {offset:,} does not agree")
    if stored[size]:
        raise ValueError(
            f"the block at byte {offset:,} is compressed (kind {stored[size]}, 1 is snappy), which "
            "TensorFlow's own writers never do and this reader does not know"
        )
    return stored[:size]


def _pairs(block: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the keys and values of a block."""
    if len(block) < 4:
        raise ValueError("a block is too short")
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise ValueError("a block is too short for its restarts")
    body, place, key = block[:end], 0, b""
    while place < end:
        shared, place = read_varint(body, place)
        own, place = read_varint(body, place)
        size, place = read_varint(body, place)
        if shared > len(key) or shared + own > _LONGEST_KEY:
            raise ValueError(f"a key of {shared + own:,} bytes")
        key = key[:shared] + bytes(read_bytes(body, place, own))
        place += own
        yield key, read_bytes(body, place, size)
        place += size


def encode_table(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a table's bytes. ``pairs`` are in the order of their keys."""
    blocks: list[list[tuple[bytes, bytes]]] = []
    size = _BLOCK
    for key, value in pairs:
        if size >= _BLOCK:
            blocks.append([])
            size = 0
        blocks[-1].append((key, value))
        size += len(key) + len(value)
    result = bytearray()
    index = [(block[-1][0], _append(result, block)) for block in blocks]
    meta = _append(result, [])
    footer = meta + _append(result, index)
    return bytes(result) + footer.ljust(_FOOTER - len(MAGIC), b"\0") + MAGIC


def _append(file: bytearray, pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Append a block, and return its handle."""
    block, restarts, last = bytearray(), [0], b""
    for number, (key, value) in enumerate(pairs):
        shared = 0
        if number % _RESTART:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        elif number:
            restarts.append(len(block))
        for length in (shared, len(key) - shared, len(value)):
            block += encode_varint(length)
        block += key[shared:] + value
        last = key
    for place in (*restarts, len(restarts)):
        block += place.to_bytes(4, "little")
    handle = encode_varint(len(file)) + encode_varint(len(block))
    block.append(0)
    file += block + mask_crc(crc32c(bytes(block))).to_bytes(4, "little")
    return handle
