"""Protocol buffers on the wire: the numbered fields of a message, both ways.

It never knows what a field means. What is malformed is a ValueError.
"""

from collections.abc import Iterator

#: More than 64 bits are no number.
_LONGEST_VARINT = 10


def read_varint(data: memoryview, place: int) -> tuple[int, int]:
    """Return the unsigned 64-bit varint at ``place``, and the place after it."""
    value = 0
    for index, byte in enumerate(data[place : place + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place + index + 1
    raise ValueError(f"a number at byte {place:,} does not end")


def read_bytes(data: memoryview, place: int, length: int) -> memoryview:
    """Return the ``length`` bytes at ``place``."""
    if place + length > len(data):
        raise ValueError(f"{length:,} bytes were promised at byte {place:,} of {len(data):,}")
    return data[place : place + length]


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield each field's number and value: an unsigned int, or the bytes of a longer value."""
    place = 0
    while place < len(data):
        tag, place = read_varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = read_varint(data, place)
            yield number, value
        elif kind == 2:
            length, place = read_varint(data, place)
            yield number, read_bytes(data, place, length)
            place += length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            yield number, int.from_bytes(read_bytes(data, place, length), "little")
            place += length
        else:
            raise ValueError(f"a field of the unknown wire type {kind} at byte {place:,}")


def integer_fields(data: memoryview) -> dict[int, int]:
    """Return the number fields of a message; of one that is repeated the last."""
    return {number: value for number, value in fields(data) if isinstance(value, int)}


def bytes_fields(data: memoryview, wanted: int) -> list[memoryview]:
    """Return the values of the repeated field ``wanted`` of messages, texts or bytes, in order."""
    return [
        value
        for number, value in fields(data)
        if number == wanted and isinstance(value, memoryview)
    ]


def string_field(data: memoryview, wanted: int) -> str:
    """Return the text field ``wanted``, an empty one if there is none."""
    found = bytes_fields(data, wanted)
    return bytes(found[-1]).decode("utf-8") if found else ""


def encode_varint(value: int) -> bytes:
    """Return an unsigned varint."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def encode_varint_field(number: int, value: int) -> bytes:
    """Return a varint field; nothing for 0, which is what a field without a value says."""
    return encode_varint(number << 3) + encode_varint(value) if value else b""


def encode_bytes_field(number: int, value: bytes) -> bytes:
    """Return a field of a message, a text or bytes."""
    return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value


def encode_fixed32_field(number: int, value: int) -> bytes:
    """Return a field of four bytes."""
    return encode_varint(number << 3 | 5) + value.to_bytes(4, "little")
