"""Reads documents out of files that hold many: JSON lines, WikiExtractor output, Parquet.

It never knows how a file was found, named or unpacked.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import CorpusError, MissingExtraError
from bertsmith.files import parse_json
from bertsmith.text import line_layout, markdown
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.raw_text import ErrorHandler, LineReader, RawDocument

_OPENING: Final = re.compile(r"<doc\s.*>\s*$")
_TITLE: Final = re.compile(r'\stitle="([^"]*)"')
_CLOSING: Final = "</doc>"
#: Rows held at once when a Parquet file is read.
ROWS_PER_BATCH: Final = 256


def make_document(text: str, form: str, container: str) -> RawDocument:
    """Bring the text of one document, laid out as ``form`` says, into paragraphs on lines."""
    if form == "sentences":
        return RawDocument(text, container, presplit=True)
    if form == "markdown":
        return RawDocument(markdown.markdown_to_text(text), container)
    return RawDocument(line_layout.unwrap_paragraphs(text), container)


def read_json_lines(
    lines: LineReader, form: str, field: str, faults: ErrorHandler
) -> Iterator[RawDocument]:
    """Read a JSON object a line, the text in ``field``; null and "" are empty documents."""
    for line in lines:
        decoded = lines.decode(line, faults)
        if decoded is None or not decoded.strip():
            continue
        try:
            value = parse_json(decoded)
        except ValueError as error:
            faults.report(
                "broken JSON",
                lines.location(),
                "expected a whole JSON object on each line",
                str(error),
            )
            continue
        text = _field(value, field, lines, faults)
        if text is not None:
            yield make_document(text, form, "jsonl")


def _field(value: Any, field: str, lines: LineReader, faults: ErrorHandler) -> str | None:
    """Return the text in a parsed line; None after a fault that was passed over."""
    if not isinstance(value, dict):
        faults.report(
            f"a JSON {type(value).__name__} where an object was expected",
            lines.location(),
            'expected lines such as {"text": "..."}; a JSON array becomes such by jq -c ".[]"',
        )
        return None
    if field not in value:
        known = ", ".join(repr(key) for key in value) or "none"
        faults.report(
            f"no field {field!r} in this object",
            lines.location(),
            f"its fields are {known}; name the one with the text by --field",
        )
        return None
    text = value[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        faults.report(
            f"field {field!r} holds {type(text).__name__}, not text",
            lines.location(),
            "expected a string; name the field with the text by --field",
        )
        return None
    # An escape such as \ud800 makes half a character, which no UTF-8 file can hold.
    return text.encode("utf-8", "replace").decode() if has_surrogates(text) else text


def read_wikiextractor(lines: LineReader, form: str, faults: ErrorHandler) -> Iterator[RawDocument]:
    """Read ``<doc id= title= ...>`` ... ``</doc>``; the title line at the top is left out."""
    held: list[str] | None = None
    title = None
    for line in lines:
        decoded = lines.decode(line, faults)
        if decoded is None:
            continue
        text = decoded.rstrip("\r\n")
        if held is None and _OPENING.match(text):
            found = _TITLE.search(text)
            held, title = [], html.unescape(found[1]) if found else None
        elif text.strip() == _CLOSING and held is not None:
            yield _wiki_document(held, title, form)
            held = None
        elif held is not None:
            held.append(html.unescape(text))
        elif text.strip():
            faults.report(
                "text outside of <doc ...> and </doc>",
                lines.location(),
                "expected WikiExtractor's output",
            )
    if held is not None:
        faults.report(
            "the last <doc ...> has no </doc>",
            lines.location(),
            "the file was cut off; expected WikiExtractor's whole output",
        )


def _wiki_document(held: list[str], title: str | None, form: str) -> RawDocument:
    if held and title and held[0].strip() == title:
        held = held[1:]
    return make_document("\n".join(held).strip(), form, "wikiextractor")


def read_parquet(path: Path, form: str, field: str, faults: ErrorHandler) -> Iterator[RawDocument]:
    """Read the column ``field`` of a Parquet file, a document a row, a few rows at a time."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path}") from None
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow, path, field)
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=[field]):
                # As bytes, so that a row that is not UTF-8 can be named.
                for value in batch.column(0).cast(pa.binary()):
                    text = _decoded(value.as_py(), f"{path}, row {row:,}", faults)
                    row += 1
                    if text is not None:
                        yield make_document(text, form, "parquet")
    except pa.ArrowException as error:
        faults.report(
            "not a whole Parquet file",
            f"{path}, after {row:,} rows",
            "make or fetch it again",
            str(error),
        )


def _check_column(schema: Any, path: Path, field: str) -> None:
    if field not in schema.names:
        known = ", ".join(repr(name) for name in schema.names)
        raise CorpusError(
            f"{path}: no column {field!r}; its columns are {known}; "
            "name the one with the text by --field"
        )
    kind = str(schema.field(field).type)
    if "string" not in kind:
        raise CorpusError(
            f"{path}: column {field!r} holds {kind}, not text; name another one by --field"
        )


def _decoded(value: bytes | None, place: str, faults: ErrorHandler) -> str | None:
    if value is None:
        return ""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        faults.report("not UTF-8", place, "expected UTF-8 text", error.reason)
        return None
