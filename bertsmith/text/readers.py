"""Reads one source, whatever its form, as a stream of raw documents.

It never knows how documents are counted, numbered or compared.
"""

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

from bertsmith.errors import CorpusError
from bertsmith.files import parse_json
from bertsmith.text import containers, line_layout, markdown
from bertsmith.text.archives import DECOMPRESSION_ERRORS, HEAD_BYTES, decompress, detect_compression
from bertsmith.text.raw_text import BOM, ErrorHandler, LineReader, RawDocument
from bertsmith.text.sources import STDIN, Source

#: A file of prose is one document up to this many characters; a longer one is cut at the next
#: blank line, so that memory does not grow with it.
MAX_DOCUMENT_CHARACTERS: Final = 1 << 22
#: Forms that say what a file is; the others say how its text is laid out.
CONTAINER_FORMATS: Final = frozenset({"jsonl", "wikiextractor", "parquet"})


def read_source(
    source: Source, form: str, field: str, faults: ErrorHandler
) -> Generator[RawDocument, None, None]:
    """Yield the raw documents of ``source``; ``form`` and ``field`` as in ``CorpusOptions``.

    Every fault of the source goes to ``faults``, which may raise CorpusError.
    """
    count = 0
    try:
        for count, raw in enumerate(_opened(source, form, field, faults), 1):  # noqa: B007
            yield raw
    except DECOMPRESSION_ERRORS as error:
        faults.report(
            "the archive is cut off or damaged",
            f"{source.name}, after {count:,} documents",
            "expected a whole gzip, xz, bzip2 or zstd file; make or fetch it again",
            str(error),
        )
    except OSError as error:
        reason = error.strerror or str(error)
        faults.report("cannot be read", source.name, "expected a readable file", reason)


def _opened(source: Source, form: str, field: str, faults: ErrorHandler) -> Iterator[RawDocument]:
    stream = sys.stdin.buffer if source.name == STDIN else Path(source.name).open("rb")  # noqa: SIM115
    head, reader = decompress(stream)
    name = "standard input" if source.name == STDIN else source.name
    try:
        # A full head of blanks may have text after it.
        if len(head) < HEAD_BYTES and not head.removeprefix(BOM).strip():
            what = "an empty file" if not head else "a file of blanks only"
            faults.report(what, name, "expected text; take the file away")
            return
        what = form if form in CONTAINER_FORMATS else _container(source.kind, head)
        if what == "parquet":
            yield from _parquet(source, form, field, faults)
            return
        if fault := _binary(head):
            faults.report(fault, name, "expected UTF-8 text, plain or packed")
            return
        lines = LineReader(reader, name)
        if what == "jsonl":
            yield from containers.read_json_lines(lines, form, field, faults)
        elif what == "wikiextractor":
            yield from containers.read_wikiextractor(lines, form, faults)
        else:
            yield from _plain(lines, _layout(form, what, head), faults)
    finally:
        if source.name != STDIN:
            reader.close()


def _container(kind: str, head: bytes) -> str:
    """Tell what a stream is: by its content where that is plain, else by its name."""
    text = head.removeprefix(BOM).lstrip()
    if head.startswith(b"PAR1"):
        return "parquet"
    if text.startswith(b"<doc "):
        return "wikiextractor"
    if kind in {"markdown", "jsonl", "parquet"}:
        return kind
    first = text.split(b"\n", 1)[0]
    if not first.startswith(b"{"):
        return "plain"
    try:
        parse_json(first)
    except ValueError:
        # A first line longer than the head cannot be parsed, but begins like JSON.
        return (
            "jsonl" if len(first) >= HEAD_BYTES - len(BOM) and first.startswith(b'{"') else "plain"
        )
    return "jsonl"


def _binary(head: bytes) -> str | None:
    """Name what speaks against the bytes being UTF-8 text; None if nothing does."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    if kind := detect_compression(head):
        return f"packed twice ({kind} inside)"
    return "a binary file (it holds NUL bytes)" if b"\0" in head else None


def _layout(form: str, container: str, head: bytes) -> str:
    """Tell how plain text is laid out: "sentences", "prose" or "markdown"."""
    if form != "auto":
        return form
    if container == "markdown":
        return "markdown"
    lines = head.decode("utf-8", "replace").split("\n")
    # The last line of a full head is cut off.
    return "sentences" if line_layout.is_presplit(lines[:-1] or lines) else "prose"


def _plain(lines: LineReader, layout: str, faults: ErrorHandler) -> Iterator[RawDocument]:
    """Read plain text: documents between blank lines, or the whole stream as one document."""
    held: list[str] = []
    size = 0
    for line in lines:
        text = lines.decode(line, faults)
        if text is None:
            continue
        text = text.rstrip("\r\n")
        blank = not text.strip()
        if blank and layout == "sentences":
            if held:
                yield RawDocument("\n".join(held), layout, presplit=True)
            held, size = [], 0
            continue
        held.append(text)
        size += len(text) + 1
        if size >= MAX_DOCUMENT_CHARACTERS and (blank or size >= 2 * MAX_DOCUMENT_CHARACTERS):
            yield _laid_out(held, layout)
            held, size = [], 0
    if held:
        yield _laid_out(held, layout)


def _laid_out(lines: list[str], layout: str) -> RawDocument:
    text = "\n".join(lines)
    if layout == "sentences":
        return RawDocument(text, layout, presplit=True)
    return RawDocument(
        markdown.markdown_to_text(text)
        if layout == "markdown"
        else line_layout.unwrap_paragraphs(text),
        layout,
    )


def _parquet(source: Source, form: str, field: str, faults: ErrorHandler) -> Iterator[RawDocument]:
    if source.is_stream:
        raise CorpusError(f"{source.name}: Parquet cannot be read from a stream; give the file")
    yield from containers.read_parquet(Path(source.name), form, field, faults)
