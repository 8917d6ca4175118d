"""How TensorFlow names what it stores: variables of an object graph, and parts of a variable.

It never knows where the values lie. What is malformed is a ValueError.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bertsmith.interop.tensorflow.arrays import TensorSlice
from bertsmith.interop.tensorflow.protobuf import bytes_fields, string_field
from bertsmith.interop.tensorflow.sstable import name_file_in_errors

OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
#: What the key of a variable's value ends with, after the path of attributes that leads to it.
_VALUE: Final = "/.ATTRIBUTES/VARIABLE_VALUE"


def keys_by_name(graph: memoryview, keys: Mapping[str, bytes], path: Path) -> dict[str, bytes]:
    """Return the keys of an object-based checkpoint by the names of the variables.

    A variable that has no name of its own keeps the path of attributes that leads to it.
    """
    with name_file_in_errors(path):
        said = [
            (string_field(value, 3), string_field(value, 2))
            for node in bytes_fields(graph, 1)
            for value in bytes_fields(node, 2)
        ]
    known = {key: name for key, name in said if name and key in keys}
    times = Counter(known.values())
    result = {}
    for key, stored in keys.items():
        if key == OBJECT_GRAPH:
            continue
        name = known.get(key, "")
        # Unnamed variables are all called "Variable".
        result[name if times[name] == 1 else key.removesuffix(_VALUE)] = stored
    return result


def encode_slice_key(key: bytes, part: TensorSlice) -> bytes:
    """Return the key under which a part of the tensor ``key`` is stored.

    A form of numbers and texts whose order as bytes is their own: 0, the name, the number of axes,
    then begin and length of each; -1 is the whole length.
    """
    name = key.replace(b"\0", b"\0\xff").replace(b"\xff", b"\xff\0")
    result = b"\0" + name + b"\0\1" + b"\1" + bytes([len(part)])
    for start, length in part:
        result += _ordered(start) + _ordered(-1 if length is None else length)
    return result


def _ordered(value: int) -> bytes:
    """Return a number so that the order of the bytes is that of the numbers.

    The leading bits say how many bytes there are, as in UTF-8, turned over for negative ones.
    """
    size = 1
    while (~value if value < 0 else value) >= 1 << (7 * size - 1):
        size += 1
    plain = value.to_bytes(size, "big", signed=True)
    return bytes([plain[0] ^ (0xFF << (8 - size) & 0xFF)]) + plain[1:]
