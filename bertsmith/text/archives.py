"""Opens a file or stream for reading, whatever packs it: gzip, xz, bzip2, zstd or nothing.

It never knows what the unpacked bytes mean.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any, Final, cast

import zstandard

#: What packers write first, by the name of the packing.
MAGIC_BYTES: Final = {
    "gzip": b"\x1f\x8b",
    "xz": b"\xfd7zXZ\x00",
    "bzip2": b"BZh",
    "zstd": b"\x28\xb5\x2f\xfd",
}
#: File name endings of packed files.
COMPRESSION_SUFFIXES: Final = {
    ".gz": "gzip",
    ".xz": "xz",
    ".bz2": "bzip2",
    ".zst": "zstd",
    ".zstd": "zstd",
}
#: All that reading a damaged or cut-off archive can raise.
DECOMPRESSION_ERRORS: Final = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    gzip.BadGzipFile,
)

#: Bytes read at once. Large enough that the calls cost nothing, small enough to keep many open.
BUFFER_BYTES: Final = 1 << 20
#: Bytes looked at to tell what a stream holds.
HEAD_BYTES: Final = 1 << 16


class _Zstd(io.RawIOBase):
    """Zstd frames as a raw stream that, unlike ``zstandard``'s own, tells a cut-off file."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed = packed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Unpack some more; False at a sound end."""
        piece = self._rest or self._packed.read(HEAD_BYTES)
        self._rest = b""
        if not piece:
            if self._begun:
                raise EOFError("the zstd frame has no end")
            return False
        if self._frame.eof:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(self._frame.decompress(piece))
        self._begun = not self._frame.eof
        if self._frame.eof:
            self._rest = self._frame.unused_data
        return True

    def close(self) -> None:
        self._packed.close()
        super().close()


class _Rewound(io.RawIOBase):
    """A stream whose first bytes, already looked at, are given out again."""

    def __init__(self, head: bytes, rest: io.BufferedIOBase) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._head:
            count = min(len(buffer), len(self._head))
            buffer[:count] = self._head[:count]
            self._head = self._head[count:]
            return count
        # One step of unpacking: a fault in the next step does not take this one with it.
        data = self._rest.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._rest.close()
        super().close()


_OPENERS: Final[dict[str, Callable[[IO[bytes]], object]]] = {
    "gzip": lambda packed: gzip.GzipFile(fileobj=packed),
    "xz": lzma.LZMAFile,
    "bzip2": bz2.BZ2File,
    "zstd": lambda packed: io.BufferedReader(_Zstd(packed), BUFFER_BYTES),
}


def detect_compression(head: bytes) -> str | None:
    """Name the packing of a stream that begins with ``head``; None when it is not packed."""
    return next((name for name, magic in MAGIC_BYTES.items() if head.startswith(magic)), None)


def decompress(stream: IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Return the first unpacked bytes (up to HEAD) and a reader of all unpacked bytes.

    The packing is told by the content, not by the name. Raises one of DAMAGE.
    """
    buffered = cast("io.BufferedIOBase", stream)
    head = _fill_up(buffered)
    kind = detect_compression(head)
    whole = io.BufferedReader(_Rewound(head, buffered), BUFFER_BYTES)
    if kind is None:
        return head, whole
    opened = cast("io.BufferedIOBase", _OPENERS[kind](whole))
    head = _fill_up(opened)
    return head, io.BufferedReader(_Rewound(head, opened), BUFFER_BYTES)


def _fill_up(stream: io.BufferedIOBase) -> bytes:
    """Read HEAD bytes, or all there is; a pipe may give them bit by bit.

    Damage after the first bytes is met again by whoever reads on.
    """
    head = b""
    try:
        while len(head) < HEAD_BYTES and (part := stream.read1(HEAD_BYTES - len(head))):
            head += part
    except DECOMPRESSION_ERRORS:
        if not head:
            raise
    return head
