"""Read tables row by row: find their columns, and the texts to embed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bertsmith.errors import TaskError
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.tables import (
    Row,
    Table,
    TableSource,
    get_cell,
    has_column,
    open_table,
    reject_lone_surrogates,
)
from bertsmith.use.inputs import chunked

#: Number of rows of a stream that are read to find the columns.
_HEAD_SIZE = 1024


@dataclass(frozen=True)
class TextRow:
    """A table row with the text to embed.

    Attributes:
        text: The text.
        cells: All cells of the row by column name, including the text.
    """

    text: str
    cells: Mapping[str, Any]


def iter_text_rows(rows: Iterator[Row], column: str) -> Iterator[TextRow]:
    """Yield each row with its text in a column. A text may be empty.

    Raises:
        TaskError: A cell of the column is not a text.
    """
    for row in rows:
        try:
            text = _get_text(row, column)
        except BadExampleError as error:
            raise TaskError(f"{row.location}: {error}; correct the row, or remove it") from None
        yield TextRow(text, row.cells)


def _get_text(row: Row, column: str) -> str:
    """Return the text in a column of a row; raise BadExampleError if it is not a text."""
    value = get_cell(row, column)
    if not isinstance(value, str):
        raise BadExampleError("no text", f" in column {column!r}: {value!r}")
    reject_lone_surrogates(value, column)
    return value


def find_columns(
    table: Table, source: TableSource, names: Iterable[str] = ()
) -> tuple[list[str], list[str], Iterator[Row]]:
    """Find the columns of a table.

    JSON rows may have different keys. A JSON file is therefore read twice, first to find all keys.
    A stream cannot be read twice, so only the keys in its first rows are allowed.

    Args:
        table: The open table.
        source: The file or stream of the table.
        names: Columns or nested keys that the caller reads.

    Returns:
        The column names; those of ``names`` that no readable row has, none if no row is readable;
        and all rows.

    Raises:
        TaskError: CSV, TSV or Parquet has no column. Or a row of a stream has a key that does not
            occur in the first rows; raised when this row is read.
    """
    if table.columns is not None:
        if not table.columns:
            raise TaskError(f"{source.path}: this table is empty; expected at least one row")
        # The columns are known without reading a row.
        row = Row(f"{source.path}", dict.fromkeys(table.columns, ""))
        return table.columns, _find_keys([row], names)[1], table.rows
    if source.stream is None:
        with open_table(source) as same_table:
            return *_find_keys(same_table.rows, names), table.rows
    head = next(chunked(table.rows, _HEAD_SIZE), [])
    columns, missing = _find_keys(head, names)
    later_rows = _reject_new_keys(table.rows, dict.fromkeys(columns))
    return columns, missing, chain(head, later_rows)


def _find_keys(rows: Iterable[Row], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the keys of all rows, and those of ``names`` that no readable row has."""
    columns: dict[str, None] = {}
    missing = list(names)
    has_readable_row = False
    for row in rows:
        columns.update(dict.fromkeys(row.cells))
        has_readable_row = has_readable_row or not row.error
        missing = [name for name in missing if not has_column(row, name)]
    return list(columns), missing if has_readable_row else []


def _reject_new_keys(rows: Iterator[Row], columns: Mapping[str, None]) -> Iterator[Row]:
    """Yield the rows; raise TaskError for a row with a key that is not a column."""
    for row in rows:
        new_key = next((name for name in row.cells if name not in columns), None)
        if new_key is not None:
            raise TaskError(
                f"{row.location}: the key {new_key!r} does not occur in the first {_HEAD_SIZE:,} "
                "rows; give a file instead of standard input, so that all columns can be read first"
            )
        yield row
