"""Reading and writing of protocol buffer messages by field number, without a schema.

Callers pass the field numbers of TensorFlow's .proto files.
All functions raise ValueError for malformed data.
"""

from collections.abc import Iterator

#: Maximum length of a 64-bit varint.
_MAX_VARINT_BYTES = 10


def read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    """Return the unsigned 64-bit varint at ``offset``, and the offset of the byte after it."""
    value = 0
    for index, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, offset + index + 1
    raise ValueError(f"unterminated varint at byte {offset:,}")


def read_bytes(data: memoryview, offset: int, length: int) -> memoryview:
    """Return ``length`` bytes that start at ``offset``."""
    if offset + length > len(data):
        raise ValueError(
            f"expected {length:,} bytes at byte {offset:,}, but the data has {len(data):,} bytes"
        )
    return data[offset : offset + length]


def iter_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field.

    The value is an unsigned integer for numbers, and a memoryview for messages, strings and bytes.
    """
    offset = 0
    while offset < len(data):
        tag, offset = read_varint(data, offset)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, offset = read_varint(data, offset)
            yield number, value
        elif wire_type == 2:
            length, offset = read_varint(data, offset)
            yield number, read_bytes(data, offset, length)
            offset += length
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
            yield number, int.from_bytes(read_bytes(data, offset, length), "little")
            offset += length
        else:
            raise ValueError(f"unknown wire type {wire_type} at byte {offset:,}")


def integer_fields(data: memoryview) -> dict[int, int]:
    """Return the integers of a message by field number; of repeated fields, the last value."""
    return {number: value for number, value in iter_fields(data) if isinstance(value, int)}


def bytes_fields(data: memoryview, field_number: int) -> list[memoryview]:
    """Return all values of a field of messages, strings or bytes."""
    return [
        value
        for number, value in iter_fields(data)
        if number == field_number and isinstance(value, memoryview)
    ]


def message_field(data: memoryview, field_number: int) -> memoryview:
    """Return the last value of a field with a message, a string or bytes; empty if missing."""
    values = bytes_fields(data, field_number)
    return values[-1] if values else memoryview(b"")


def string_field(data: memoryview, field_number: int) -> str:
    """Return the string in a field; "" if the field is missing."""
    return bytes(message_field(data, field_number)).decode("utf-8")


def encode_varint(value: int) -> bytes:
    """Encode an unsigned integer as a varint."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def encode_varint_field(number: int, value: int) -> bytes:
    """Return an encoded varint field; empty for 0, the default value."""
    return encode_varint(number << 3) + encode_varint(value) if value else b""


def encode_bytes_field(number: int, value: bytes) -> bytes:
    """Return an encoded field with a message, a string or bytes."""
    return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value


def encode_fixed32_field(number: int, value: int) -> bytes:
    """Return an encoded field with an integer of four bytes."""
    return encode_varint(number << 3 | 5) + value.to_bytes(4, "little")
