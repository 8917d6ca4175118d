"""Raw documents, lines with their locations, and error handling, for all readers of text."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final

from bertsmith.errors import CorpusError

#: Maximum length of a line in bytes. Without a limit, a binary file could fill the memory.
MAX_LINE_BYTES: Final = 1 << 28
#: The byte order mark that some editors write before UTF-8 text.
BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawDocument:
    """A document as read from its source.

    Attributes:
        text: The text.
        format: Format of the source, such as "jsonl" or "prose".
        presplit: Whether each line is a sentence.
    """

    text: str
    format: str
    presplit: bool = False


class ErrorHandler:
    """Raises an error in a source, or records it and lets the reader continue."""

    def __init__(self, record: Callable[[str, str], None], *, skip: bool) -> None:
        """Choose whether errors are raised or recorded.

        Args:
            record: Called with the reason and the full message of each skipped error.
            skip: Whether to record errors instead of raising them.
        """
        self._skip = skip
        self._record = record

    def report(self, reason: str, location: str, advice: str, detail: str = "") -> None:
        """Raise CorpusError, or record the error and return.

        Args:
            reason: Kind of error. Skipped errors are counted by reason.
            location: File, and position in the file.
            advice: What the user can do.
            detail: Further information about this error.
        """
        message = f"{location}: {reason} ({detail})" if detail else f"{location}: {reason}"
        if not self._skip:
            raise CorpusError(f"{message}; {advice}, or skip such errors with --on-error skip")
        self._record(reason, message)

    def report_empty_file(self, reason: str, location: str) -> None:
        """Record a file without text, which is not an error.

        Args:
            reason: Kind of file, such as "an empty file".
            location: Name of the file.
        """
        self._record(reason, f"{location}: {reason}")


class LineReader:
    """Iterates over the lines of a byte stream.

    Attributes:
        number: Number of the current line, from 1.
        offset: Offset of the current line in bytes.
    """

    def __init__(self, stream: IO[bytes], name: str, errors: ErrorHandler) -> None:
        """Read lines from ``stream``, which error messages call ``name``."""
        self._stream, self._name, self._errors = stream, name, errors
        self.number, self.offset, self._next_offset = 0, 0, 0

    def __iter__(self) -> Iterator[bytes]:
        for line in iter(partial(self._stream.readline, MAX_LINE_BYTES), b""):
            self.number += 1
            self.offset = self._next_offset
            self._next_offset += len(line)
            if len(line) >= MAX_LINE_BYTES:
                self._errors.report(
                    f"a line of {MAX_LINE_BYTES >> 20} MiB or more",
                    self.location(),
                    "expected text with line endings",
                )
                self._skip_to_line_end(line)
                continue
            yield line.removeprefix(BOM) if self.offset == 0 else line

    def _skip_to_line_end(self, line: bytes) -> None:
        """Skip the bytes of the current line after its first part ``line``."""
        while line and not line.endswith(b"\n"):
            line = self._stream.readline(MAX_LINE_BYTES)
            self._next_offset += len(line)

    def location(self, column: int = 0) -> str:
        """Return the file, line and byte offset of byte number ``column`` of the current line."""
        return f"{self._name}, line {self.number:,}, byte {self.offset + column:,}"

    def decode(self, line: bytes) -> str | None:
        """Decode the current line as UTF-8; return None if it is invalid and errors are skipped."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self._errors.report(
                "not UTF-8",
                self.location(error.start),
                "expected UTF-8 text; convert the file, for example with iconv -f CP949 -t UTF-8 "
                "(Korean) or iconv -f CP1252 -t UTF-8 (Western European)",
                f"byte 0x{line[error.start]:02x}",
            )
            return None


class CarriageReturnReader(io.RawIOBase):
    r"""A stream of bytes in which each carriage return (\r) is replaced by a line feed (\n)."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream

    def readable(self) -> bool:
        """Return True, as ``io.RawIOBase`` requires of a stream that can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into ``buffer``; return their number, 0 at the end."""
        data = self._stream.read1(len(buffer)).replace(b"\r", b"\n")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream and the one that it reads."""
        self._stream.close()
        super().close()
