"""TensorFlow's V2 checkpoints: an index that is a sorted table, and flat files of data.

It never knows what a tensor is for, and never needs TensorFlow.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow.arrays import (
    DT_STRING,
    NUMPY_DTYPES,
    Array,
    TensorSlice,
    decode_array,
    join_slices,
    parse_shape,
    parse_slice,
    slice_shape,
)
from bertsmith.interop.tensorflow.crc32c import crc32c, mask_crc
from bertsmith.interop.tensorflow.object_graph import OBJECT_GRAPH, encode_slice_key, keys_by_name
from bertsmith.interop.tensorflow.protobuf import (
    bytes_fields,
    integer_fields,
    read_bytes,
    read_varint,
)
from bertsmith.interop.tensorflow.sstable import map_file, name_file_in_errors, read_entries

INDEX_SUFFIX: Final = ".index"


@dataclass(frozen=True)
class Stored:
    """Where a tensor, or a part of one, lies: an index entry."""

    kind: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    parts: tuple[TensorSlice, ...]


class CheckpointV2:
    """A V2 checkpoint opened for reading: the index is read, the data when it is asked for.

    ``shapes``: of each tensor by its name, in the order of the index; for an object-based
    checkpoint by the name that the variable had, where the object graph says it.
    """

    def __init__(self, path: Path) -> None:
        """Read the index file ``path``. Raises ModelError."""
        self.path = path
        self.format_name = "V2"
        table = read_entries(path)
        with name_file_in_errors(path):
            key, header = next(table, (b"?", memoryview(b"")))
            said = integer_fields(header)
            self._shards = said.get(1, 0)
            version = integer_fields((bytes_fields(header, 3) or [memoryview(b"")])[-1])
            if key or not self._shards:
                raise ValueError("its first entry is no header of a checkpoint")
            if said.get(2, 0) or version.get(2, 0) > 1:
                raise ValueError("big-endian, or of a later form than 1")
            stored = {key: _stored(value) for key, value in table}
        # What begins with a zero byte is a part of a tensor; its entry names it.
        self._parts = {key: entry for key, entry in stored.items() if key[:1] == b"\0"}
        with name_file_in_errors(path):
            self._keys = {key.decode(): key for key in stored if key not in self._parts}
        self._stored = stored
        if OBJECT_GRAPH in self._keys:
            self.format_name = "object-based"
            self._keys = keys_by_name(self._graph(), self._keys, path)
        self.shapes = {name: stored[key].shape for name, key in self._keys.items()}

    def check_data(self, names: Iterable[str]) -> None:
        """Raise ModelError unless the data of these tensors is there, as long as it should be."""
        for name in names:
            for entry in self._pieces(name).values():
                self._room(name, entry)

    def read(self, name: str) -> Array:
        """Return a tensor, its checksum verified; it is mapped where it can be, not copied.

        float32 for bfloat16, else as stored. Raises ModelError.
        """
        whole = self._stored[self._keys[name]]
        parts = []
        for part, entry in self._pieces(name).items():
            file = self._room(name, entry)
            with name_file_in_errors(file):
                data = read_bytes(map_file(file), entry.offset, entry.size)
                if mask_crc(crc32c(data)) != entry.checksum:
                    raise ValueError(f"the checksum of the tensor {name!r} does not agree")
                parts.append((part, decode_array(data, entry.kind, entry.shape)))
        with name_file_in_errors(self.path):
            return join_slices(whole.shape, parts)

    def _pieces(self, name: str) -> dict[TensorSlice, Stored]:
        """Return a tensor's entries by what they are a part of; mostly one, of all of it."""
        key = self._keys[name]
        whole = self._stored[key]
        if not whole.parts:
            return {(): whole}
        found = {}
        for part in whole.parts:
            entry = self._parts.get(encode_slice_key(key, part))
            with name_file_in_errors(self.path):
                if entry is None:
                    raise ValueError(f"the part {part} of the tensor {name!r} is missing")
                if entry.shape != slice_shape(part, whole.shape):
                    raise ValueError(f"the part {part} of {name!r} has shape {entry.shape}")
            found[part] = entry
        return found

    def _file(self, entry: Stored) -> Path:
        prefix = self.path.name.removesuffix(INDEX_SUFFIX)
        return self.path.with_name(f"{prefix}.data-{entry.shard:05d}-of-{self._shards:05d}")

    def _room(self, name: str, entry: Stored) -> Path:
        """Return the data file of an entry, after checking that it can hold what is promised."""
        file = self._file(entry)
        if entry.kind not in NUMPY_DTYPES:
            raise ModelError(f"{self.path}: the tensor {name!r} is of type {entry.kind}, no number")
        if not file.is_file():
            raise ModelError(
                f"{file}: no such file, and the tensor {name!r} is in it; "
                f"copy it to where {self.path.name} stands"
            )
        end, length = entry.offset + entry.size, file.stat().st_size
        if end > length:
            raise ModelError(
                f"{file}: cut off: it has {length:,} bytes, and the tensor {name!r} ends at byte "
                f"{end:,}; get the file again"
            )
        wanted = math.prod(entry.shape) * int(NUMPY_DTYPES[entry.kind][2])
        if entry.size != wanted:
            raise ModelError(
                f"{self.path}: the tensor {name!r} of shape {entry.shape} takes {wanted:,} bytes, "
                f"but the index says {entry.size:,}"
            )
        return file

    def _graph(self) -> memoryview:
        """Return the object graph: one text, its length in front, and that one's checksum."""
        entry = self._stored[self._keys[OBJECT_GRAPH]]
        file = self._file(entry)
        with name_file_in_errors(file):
            data = read_bytes(map_file(file), entry.offset, entry.size)
            length, place = read_varint(data, 0)
            summed = length.to_bytes(4, "little") + bytes(data[place:])
            if entry.kind != DT_STRING or mask_crc(crc32c(summed)) != entry.checksum:
                raise ValueError("the checksum of the object graph does not agree")
            return read_bytes(data, place + 4, length)


def _stored(data: memoryview) -> Stored:
    said = integer_fields(data)
    shape = (bytes_fields(data, 2) or [memoryview(b"")])[-1]
    return Stored(
        kind=said.get(1, 0),
        shape=parse_shape(shape),
        shard=said.get(3, 0),
        offset=said.get(4, 0),
        size=said.get(5, 0),
        checksum=said.get(6, 0),
        parts=tuple(parse_slice(part) for part in bytes_fields(data, 7)),
    )
