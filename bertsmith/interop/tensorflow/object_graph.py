"""Names of variables in the object graph of a TensorFlow checkpoint, and keys of tensor slices.

All functions raise ValueError for malformed data.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bertsmith.interop.tensorflow.arrays import TensorSlice
from bertsmith.interop.tensorflow.protobuf import bytes_fields, string_field
from bertsmith.interop.tensorflow.sstable import name_file_in_errors

OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
#: A variable's key is its path of attributes in the object graph, followed by this suffix.
_VALUE_SUFFIX: Final = "/.ATTRIBUTES/VARIABLE_VALUE"


def keys_by_name(graph: memoryview, keys: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return the key of each variable in an object-based checkpoint, by variable name.

    A variable without a unique name is listed under its path of attributes in the object graph.

    Args:
        graph: The TrackableObjectGraph message.
        keys: The keys of the checkpoint as bytes, by their decoded text.
        path: The checkpoint file, for error messages.
    """
    with name_file_in_errors(path):
        # The checkpoint key and the full name of each serialized tensor.
        attributes = [
            (string_field(value, 3), string_field(value, 2))
            for node in bytes_fields(graph, 1)
            for value in bytes_fields(node, 2)
        ]
    names = {key: name for key, name in attributes if name and key in keys}
    counts = Counter(names.values())
    result = {}
    for key, stored_key in keys.items():
        if key == OBJECT_GRAPH:
            continue
        name = names.get(key, "")
        # All variables without a name are called "Variable", which is not unique.
        if counts[name] != 1:
            name = key.removesuffix(_VALUE_SUFFIX)
        result[name] = stored_key
    return result


def encode_slice_key(key: bytes, tensor_slice: TensorSlice) -> bytes:
    """Return the key under which a slice of the tensor ``key`` is stored.

    The key is encoded with TensorFlow's OrderedCode: 0, the name of the tensor, the number of axes,
    and the start and length of the slice along each axis. A length of -1 means the full axis.
    """
    escaped_name = key.replace(b"\0", b"\0\xff").replace(b"\xff", b"\xff\0")
    # The bytes 0 and 1 end the name. The number of axes is preceded by its size, one byte.
    result = b"\0" + escaped_name + b"\0\1" + b"\1" + bytes([len(tensor_slice)])
    for start, length in tensor_slice:
        result += _encode_ordered(start) + _encode_ordered(-1 if length is None else length)
    return result


def _encode_ordered(value: int) -> bytes:
    """Encode a signed integer as bytes that sort in the order of the integers.

    As in UTF-8, the leading bits of the first byte give the number of bytes. They are inverted for
    negative values.
    """
    magnitude = ~value if value < 0 else value
    size = 1
    while magnitude >= 1 << (7 * size - 1):
        size += 1
    plain = value.to_bytes(size, "big", signed=True)
    size_bits = 0xFF << (8 - size) & 0xFF
    return bytes([plain[0] ^ size_bits]) + plain[1:]
