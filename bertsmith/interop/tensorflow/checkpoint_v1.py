"""TensorFlow's V1 checkpoints: one file, a sorted table that holds names and values alike.

It never knows what a tensor is for, and never needs TensorFlow.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow.arrays import (
    DT_FLOAT,
    Array,
    TensorSlice,
    decode_array,
    join_slices,
    parse_shape,
    parse_slice,
    slice_shape,
)
from bertsmith.interop.tensorflow.protobuf import bytes_fields, integer_fields, string_field
from bertsmith.interop.tensorflow.sstable import name_file_in_errors, read_entries


class CheckpointV1:
    """A V1 checkpoint opened for reading: walked through and verified once, mapped, not loaded.

    ``shapes``: of each tensor by its name, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the file ``path``. Raises ModelError."""
        self.path = path
        self.format_name = "V1"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, int] = {}
        self._values: dict[str, list[tuple[TensorSlice, memoryview]]] = {}
        table = read_entries(path)
        with name_file_in_errors(path):
            key, head = next(table, (b"?", memoryview(b"")))
            if key:
                raise ValueError("its first entry is no list of tensors")
            for said in [
                tensor for meta in bytes_fields(head, 1) for tensor in bytes_fields(meta, 1)
            ]:
                name = string_field(said, 1)
                self.shapes[name] = parse_shape((bytes_fields(said, 2) or [memoryview(b"")])[-1])
                self._kinds[name] = integer_fields(said).get(3, 0)
                self._values[name] = []
            for _, value in table:
                for one in bytes_fields(value, 2):
                    part, data = bytes_fields(one, 2), bytes_fields(one, 3)
                    if len(part) != 1 or len(data) != 1 or string_field(one, 1) not in self._values:
                        raise ValueError("an entry without part, data or name")
                    self._values[string_field(one, 1)].append((parse_slice(part[0]), data[0]))

    def check_data(self, names: Iterable[str]) -> None:
        """Raise ModelError unless the data of these tensors is there, as long as it should be."""
        for name in names:
            if self._kinds[name] != DT_FLOAT:
                raise ModelError(
                    f"{self.path}: the tensor {name!r} is of type {self._kinds[name]}; "
                    "expected float32 (1), the type of the weights in a V1 checkpoint"
                )
            with name_file_in_errors(self.path):
                sizes = [len(self._packed(data)) for _, data in self._values[name]]
                if sum(sizes) != 4 * math.prod(self.shapes[name]):
                    raise ValueError(
                        f"the tensor {name!r} of shape {self.shapes[name]} has {sum(sizes):,} bytes"
                    )

    def read(self, name: str) -> Array:
        """Return a tensor, float32, mapped where it can be, not copied. Raises ModelError."""
        self.check_data([name])
        shape = self.shapes[name]
        with name_file_in_errors(self.path):
            parts = [
                (part, decode_array(self._packed(data), DT_FLOAT, slice_shape(part, shape)))
                for part, data in self._values[name]
            ]
            return join_slices(shape, parts)

    @staticmethod
    def _packed(data: memoryview) -> memoryview:
        """Return the float32 values of a TensorProto, which lie one after another."""
        found = bytes_fields(data, 5)
        if len(found) != 1:
            raise ValueError("a tensor whose values do not lie in one piece")
        return found[0]
