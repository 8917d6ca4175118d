"""Reads the raw documents of one source, in any supported format."""

import io
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Final, cast

from bertsmith.errors import CorpusError
from bertsmith.files import parse_json
from bertsmith.plurals import count_noun
from bertsmith.text import containers, line_layout
from bertsmith.text.archives import (
    BUFFER_BYTES,
    DECOMPRESSION_ERRORS,
    HEAD_BYTES,
    decompress,
    detect_compression,
)
from bertsmith.text.raw_text import (
    BOM,
    CarriageReturnReader,
    ErrorHandler,
    LineReader,
    RawDocument,
)
from bertsmith.text.sources import STDIN, Source, detect_unsupported_format

#: Maximum number of characters in a document of prose. A longer file is divided at blank lines, to
#: bound the memory.
MAX_DOCUMENT_CHARACTERS: Final = 1 << 22
#: Formats that contain many documents; the other formats describe the layout of a text.
CONTAINER_FORMATS: Final = frozenset({"jsonl", "wikiextractor", "parquet"})


def read_source(
    source: Source, text_format: str, field: str, errors: ErrorHandler
) -> Generator[RawDocument, None, None]:
    """Yield the raw documents of a source.

    Args:
        source: File or stream to read.
        text_format: ``CorpusOptions.format``.
        field: ``CorpusOptions.field``.
        errors: Receives every error in the source, and files without text.
    """
    count = 0
    try:
        documents = _read(source, text_format, field, errors)
        for count, document in enumerate(documents, 1):  # noqa: B007
            yield document
    except DECOMPRESSION_ERRORS as error:
        errors.report(
            "the compressed file is truncated or damaged",
            f"{source.name}, after {count_noun(count, 'document')}",
            "expected a complete gzip, xz, bzip2 or zstd file; create or download it again",
            str(error),
        )
    except OSError as error:
        reason = error.strerror or str(error)
        errors.report("cannot be read", source.name, "expected a readable file", reason)


def _read(
    source: Source, text_format: str, field: str, errors: ErrorHandler
) -> Iterator[RawDocument]:
    """Detect the format of a source and yield its documents; see ``read_source``."""
    stream = sys.stdin.buffer if source.name == STDIN else Path(source.name).open("rb")  # noqa: SIM115
    head, reader = decompress(stream)
    name = "standard input" if source.name == STDIN else source.name
    try:
        # After a full head of whitespace, text may follow, so only a short head is an empty file.
        if len(head) < HEAD_BYTES and not head.removeprefix(BOM).strip():
            reason = "an empty file" if not head else "a file with only whitespace"
            errors.report_empty_file(reason, name)
            return
        is_container = text_format in CONTAINER_FORMATS
        container = text_format if is_container else _detect_container(source.kind, head)
        says_plain_text = source.kind == "plain" and text_format in {"prose", "sentences"}
        if says_plain_text and container == "jsonl" and not _may_have_field(head, field):
            container = "plain"
        if container == "parquet":
            yield from _read_parquet(source, reader, text_format, field, errors)
            return
        if problem := _describe_binary(head):
            errors.report(problem, name, "expected UTF-8 text, plain or compressed")
            return
        if container != "wikiextractor" and _has_only_carriage_returns(head):
            head = head.replace(b"\r", b"\n")
            carriage_return_reader = CarriageReturnReader(cast("io.BufferedIOBase", reader))
            reader = io.BufferedReader(carriage_return_reader, BUFFER_BYTES)
        lines = LineReader(reader, name, errors)
        if container == "jsonl":
            yield from containers.read_json_lines(lines, text_format, field, errors)
        elif container == "wikiextractor":
            yield from containers.read_wikiextractor(lines, text_format, errors)
        else:
            if text_format == "auto" and (other := _detect_unsupported_format(source, head)):
                errors.report(
                    f"{other}, not plain text",
                    name,
                    "convert it to JSON Lines with one document per line, or read all its "
                    "characters as text with --format prose",
                )
                return
            layout = _detect_layout(text_format, container, head)
            yield from _read_plain_text(lines, layout)
    finally:
        if source.name != STDIN:
            reader.close()


def _detect_container(kind: str, head: bytes) -> str:
    """Return the kind of a file according to its content, or ``kind`` if that is undecided.

    Args:
        kind: Kind of the file according to its name; see ``Source``.
        head: First bytes of the file.
    """
    text = head.removeprefix(BOM).lstrip()
    if head.startswith(b"PAR1"):
        return "parquet"
    if text.startswith(b"<doc "):
        return "wikiextractor"
    if kind in {"markdown", "jsonl", "parquet"}:
        return kind
    first_line = text.split(b"\n", 1)[0]
    if not first_line.startswith(b"{"):
        return "plain"
    try:
        parse_json(first_line)
    except ValueError:
        # A line that is longer than the head cannot be parsed, so only its start is examined.
        is_truncated = len(first_line) >= HEAD_BYTES - len(BOM)
        return "jsonl" if is_truncated and first_line.startswith(b'{"') else "plain"
    return "jsonl"


def _may_have_field(head: bytes, field: str) -> bool:
    """Return whether the JSON object in the first line has a field, or the line is cut off."""
    try:
        value = parse_json(head.removeprefix(BOM).lstrip().split(b"\n", 1)[0])
    except ValueError:
        return True
    return isinstance(value, dict) and field in value


def _detect_unsupported_format(source: Source, head: bytes) -> str | None:
    """Return the format of a file whose characters are not all text, such as HTML; or None."""
    if re.match(rb"\s*\[\s*\{\s*\"", head.removeprefix(BOM)):
        return "a JSON array"
    return None if source.name == STDIN else detect_unsupported_format(Path(source.name))


def _describe_binary(head: bytes) -> str | None:
    """Return why the bytes are not UTF-8 text; None if they may be UTF-8 text."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    if compression := detect_compression(head):
        return f"compressed twice ({compression} inside)"
    return "a binary file (it holds NUL bytes)" if b"\0" in head else None


def _has_only_carriage_returns(head: bytes) -> bool:
    """Return whether lines end at carriage returns, as in text files of old Macs."""
    # A full head may end between a carriage return and a line feed.
    return b"\r" in head[:-1] and b"\n" not in head


def _detect_layout(text_format: str, container: str, head: bytes) -> str:
    """Return the layout of plain text: "sentences", "prose" or "markdown"."""
    if text_format != "auto":
        return text_format
    if container == "markdown":
        return "markdown"
    lines = head.decode("utf-8", "replace").split("\n")
    # The last line may be truncated.
    return "sentences" if line_layout.is_presplit(lines[:-1] or lines) else "prose"


def _read_plain_text(lines: LineReader, layout: str) -> Iterator[RawDocument]:
    """Read documents of plain text.

    With the layout "sentences", blank lines separate documents. Otherwise the whole stream is one
    document, unless it is too long.
    """
    pending: list[str] = []
    size = 0
    for line in lines:
        text = lines.decode(line)
        if text is None:
            continue
        text = text.rstrip("\r\n")
        is_blank = not text.strip()
        if is_blank and layout == "sentences":
            if pending:
                yield _make_document(pending, layout)
            pending, size = [], 0
            continue
        while len(text) > MAX_DOCUMENT_CHARACTERS:
            # A line without an end, such as a whole file, is cut between two words.
            end = text.rfind(" ", 0, MAX_DOCUMENT_CHARACTERS) + 1 or MAX_DOCUMENT_CHARACTERS
            yield _make_document([*pending, text[:end]], layout)
            pending, size, text = [], 0, text[end:]
        pending.append(text)
        size += len(text) + 1
        # A document that reaches the maximum ends at the next blank line, or at twice the maximum.
        is_full = size >= MAX_DOCUMENT_CHARACTERS
        if is_full and (is_blank or size >= 2 * MAX_DOCUMENT_CHARACTERS):
            yield _make_document(pending, layout)
            pending, size = [], 0
    if pending:
        yield _make_document(pending, layout)


def _make_document(lines: list[str], layout: str) -> RawDocument:
    """Create a document of plain text, whose format is the name of its layout."""
    return containers.make_document("\n".join(lines), layout, layout)


def _read_parquet(
    source: Source, reader: IO[bytes], text_format: str, field: str, errors: ErrorHandler
) -> Iterator[RawDocument]:
    """Read a Parquet file; raise CorpusError for a stream.

    The footer is read first, so a compressed file is read into memory.

    Args:
        source: The file.
        reader: Reads the decompressed content.
        text_format: Layout of each text.
        field: Name of the column.
        errors: Receives every error in the file.
    """
    if source.is_stream:
        raise CorpusError(f"{source.name}: Parquet cannot be read from a stream; give a file")
    path = Path(source.name)
    with path.open("rb") as file:
        is_compressed = detect_compression(file.read(HEAD_BYTES)) is not None
    content = io.BytesIO(reader.read()) if is_compressed else None
    yield from containers.read_parquet(path, content, text_format, field, errors)
