"""What the forms of checkpoints share: the types of values, shapes, and parts of a tensor.

It never opens a file. What is malformed is a ValueError.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bertsmith.interop.tensorflow.protobuf import bytes_fields, integer_fields

Array = NDArray[Any]
#: A part of a tensor: where it begins along each axis, and its length; None is the whole axis.
TensorSlice = tuple[tuple[int, int | None], ...]

DT_FLOAT, DT_STRING, BFLOAT16 = 1, 7, 14
#: TensorFlow's numbers of the types that are read, and how they lie on disk.
NUMPY_DTYPES: Final = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", BFLOAT16: "<u2", 19: "<f2"}
#: No tensor of a BERT has as many axes, nor do these make a number of elements without end.
_MOST_AXES: Final = 8


def parse_shape(data: memoryview) -> tuple[int, ...]:
    """Return the shape that a TensorShapeProto says."""
    shape = tuple(integer_fields(axis).get(1, 0) for axis in bytes_fields(data, 2))
    # A negative size is a number beyond 2**63 on the wire.
    if len(shape) > _MOST_AXES or any(size >= 1 << 63 for size in shape):
        raise ValueError(f"the shape {shape}")
    return shape


def parse_slice(data: memoryview) -> TensorSlice:
    """Return the part that a TensorSliceProto says."""
    extents = [integer_fields(extent) for extent in bytes_fields(data, 1)]
    return tuple((extent.get(1, 0), extent.get(2)) for extent in extents)


def slice_shape(part: TensorSlice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a part of a tensor, after checking that it lies inside."""
    sizes = tuple(
        size if length is None else length for (_, length), size in zip(part, shape, strict=True)
    )
    for (start, _), length, size in zip(part, sizes, shape, strict=True):
        if start + length > size:
            raise ValueError(f"the part {part} of a tensor of shape {shape}")
    return sizes


def join_slices(shape: tuple[int, ...], parts: list[tuple[TensorSlice, Array]]) -> Array:
    """Return a tensor of its parts; one part that is the whole is returned as it is."""
    if len(parts) == 1 and parts[0][1].shape == shape:
        return parts[0][1]
    if not parts or sum(array.size for _, array in parts) != math.prod(shape):
        raise ValueError(f"{len(parts)} parts that do not make a tensor of shape {shape}")
    whole = np.empty(shape, dtype=parts[0][1].dtype)
    for part, array in parts:
        starts = [start for start, _ in part]
        sizes = zip(starts, array.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in sizes)] = array
    return whole


def decode_array(data: memoryview, kind: int, shape: tuple[int, ...]) -> Array:
    """Return the array that ``data`` holds; bfloat16, which numpy does not know, as float32."""
    array = np.frombuffer(data, dtype=NUMPY_DTYPES[kind]).reshape(shape)
    if kind == BFLOAT16:
        # The upper half of a float32 is what a bfloat16 is.
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
