"""Data types, shapes and slices of tensors in TensorFlow checkpoints.

All functions raise ValueError for malformed data.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bertsmith.interop.tensorflow.protobuf import bytes_fields, integer_fields

Array = NDArray[Any]
#: The start and the length of a slice along each axis. A length of None means the full axis.
TensorSlice = tuple[tuple[int, int | None], ...]

#: Values of TensorFlow's DataType enum.
DT_FLOAT, DT_STRING, _DT_BFLOAT16 = 1, 7, 14
#: Value of TensorFlow's DataType enum -> NumPy's dtype, for the supported types. bfloat16 is read
#: as uint16.
NUMPY_DTYPES: Final = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", _DT_BFLOAT16: "<u2", 19: "<f2"}
#: Maximum number of axes. Tensors of BERT have fewer axes, so a larger number means that the shape
#: is damaged.
_MAX_AXES: Final = 8


def parse_shape(data: memoryview) -> tuple[int, ...]:
    """Return the shape in a TensorShapeProto."""
    shape = tuple(integer_fields(axis).get(1, 0) for axis in bytes_fields(data, 2))
    # Negative sizes are encoded as unsigned integers of at least 2**63.
    if len(shape) > _MAX_AXES or any(size >= 1 << 63 for size in shape):
        raise ValueError(f"invalid shape {shape}")
    return shape


def parse_slice(data: memoryview) -> TensorSlice:
    """Return the slice in a TensorSliceProto."""
    extents = [integer_fields(extent) for extent in bytes_fields(data, 1)]
    return tuple((extent.get(1, 0), extent.get(2)) for extent in extents)


def slice_shape(tensor_slice: TensorSlice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a slice of a tensor with ``shape``; ValueError if it is out of bounds."""
    sizes = tuple(
        size if length is None else length
        for (_, length), size in zip(tensor_slice, shape, strict=True)
    )
    for (start, _), length, size in zip(tensor_slice, sizes, shape, strict=True):
        if start + length > size:
            raise ValueError(f"slice {tensor_slice} exceeds the tensor of shape {shape}")
    return sizes


def join_slices(shape: tuple[int, ...], slices: list[tuple[TensorSlice, Array]]) -> Array:
    """Return the tensor that consists of ``slices``; a single full slice is not copied."""
    if len(slices) == 1 and slices[0][1].shape == shape:
        return slices[0][1]
    if not slices or sum(array.size for _, array in slices) != math.prod(shape):
        raise ValueError(f"{len(slices)} slices do not cover a tensor of shape {shape}")
    tensor = np.empty(shape, dtype=slices[0][1].dtype)
    for tensor_slice, array in slices:
        starts = [start for start, _ in tensor_slice]
        extents = zip(starts, array.shape, strict=True)
        tensor[tuple(slice(start, start + size) for start, size in extents)] = array
    return tensor


def decode_array(data: memoryview, dtype: int, shape: tuple[int, ...]) -> Array:
    """Return the array in ``data``; bfloat16 is converted to float32.

    Args:
        data: The bytes of the array, which is not copied unless it is bfloat16.
        dtype: A key of ``NUMPY_DTYPES``.
        shape: The shape of the array.
    """
    array = np.frombuffer(data, dtype=NUMPY_DTYPES[dtype]).reshape(shape)
    if dtype == _DT_BFLOAT16:
        # The bits of a bfloat16 number are the upper 16 bits of a float32 number.
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
