"""Tables whose rows are read one by one: which columns they have, and their texts to embed."""

from collections.abc import Iterator, Mapping
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
    open_table,
    reject_lone_surrogates,
)
from bertsmith.use.masked_lm import chunked

#: Rows of a stream that must tell which columns there are.
_WINDOW = 1024


@dataclass(frozen=True)
class Record:
    """A text to embed, and the row that it stands in."""

    text: str
    cells: Mapping[str, Any]


def iter_text_records(rows: Iterator[Row], column: str) -> Iterator[Record]:
    """Yield the texts of a column with their rows; a text may be empty, as a line may.

    Raises TaskError for a value that is no text.
    """
    for row in rows:
        try:
            text = _text(row, column)
        except BadExampleError as fault:
            raise TaskError(f"{row.location}: {fault}; repair the row, or remove it") from None
        yield Record(text, row.cells)


def _text(row: Row, column: str) -> str:
    value = get_cell(row, column)
    if not isinstance(value, str):
        raise BadExampleError("no text", f" in column {column!r}: {value!r}")
    reject_lone_surrogates(value, column)
    return value


def find_columns(table: Table, source: TableSource) -> tuple[list[str], Row | None, Iterator[Row]]:
    """Return the columns of a table, its first readable row, and all rows.

    Each row of JSON has its own columns, so a file is read to its end to know them; of a stream
    the first rows must tell.
    """
    if table.columns is not None:
        return table.columns, Row(f"{source.path}", dict.fromkeys(table.columns, "")), table.rows
    if source.stream is None:
        columns: dict[str, None] = {}
        first = None
        with open_table(source) as again:
            for row in again.rows:
                columns.update(dict.fromkeys(row.cells))
                first = first or (None if row.error else row)
        return list(columns), first, table.rows
    head = next(chunked(table.rows, _WINDOW), [])
    columns = {name: None for row in head for name in row.cells}
    first = next((row for row in head if not row.error), None)
    return list(columns), first, chain(head, _with_columns(table.rows, columns))


def _with_columns(rows: Iterator[Row], columns: Mapping[str, None]) -> Iterator[Row]:
    for row in rows:
        new = next((name for name in row.cells if name not in columns), None)
        if new is not None:
            raise TaskError(
                f"{row.location}: the key {new!r} does not occur in the first {_WINDOW:,} rows; give "
                "a file instead of standard input, whose columns can be read first"
            )
        yield row
