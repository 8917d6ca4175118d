"""Protocol buffers on the wire: the numbered fields of a message, both ways.

It never knows what a field means. What is malformed is a ValueError.
"""

from collections.abc import Iterator

#: More than 64 bits are no number.
_LONGEST_VARINT = 10


def varint(data: memoryview, place: int) -> tuple[int, int]:
    """Return the unsigned 64-bit varint at ``place``, and the place after it."""
    value = 0
    for index, byte in enumerate(data[place : place + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place + index + 1
    raise ValueError(f"a number at byte {place:,} does not end")


def piece(data: memoryview, place: int, length: int) -> memoryview:
    """Return the ``length`` bytes at ``place``."""
    if place + length > len(data):
        raise ValueError(f"{length:,} bytes were promised at byte {place:,} of {len(data):,}")
    return data[place : place + length]


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield each field's number and value: an unsigned int, or the bytes of a longer value."""
    place = 0
    while place < len(data):
        tag, place = varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = varint(data, place)
            yield number, value
        elif kind == 2:
            length, place = varint(data, place)
            yield number, piece(data, place, length)
            place += length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            yield number, int.from_bytes(piece(data, place, length), "little")
            place += length
        else:
            raise ValueError(f"a field of the unknown wire type {kind} at byte {place:,}")


def numbers(data: memoryview) -> dict[int, int]:
    """Return the number fields of a message; of one that is repeated the last."""
    return {number: value for number, value in fields(data) if isinstance(value, int)}


def messages(data: memoryview, wanted: int) -> list[memoryview]:
    """Return the values of the repeated field ``wanted`` of messages, texts or bytes, in order."""
    return [
        value
        for number, value in fields(data)
        if number == wanted and isinstance(value, memoryview)
    ]


def text(data: memoryview, wanted: int) -> str:
    """Return the text field ``wanted``, an empty one if there is none."""
    found = messages(data, wanted)
    return bytes(found[-1]).decode("utf-8") if found else ""


def write_varint(value: int) -> bytes:
    """Return an unsigned varint."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def write_number(number: int, value: int) -> bytes:
    """Return a varint field; nothing for 0, which is what a field without a value says."""
    return write_varint(number << 3) + write_varint(value) if value else b""


def write_bytes(number: int, value: bytes) -> bytes:
    """Return a field of a message, a text or bytes."""
    return write_varint(number << 3 | 2) + write_varint(len(value)) + value


def write_fixed32(number: int, value: int) -> bytes:
    """Return a field of four bytes."""
    return write_varint(number << 3 | 5) + value.to_bytes(4, "little")
