"""What readers of text share: a document as read, its lines with their places, and faults.

It never knows the form that a text is in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Final

from bertsmith.errors import CorpusError

#: No honest line is longer, in bytes; without a bound, a binary file would fill the memory.
MAX_LINE_BYTES: Final = 1 << 28
#: The byte order mark that some editors write before UTF-8 text.
BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawDocument:
    """A document as it stood in its source; ``form`` names how that was written."""

    text: str
    format: str
    presplit: bool = False


class ErrorHandler:
    """Decides what becomes of a fault in a text: an error, or a counted skip."""

    def __init__(self, skip: bool, record: Callable[[str, str], None]) -> None:
        self._skip = skip
        self._record = record

    def report(self, reason: str, place: str, advice: str, detail: str = "") -> None:
        """Raise CorpusError, or record the fault and return so that the reader goes on.

        Faults are counted by ``reason``; ``detail`` belongs to this one.
        """
        found = f"{place}: {reason} ({detail})" if detail else f"{place}: {reason}"
        if not self._skip:
            raise CorpusError(f"{found}; {advice}, or leave such places out with --on-error skip")
        self._record(reason, found)


class LineReader:
    """The lines of a byte stream, each with its number (from 1) and its offset in bytes."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self._name = stream, name
        self.number, self.offset, self._next = 0, 0, 0

    def __iter__(self) -> Iterator[bytes]:
        for line in iter(partial(self._stream.readline, MAX_LINE_BYTES), b""):
            self.number += 1
            self.offset = self._next
            self._next += len(line)
            if len(line) >= MAX_LINE_BYTES:
                raise CorpusError(
                    f"{self.location()}: this line is longer than {MAX_LINE_BYTES >> 20} MiB; "
                    "expected text with line ends"
                )
            yield line.removeprefix(BOM) if self.offset == 0 else line

    def location(self, column: int = 0) -> str:
        """Name the current line, or the byte ``column`` in it."""
        return f"{self._name}, line {self.number:,}, byte {self.offset + column:,}"

    def decode(self, line: bytes, faults: ErrorHandler) -> str | None:
        """Return the line as text; None after a fault that was passed over."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            faults.report(
                "not UTF-8",
                self.location(error.start),
                "expected UTF-8 text; convert the file, for example with iconv -f CP949 -t UTF-8 "
                "(Korean) or iconv -f LATIN1 -t UTF-8 (Western European)",
                f"byte 0x{line[error.start]:02x}",
            )
            return None
