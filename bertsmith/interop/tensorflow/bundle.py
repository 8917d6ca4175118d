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
    STRING,
    TYPES,
    Array,
    Part,
    decoded,
    joined,
    part_of,
    part_shape,
    shape_of,
)
from bertsmith.interop.tensorflow.crc32c import crc32c, masked
from bertsmith.interop.tensorflow.objects import OBJECT_GRAPH, names_by_key, slot
from bertsmith.interop.tensorflow.table import blaming, entries, mapped
from bertsmith.interop.tensorflow.wire import messages, numbers, piece, varint

INDEX: Final = ".index"


@dataclass(frozen=True)
class Stored:
    """Where a tensor, or a part of one, lies: an index entry."""

    kind: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    parts: tuple[Part, ...]


class TensorBundle:
    """A V2 checkpoint opened for reading: the index is read, the data when it is asked for.

    ``shapes``: of each tensor by its name, in the order of the index; for an object-based
    checkpoint by the name that the variable had, where the object graph says it.
    """

    def __init__(self, path: Path) -> None:
        """Read the index file ``path``. Raises ModelError."""
        self.path = path
        self.form = "V2"
        table = entries(path)
        with blaming(path):
            key, header = next(table, (b"?", memoryview(b"")))
            said = numbers(header)
            self._shards = said.get(1, 0)
            version = numbers((messages(header, 3) or [memoryview(b"")])[-1])
            if key or not self._shards:
                raise ValueError("its first entry is no header of a checkpoint")
            if said.get(2, 0) or version.get(2, 0) > 1:
                raise ValueError("big-endian, or of a later form than 1")
            stored = {key: _stored(value) for key, value in table}
        # What begins with a zero byte is a part of a tensor; its entry names it.
        self._parts = {key: entry for key, entry in stored.items() if key[:1] == b"\0"}
        with blaming(path):
            self._keys = {key.decode(): key for key in stored if key not in self._parts}
        self._stored = stored
        if OBJECT_GRAPH in self._keys:
            self.form = "object-based"
            self._keys = names_by_key(self._graph(), self._keys, path)
        self.shapes = {name: stored[key].shape for name, key in self._keys.items()}

    def check(self, names: Iterable[str]) -> None:
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
            with blaming(file):
                data = piece(mapped(file), entry.offset, entry.size)
                if masked(crc32c(data)) != entry.checksum:
                    raise ValueError(f"the checksum of the tensor {name!r} does not agree")
                parts.append((part, decoded(data, entry.kind, entry.shape)))
        with blaming(self.path):
            return joined(whole.shape, parts)

    def _pieces(self, name: str) -> dict[Part, Stored]:
        """Return a tensor's entries by what they are a part of; mostly one, of all of it."""
        key = self._keys[name]
        whole = self._stored[key]
        if not whole.parts:
            return {(): whole}
        found = {}
        for part in whole.parts:
            entry = self._parts.get(slot(key, part))
            with blaming(self.path):
                if entry is None:
                    raise ValueError(f"the part {part} of the tensor {name!r} is missing")
                if entry.shape != part_shape(part, whole.shape):
                    raise ValueError(f"the part {part} of {name!r} has shape {entry.shape}")
            found[part] = entry
        return found

    def _file(self, entry: Stored) -> Path:
        prefix = self.path.name.removesuffix(INDEX)
        return self.path.with_name(f"{prefix}.data-{entry.shard:05d}-of-{self._shards:05d}")

    def _room(self, name: str, entry: Stored) -> Path:
        """Return the data file of an entry, after checking that it can hold what is promised."""
        file = self._file(entry)
        if entry.kind not in TYPES:
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
        wanted = math.prod(entry.shape) * int(TYPES[entry.kind][2])
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
        with blaming(file):
            data = piece(mapped(file), entry.offset, entry.size)
            length, place = varint(data, 0)
            summed = length.to_bytes(4, "little") + bytes(data[place:])
            if entry.kind != STRING or masked(crc32c(summed)) != entry.checksum:
                raise ValueError("the checksum of the object graph does not agree")
            return piece(data, place + 4, length)


def _stored(data: memoryview) -> Stored:
    said = numbers(data)
    shape = (messages(data, 2) or [memoryview(b"")])[-1]
    return Stored(
        kind=said.get(1, 0),
        shape=shape_of(shape),
        shard=said.get(3, 0),
        offset=said.get(4, 0),
        size=said.get(5, 0),
        checksum=said.get(6, 0),
        parts=tuple(part_of(part) for part in messages(data, 7)),
    )
