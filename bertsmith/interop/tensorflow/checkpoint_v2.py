"""Reading of V2 checkpoints of TensorFlow: an index, which is a sorted table, and data shards."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

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
    message_field,
    read_bytes,
    read_varint,
)
from bertsmith.interop.tensorflow.sstable import map_file, name_file_in_errors, read_entries

INDEX_SUFFIX: Final = ".index"


@dataclass(frozen=True)
class _IndexEntry:
    """The position of a tensor or of a slice in the data shards (BundleEntryProto).

    Attributes:
        dtype: Value of TensorFlow's DataType enum.
        shape: Shape of the tensor or slice.
        shard: Number of the data file.
        offset: Offset of the first byte in the data file.
        size: Number of bytes.
        checksum: Masked CRC-32C of the bytes.
        slices: Slices of a tensor that is stored in several parts; otherwise empty.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[TensorSlice, ...]


class CheckpointV2:
    """A V2 checkpoint. Opening it reads the index; data is read on demand.

    Attributes:
        path: The index file.
        format_name: "V2" or "object-based".
        shapes: The shape of each tensor by name, in the order of the index. In an object-based
            checkpoint these are the names of variables in the object graph.
    """

    def __init__(self, path: Path) -> None:
        """Read the index file ``path``.

        Raises:
            ModelError: The file is damaged.
        """
        self.path = path
        self.format_name = "V2"
        table = read_entries(path)
        with name_file_in_errors(path):
            # The first entry has an empty key. Its value is a BundleHeaderProto message with the
            # number of shards (1), the endianness (2) and the version (3).
            first_key, header = next(table, (None, memoryview(b"")))
            header_fields = integer_fields(header)
            self._num_shards = header_fields.get(1, 0)
            version = integer_fields(message_field(header, 3))
            if first_key != b"" or not self._num_shards:
                raise ValueError("the first entry is not the header of a checkpoint")
            if header_fields.get(2, 0) or version.get(2, 0) > 1:
                raise ValueError("it is big-endian, or its format version is newer than 1")
            entries = {key: _parse_entry(value) for key, value in table}
        # Keys of slices start with a zero byte; the entry of their tensor refers to them.
        self._slices = {key: entry for key, entry in entries.items() if key[:1] == b"\0"}
        with name_file_in_errors(path):
            self._keys = {key.decode(): key for key in entries if key not in self._slices}
        self._entries = entries
        if OBJECT_GRAPH in self._keys:
            self.format_name = "object-based"
            self._keys = keys_by_name(self._read_object_graph(), self._keys, path)
        self.shapes = {name: entries[key].shape for name, key in self._keys.items()}

    def check_data(self, names: Iterable[str]) -> None:
        """Check that the data of tensors exists and is complete.

        Raises:
            ModelError: A data file is missing or too short, or the index is inconsistent.
        """
        for name in names:
            for entry in self._slice_entries(name).values():
                self._check_data_file(name, entry)

    def read(self, name: str) -> Array:
        """Return a tensor after verifying its checksum, memory-mapped if possible.

        Returns:
            The array with the stored data type, float32 for bfloat16.

        Raises:
            ModelError: The data is missing or damaged.
        """
        tensor = self._entries[self._keys[name]]
        slices = []
        for tensor_slice, entry in self._slice_entries(name).items():
            file = self._check_data_file(name, entry)
            with name_file_in_errors(file):
                data = read_bytes(map_file(file), entry.offset, entry.size)
                if mask_crc(crc32c(data)) != entry.checksum:
                    raise ValueError(f"wrong checksum of tensor {name!r}")
                slices.append((tensor_slice, decode_array(data, entry.dtype, entry.shape)))
        with name_file_in_errors(self.path):
            return join_slices(tensor.shape, slices)

    def _slice_entries(self, name: str) -> dict[TensorSlice, _IndexEntry]:
        """Return the entry of each slice of a tensor; the slice () is the full tensor."""
        key = self._keys[name]
        tensor = self._entries[key]
        if not tensor.slices:
            return {(): tensor}
        entries = {}
        for tensor_slice in tensor.slices:
            entry = self._slices.get(encode_slice_key(key, tensor_slice))
            with name_file_in_errors(self.path):
                if entry is None:
                    raise ValueError(f"slice {tensor_slice} of tensor {name!r} is missing")
                if entry.shape != slice_shape(tensor_slice, tensor.shape):
                    raise ValueError(f"slice {tensor_slice} of {name!r} has shape {entry.shape}")
            entries[tensor_slice] = entry
        return entries

    def _data_file(self, entry: _IndexEntry) -> Path:
        """Return the path of the data file with an entry's bytes."""
        prefix = self.path.name.removesuffix(INDEX_SUFFIX)
        return self.path.with_name(f"{prefix}.data-{entry.shard:05d}-of-{self._num_shards:05d}")

    def _check_data_file(self, name: str, entry: _IndexEntry) -> Path:
        """Return the data file of an entry after checking that it contains the entry's bytes."""
        file = self._data_file(entry)
        if entry.dtype not in NUMPY_DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} has data type {entry.dtype}, which is not "
                "supported; use another checkpoint"
            )
        if not file.is_file():
            raise ModelError(
                f"{file}: no such file, but it should contain tensor {name!r}; copy the file to "
                f"the folder of {self.path.name}"
            )
        end = entry.offset + entry.size
        file_size = file.stat().st_size
        if end > file_size:
            raise ModelError(
                f"{file}: the file is truncated: it has {file_size:,} bytes, but tensor {name!r} "
                f"ends at byte {end:,}; download it again"
            )
        expected = math.prod(entry.shape) * np.dtype(NUMPY_DTYPES[entry.dtype]).itemsize
        if entry.size != expected:
            raise ModelError(
                f"{self.path}: tensor {name!r} of shape {entry.shape} needs {expected:,} bytes, "
                f"but the index says {entry.size:,}; download the checkpoint again"
            )
        return file

    def _read_object_graph(self) -> memoryview:
        """Return the object graph, which is stored as a string tensor.

        A string tensor consists of its length, the checksum of the length, and the content.
        """
        entry = self._entries[self._keys[OBJECT_GRAPH]]
        file = self._data_file(entry)
        with name_file_in_errors(file):
            data = read_bytes(map_file(file), entry.offset, entry.size)
            length, offset = read_varint(data, 0)
            # For the checksum, the length has 4 bytes instead of being a varint.
            checksummed_bytes = length.to_bytes(4, "little") + bytes(data[offset:])
            if entry.dtype != DT_STRING or mask_crc(crc32c(checksummed_bytes)) != entry.checksum:
                raise ValueError("wrong checksum of the object graph")
            return read_bytes(data, offset + 4, length)


def _parse_entry(data: memoryview) -> _IndexEntry:
    """Parse a BundleEntryProto message."""
    fields = integer_fields(data)
    return _IndexEntry(
        dtype=fields.get(1, 0),
        shape=parse_shape(message_field(data, 2)),
        shard=fields.get(3, 0),
        offset=fields.get(4, 0),
        size=fields.get(5, 0),
        checksum=fields.get(6, 0),
        slices=tuple(parse_slice(tensor_slice) for tensor_slice in bytes_fields(data, 7)),
    )
