"""Detects whether a stream is compressed, and decompresses gzip, xz, bzip2 and zstd."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

import zstandard

#: First bytes of a compressed stream, for each compression format.
MAGIC_BYTES: Final[dict[str, tuple[bytes, ...]]] = {
    "gzip": (b"\x1f\x8b",),
    "xz": (b"\xfd7zXZ\x00",),
    "bzip2": (b"BZh",),
    # Files of pzstd start with a skippable frame, which has any of 16 magic numbers.
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(80, 96))),
}
#: Compression format for each suffix of a file name.
COMPRESSION_SUFFIXES: Final = {
    ".gz": "gzip",
    ".xz": "xz",
    ".bz2": "bzip2",
    ".zst": "zstd",
    ".zstd": "zstd",
}
#: Exceptions that reading a damaged or truncated stream can raise.
DECOMPRESSION_ERRORS: Final = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    gzip.BadGzipFile,
)

#: Buffer size of readers, in bytes: large enough to make few calls, small enough for many open
#: files.
BUFFER_BYTES: Final = 1 << 20
#: Number of bytes examined to detect the format of a stream.
HEAD_BYTES: Final = 1 << 16


#: The largest window of zstd (``--long=31``); the default maximum of the library is 128 MiB.
_MAX_ZSTD_WINDOW_BYTES: Final = 1 << 31


def _start_zstd_frame() -> Any:
    """Return an object that decompresses one zstd frame."""
    return zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES).decompressobj()


#: For each compression, the function that opens a compressed stream over a binary file. Without
#: name and time, the same content gives the same bytes.
_COMPRESSORS: Final[dict[str, Callable[[IO[bytes]], Any]]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0),
    "xz": lambda file: lzma.LZMAFile(file, "wb"),  # noqa: SIM115 - `compress` closes it
    "bzip2": lambda file: bz2.BZ2File(file, "wb"),
    "zstd": lambda file: zstandard.ZstdCompressor().stream_writer(file, closefd=False),
}


def get_format_suffix(path: Path) -> str:
    """Return the last suffix of a file name before a compression suffix, in lowercase; or ""."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def compress(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream that compresses into a file, or the file if its name has no such suffix.

    Args:
        file: A file opened for writing. It stays open.
        path: The name whose suffix determines the compression.
    """
    compression = COMPRESSION_SUFFIXES.get(path.suffix.lower())
    if compression is None:
        yield file
        return
    compressed = _COMPRESSORS[compression](file)
    yield compressed
    # This writes the end of the archive. After an error, the file is not used.
    compressed.close()


class _ZstdReader(io.RawIOBase):
    """Decompresses zstd frames. Unlike the reader of ``zstandard``, it detects truncation."""

    def __init__(self, compressed: IO[bytes]) -> None:
        self._compressed = compressed
        self._frame = _start_zstd_frame()
        self._in_frame = False
        self._unused = b""
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count

    def _fill(self) -> bool:
        """Decompress more bytes; return False at the end of the stream.

        Raises:
            EOFError: The stream ends inside a frame.
        """
        compressed = self._unused or self._compressed.read(HEAD_BYTES)
        self._unused = b""
        if not compressed:
            if self._in_frame:
                raise EOFError("the zstd frame has no end")
            return False
        if self._frame.eof:
            self._frame = _start_zstd_frame()
        self._decompressed = memoryview(self._frame.decompress(compressed))
        self._in_frame = not self._frame.eof
        if self._frame.eof:
            self._unused = self._frame.unused_data
        return True

    def close(self) -> None:
        self._compressed.close()
        super().close()


class _RewoundReader(io.RawIOBase):
    """A stream that returns the bytes already read from another stream, then the other bytes."""

    def __init__(self, head: bytes, stream: io.BufferedIOBase) -> None:
        self._head = memoryview(head)
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._head:
            count = min(len(buffer), len(self._head))
            buffer[:count] = self._head[:count]
            self._head = self._head[count:]
            return count
        # read1 decompresses one block per call, so an error does not lose the blocks before it.
        data = self._stream.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


_DECOMPRESSORS: Final[dict[str, Callable[[IO[bytes]], object]]] = {
    "gzip": lambda stream: gzip.GzipFile(fileobj=stream),
    "xz": lzma.LZMAFile,
    "bzip2": bz2.BZ2File,
    "zstd": lambda stream: io.BufferedReader(_ZstdReader(stream), BUFFER_BYTES),
}


def detect_compression(head: bytes) -> str | None:
    """Return the compression format of a stream with this head; None if it is uncompressed."""
    return next((name for name, magic in MAGIC_BYTES.items() if head.startswith(magic)), None)


def decompress(stream: IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Decompress a stream, if it is compressed.

    Returns:
        The first HEAD_BYTES decompressed bytes, or fewer if the stream is shorter, and a reader of
        all decompressed bytes.

    Raises:
        EOFError, zlib.error, ...: The stream is damaged; see DECOMPRESSION_ERRORS.
    """
    buffered = cast("io.BufferedIOBase", stream)
    head = _read_head(buffered)
    compression = detect_compression(head)
    rewound = io.BufferedReader(_RewoundReader(head, buffered), BUFFER_BYTES)
    if compression is None:
        return head, rewound
    decompressed = cast("io.BufferedIOBase", _DECOMPRESSORS[compression](rewound))
    head = _read_head(decompressed)
    return head, io.BufferedReader(_RewoundReader(head, decompressed), BUFFER_BYTES)


def _read_head(stream: io.BufferedIOBase) -> bytes:
    """Read HEAD_BYTES bytes, or fewer at the end of the stream.

    An error after the first bytes is not raised here, because reading further raises it again.
    """
    head = b""
    try:
        # A pipe may return fewer bytes than requested, so one call is not enough.
        while len(head) < HEAD_BYTES:
            chunk = stream.read1(HEAD_BYTES - len(head))
            if not chunk:
                break
            head += chunk
    except DECOMPRESSION_ERRORS:
        if not head:
            raise
    return head
