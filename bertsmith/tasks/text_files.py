"""Text files and streams decoded piece by piece, packed or not, in any encoding."""

import codecs
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bertsmith.errors import SettingsError, TaskError
from bertsmith.text.archives import (
    BUFFER_BYTES,
    COMPRESSION_SUFFIXES,
    DECOMPRESSION_ERRORS,
    decompress,
)

UTF8 = "utf-8"
#: The two encodings that text which is not UTF-8 usually has.
NOT_UTF8 = "such as cp949 (Korean) or latin-1 (Western European)"
#: The format of a table by the suffix of its file, which may be followed by one of ``PACKED``.
TABLE_FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
           ".parquet": "parquet"}  # fmt: skip
#: A line with its end, as ``csv`` and ``open(newline="")`` split text.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)")


def detect_table_format(path: Path) -> str | None:
    """Return the format of a table by the suffix of its file, packed or not; None if unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    return TABLE_FORMATS.get(suffixes[-1]) if suffixes else None


def check_encoding(encoding: str) -> None:
    """Raise SettingsError for an encoding that Python does not know, or that is not text."""
    try:
        known = codecs.lookup(encoding)._is_text_encoding  # noqa: SLF001 - as open() checks it
    except (LookupError, ValueError):
        known = False
    if not known:
        raise SettingsError(
            f"encoding: {encoding!r} is unknown; give the name of one, such as utf-8, cp949, "
            "latin-1 or utf-16"
        )


@contextmanager
def open_text(
    path: Path, *, encoding: str = UTF8, stream: IO[bytes] | None = None
) -> Iterator[Iterator[str]]:
    """Yield the pieces of a text, unpacked and decoded; a mark of UTF-8 is taken off.

    stream: read instead of the file; ``path`` is its name in messages. Raises TaskError.
    """
    check_encoding(encoding)
    try:
        if stream is not None:
            yield _decoded(decompress(stream)[1], encoding, path)
            return
        with path.open("rb") as file:
            yield _decoded(decompress(file)[1], encoding, path)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file") from None
    except DECOMPRESSION_ERRORS as error:
        raise TaskError(f"{path}: a damaged or cut-off archive: {error}") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}") from None


def choose_output_encoding(path: Path, encoding: str) -> str:
    """Return the encoding with which to write what a file holds: with a mark if it has one."""
    if codecs.lookup(encoding).name != UTF8 or not path.is_file():
        return encoding
    try:
        with path.open("rb") as file:
            return "utf-8-sig" if decompress(file)[0].startswith(codecs.BOM_UTF8) else encoding
    except (OSError, *DECOMPRESSION_ERRORS):
        # Whoever reads the file says why.
        return encoding


@contextmanager
def open_lines(
    path: Path, *, encoding: str = UTF8, stream: IO[bytes] | None = None
) -> Iterator[Iterator[str]]:
    """Yield the lines of a text with their ends; see ``open_text``."""
    with open_text(path, encoding=encoding, stream=stream) as pieces:
        yield split_lines(pieces)


def split_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in pieces, each with its end."""
    pending = ""
    for piece in pieces:
        text, end = pending + piece, 0
        for match in _LINE.finditer(text):
            # The second half of a line end may stand in the next piece.
            if match.end() == len(text) and text.endswith("\r"):
                break
            yield match[0]
            end = match.end()
        pending = text[end:]
    if pending:
        yield pending


def _decoded(stream: IO[bytes], encoding: str, path: Path) -> Iterator[str]:
    is_utf8 = codecs.lookup(encoding).name == UTF8
    decoder = codecs.getincrementaldecoder("utf-8-sig" if is_utf8 else encoding)()
    line, first = 1, True
    while True:
        block = stream.read(BUFFER_BYTES)
        if first and is_utf8 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise TaskError(f"{path}: not UTF-8 but UTF-16; give --encoding utf-16")
        first = False
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            good = error.object[: error.start].decode(encoding, "replace")
            if good:
                yield good
            place, byte = line + good.count("\n"), error.object[error.start]
            advice = f"give its encoding with --encoding, {NOT_UTF8}"
            if not is_utf8:
                advice = f"{encoding} is not its encoding"
            name = "UTF-8" if is_utf8 else encoding
            raise TaskError(
                f"{path}, line {place:,}: not {name}: byte 0x{byte:02x}; {advice}"
            ) from None
        line += text.count("\n")
        if text:
            yield text
        if not block:
            return
