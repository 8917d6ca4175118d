"""Reads files with many documents: JSON Lines, WikiExtractor output and Parquet."""

import html
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import CorpusError, require_extra
from bertsmith.files import parse_json
from bertsmith.plurals import count_noun
from bertsmith.text import line_layout, markdown
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.raw_text import ErrorHandler, LineReader, RawDocument

_OPENING_TAG: Final = re.compile(r"<doc\s.*>\s*$")
_TITLE: Final = re.compile(r'\stitle="([^"]*)"')
_CLOSING_TAG: Final = "</doc>"
#: Number of rows read from a Parquet file at a time.
ROWS_PER_BATCH: Final = 256


def make_document(text: str, layout: str, container: str) -> RawDocument:
    """Create a document from its text, with one paragraph (or presplit sentence) per line.

    Lines end at a line feed, a carriage return, or both.

    Args:
        text: The text.
        layout: "sentences", "markdown", or anything else for prose.
        container: Format of the source, which becomes the format of the document.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if layout == "sentences":
        return RawDocument(text, container, presplit=True)
    if layout == "markdown":
        return RawDocument(markdown.markdown_to_text(text), container)
    return RawDocument(line_layout.unwrap_paragraphs(text), container)


def read_json_lines(
    lines: LineReader, layout: str, field: str, errors: ErrorHandler
) -> Iterator[RawDocument]:
    """Read documents from one JSON object per line, with the text in ``field``.

    A null text is an empty document.
    """
    for line in lines:
        decoded = lines.decode(line)
        if decoded is None or not decoded.strip():
            continue
        try:
            value = parse_json(decoded)
        except ValueError as error:
            errors.report(
                "broken JSON",
                lines.location(),
                "expected a complete JSON object on each line",
                str(error),
            )
            continue
        text = _get_text(value, field, lines, errors)
        if text is not None:
            yield make_document(text, layout, "jsonl")


def _get_text(value: Any, field: str, lines: LineReader, errors: ErrorHandler) -> str | None:
    """Return the text in a parsed JSON value; None if it is invalid and errors are skipped."""
    if not isinstance(value, dict):
        errors.report(
            f"a JSON {type(value).__name__} where an object was expected",
            lines.location(),
            'expected lines such as {"text": "..."}; convert a JSON array with jq -c ".[]"',
        )
        return None
    if field not in value:
        names = ", ".join(repr(key) for key in value) or "none"
        errors.report(
            f"no field {field!r} in this object",
            lines.location(),
            f"its fields are {names}; choose the field with the text by --field",
        )
        return None
    text = value[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        errors.report(
            f"field {field!r} holds {type(text).__name__}, not text",
            lines.location(),
            "expected a string; choose the field with the text by --field",
        )
        return None
    # A JSON escape such as \ud800 is a lone surrogate, which UTF-8 cannot represent.
    return text.encode("utf-8", "replace").decode() if has_surrogates(text) else text


def read_wikiextractor(
    lines: LineReader, layout: str, errors: ErrorHandler
) -> Iterator[RawDocument]:
    """Read documents between ``<doc id= title= ...>`` and ``</doc>``.

    If the first line of a document repeats its title, the line is left out.
    """
    body: list[str] | None = None
    title = None
    for line in lines:
        decoded = lines.decode(line)
        if decoded is None:
            continue
        text = decoded.rstrip("\r\n")
        if _OPENING_TAG.match(text):
            if body is not None:
                errors.report(
                    "a <doc ...> before the </doc> of the previous document",
                    lines.location(),
                    "expected WikiExtractor's complete output",
                )
                yield _make_wiki_document(body, title, layout)
            match = _TITLE.search(text)
            body, title = [], html.unescape(match[1]) if match else None
        elif text.strip() == _CLOSING_TAG and body is not None:
            yield _make_wiki_document(body, title, layout)
            body = None
        elif body is not None:
            body.append(html.unescape(text))
        elif text.strip():
            errors.report(
                "text outside of <doc ...> and </doc>",
                lines.location(),
                "expected WikiExtractor's output",
            )
    if body is not None:
        errors.report(
            "the last <doc ...> has no </doc>",
            lines.location(),
            "the file is truncated; expected WikiExtractor's complete output",
        )


def _make_wiki_document(body: list[str], title: str | None, layout: str) -> RawDocument:
    """Create a document from the lines of its body, without a first line that is the title."""
    if body and title and body[0].strip() == title:
        body = body[1:]
    return make_document("\n".join(body).strip(), layout, "wikiextractor")


def read_parquet(
    path: Path, content: BytesIO | None, layout: str, field: str, errors: ErrorHandler
) -> Iterator[RawDocument]:
    """Read one document per row from the column ``field``, a few rows at a time.

    Args:
        path: The file.
        content: Content of a compressed file; None to read ``path``.
        layout: Layout of each text; see ``make_document``.
        field: Name of the column.
        errors: Receives every error in the file.
    """
    with require_extra("parquet", f"reading {path}", package="pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    row = 0
    try:
        with parquet.ParquetFile(content or path) as file:
            _check_column(file.schema_arrow, path, field)
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=[field]):
                # Rows are decoded one by one, so that an error names the row.
                for value in batch.column(0).cast(pa.binary()):
                    text = _decode_cell(value.as_py(), f"{path}, row {row:,}", errors)
                    row += 1
                    if text is not None:
                        yield make_document(text, layout, "parquet")
    except pa.ArrowException as error:
        errors.report(
            "not a complete Parquet file",
            f"{path}, after {count_noun(row, 'row')}",
            "create or download it again",
            str(error),
        )


def _check_column(schema: Any, path: Path, field: str) -> None:
    """Raise CorpusError unless the Parquet file has a column ``field`` of text."""
    import pyarrow as pa

    if field not in schema.names:
        names = ", ".join(repr(name) for name in schema.names)
        raise CorpusError(
            f"{path}: no column {field!r}; its columns are {names}; "
            "choose the column with the text by --field"
        )
    if schema.names.count(field) > 1:
        raise CorpusError(f"{path}: several columns are named {field!r}; rename all but one")
    column_type = schema.field(field).type
    text_type = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
    if not (pa.types.is_string(text_type) or pa.types.is_large_string(text_type)
            or pa.types.is_string_view(text_type)):  # fmt: skip
        raise CorpusError(
            f"{path}: column {field!r} holds {column_type}, not text; choose another by --field"
        )


def _decode_cell(value: bytes | None, location: str, errors: ErrorHandler) -> str | None:
    """Decode a cell as UTF-8; return None if it is invalid and errors are skipped."""
    if value is None:
        return ""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        errors.report("not UTF-8", location, "expected UTF-8 text", error.reason)
        return None
