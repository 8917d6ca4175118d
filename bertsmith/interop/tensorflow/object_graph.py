"""Names in TensorFlow checkpoints: variables in an object graph, and keys of tensor slices.

Malformed data raises ValueError.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bertsmith.interop.tensorflow.arrays import TensorSlice
from bertsmith.interop.tensorflow.protobuf import bytes_fields, string_field
from bertsmith.interop.tensorflow.sstable import name_file_in_errors

OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
#: Suffix of a variable's key, after the path of attributes that leads to it.
_VALUE_SUFFIX: Final = "/.ATTRIBUTES/VARIABLE_VALUE"


def keys_by_name(graph: memoryview, keys: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return the keys of an object-based checkpoint by variable name.

    Variables without a unique name are called by the path of attributes that leads to them.

    Args:
        graph: The TrackableObjectGraph message.
        keys: The checkpoint's keys, by their decoded text.
        path: The file that errors name.
    """
    with name_file_in_errors(path):
        # Checkpoint key and full name of each serialized tensor.
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
        # Unnamed variables are all called "Variable".
        result[name if counts[name] == 1 else key.removesuffix(_VALUE_SUFFIX)] = stored_key
    return result


def encode_slice_key(key: bytes, tensor_slice: TensorSlice) -> bytes:
    """Return the key under which a slice of the tensor ``key`` is stored.

    TensorFlow's OrderedCode: 0, the name, the number of axes, and start and length of each axis,
    with length -1 for the full axis.
    """
    name = key.replace(b"\0", b"\0\xff").replace(b"\xff", b"\xff\0")
    result = b"\0" + name + b"\0\1" + b"\1" + bytes([len(tensor_slice)])
    for start, length in tensor_slice:
        result += _encode_ordered(start) + _encode_ordered(-1 if length is None else length)
    return result


def _encode_ordered(value: int) -> bytes:
    """Return a signed integer as bytes that sort like the integers.

    As in UTF-8, the leading bits give the number of bytes; they are inverted for negative values.
    """
    size = 1
    while (~value if value < 0 else value) >= 1 << (7 * size - 1):
        size += 1
    plain = value.to_bytes(size, "big", signed=True)
    return bytes([plain[0] ^ (0xFF << (8 - size) & 0xFF)]) + plain[1:]
