"""Reading of V1 checkpoints of TensorFlow: a single sorted table with names and values."""

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
from bertsmith.interop.tensorflow.protobuf import (
    bytes_fields,
    integer_fields,
    message_field,
    string_field,
)
from bertsmith.interop.tensorflow.sstable import name_file_in_errors, read_entries


class CheckpointV1:
    """A V1 checkpoint. Opening it verifies all checksums; values are memory-mapped.

    Attributes:
        path: The checkpoint file.
        format_name: "V1".
        shapes: The shape of each tensor by name, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the index of the file ``path``.

        Raises:
            ModelError: The file is damaged.
        """
        self.path = path
        self.format_name = "V1"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, int] = {}
        self._slices: dict[str, list[tuple[TensorSlice, memoryview]]] = {}
        entries = read_entries(path)
        with name_file_in_errors(path):
            # All values are SavedTensorSlices messages. Only the first, which has an empty key, has
            # the field meta (1); the others have the field data (2).
            first_key, header = next(entries, (None, memoryview(b"")))
            if first_key != b"":
                raise ValueError("the first entry is not a list of tensors")
            for meta in bytes_fields(header, 1):
                for tensor in bytes_fields(meta, 1):
                    self._add_tensor(tensor)
            for _, value in entries:
                for saved_slice in bytes_fields(value, 2):
                    self._add_slice(saved_slice)

    def _add_tensor(self, tensor: memoryview) -> None:
        """Add the tensor that a SavedSliceMeta message describes."""
        # The fields of the message are name (1), shape (2) and type (3).
        name = string_field(tensor, 1)
        self.shapes[name] = parse_shape(message_field(tensor, 2))
        self._dtypes[name] = integer_fields(tensor).get(3, 0)
        self._slices[name] = []

    def _add_slice(self, saved_slice: memoryview) -> None:
        """Add the values in a SavedSlice message."""
        # The fields of the message are name (1), slice (2) and data (3).
        name = string_field(saved_slice, 1)
        slices, data = bytes_fields(saved_slice, 2), bytes_fields(saved_slice, 3)
        if len(slices) != 1 or len(data) != 1 or name not in self._slices:
            raise ValueError("an entry has no slice, no data or an unknown tensor name")
        self._slices[name].append((parse_slice(slices[0]), data[0]))

    def check_data(self, names: Iterable[str]) -> None:
        """Check that the data of tensors is complete.

        Raises:
            ModelError: A tensor is not float32, or its data has the wrong size.
        """
        for name in names:
            if self._dtypes[name] != DT_FLOAT:
                raise ModelError(
                    f"{self.path}: tensor {name!r} has data type {self._dtypes[name]}, but weights "
                    "of a V1 checkpoint must have data type 1 (float32); use another checkpoint"
                )
            with name_file_in_errors(self.path):
                num_bytes = sum(len(self._float_values(data)) for _, data in self._slices[name])
                if num_bytes != 4 * math.prod(self.shapes[name]):
                    raise ValueError(
                        f"tensor {name!r} of shape {self.shapes[name]} has {num_bytes:,} bytes"
                    )

    def read(self, name: str) -> Array:
        """Return a float32 tensor, memory-mapped if possible.

        Raises:
            ModelError: The data is damaged.
        """
        self.check_data([name])
        shape = self.shapes[name]
        with name_file_in_errors(self.path):
            slices = []
            for tensor_slice, data in self._slices[name]:
                values = self._float_values(data)
                array = decode_array(values, DT_FLOAT, slice_shape(tensor_slice, shape))
                slices.append((tensor_slice, array))
            return join_slices(shape, slices)

    @staticmethod
    def _float_values(tensor: memoryview) -> memoryview:
        """Return the packed float32 values of a TensorProto."""
        values = bytes_fields(tensor, 5)  # float_val
        if len(values) != 1:
            raise ValueError("a tensor has no packed values")
        return values[0]
