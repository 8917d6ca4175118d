"""Rows and columns of the tables of texts on which embedding models and rerankers are trained."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from bertsmith.errors import TaskError
from bertsmith.tasks.embedding_settings import TextColumns
from bertsmith.tasks.tables import Row, TableSource, has_column, has_txt_suffix, open_table
from bertsmith.tasks.text_files import open_text, split_lines

#: Column of the lines of a text file.
LINE_COLUMN: Final = "line"
#: Standard columns of an embedding model's tables, in the order in which they are looked for.
STANDARD_COLUMNS: Final = (
    TextColumns(text="anchor", pair="positive"),
    TextColumns(text="sentence1", pair="sentence2", score="score"),
    TextColumns(text="text", label="label"),
    TextColumns(text="text"),
    TextColumns(text=LINE_COLUMN),
)
#: Standard columns of a reranker's tables.
STANDARD_RERANKING_COLUMNS: Final = (
    *(
        TextColumns(text="query", pair=document, score=score)
        for document in ("document", "passage", "documents", "docs")
        for score in ("score", "label", "scores", "labels")
    ),
    TextColumns(text="sentence1", pair="sentence2", score="score"),
    TextColumns(text="query", pair="positive"),
    TextColumns(text="anchor", pair="positive"),
    TextColumns(text="query", pair="document"),
)
#: Standard names of the columns of negatives, next to the column "positive".
_STANDARD_NEGATIVES: Final = re.compile(r"negatives?(_[0-9]+)?")
_EMBEDDING_ADVICE: Final = (
    "--text and --pair for pairs (and --negatives, or --score for scored pairs), --text and "
    "--label for labeled texts, or only --text"
)


class ReadingSettings(Protocol):
    """How tables are read."""

    @property
    def header(self) -> bool:
        """Whether the first line contains the column names."""

    @property
    def encoding(self) -> str:
        """Text encoding."""

    @property
    def delimiter(self) -> str:
        """Delimiter of CSV; "" to detect it."""

    @property
    def skip_invalid(self) -> bool:
        """Whether invalid rows are skipped and counted."""


def resolve_columns(
    path: Path,
    settings: ReadingSettings,
    columns: TextColumns,
    other_columns: TextColumns | None = None,
    *,
    standard_columns: Sequence[TextColumns] = STANDARD_COLUMNS,
    advice: str = _EMBEDDING_ADVICE,
) -> TextColumns:
    """Return the columns of a table.

    Args:
        path: The table.
        settings: How to read the table.
        columns: The columns that the user has named. If there are none, the table is searched for
            ``other_columns``, and for the standard names.
        other_columns: The columns of another table.
        standard_columns: Columns to look for, in this order.
        advice: The options that name columns, for the error message.

    Raises:
        TaskError: The file cannot be read, or its columns have other names.
    """
    if columns.list_columns():
        return columns
    first_row = read_first_row(path, settings, columns)
    if first_row is None:
        raise TaskError(f"{path}: this file has no examples; expected at least one")
    names = list(first_row.cells)
    candidates = list(standard_columns)
    if other_columns is not None:
        # The metrics do not need all negatives.
        negatives = [name for name in other_columns.negatives if has_column(first_row, name)]
        candidates.insert(0, other_columns.model_copy(update={"negatives": negatives}))
    for candidate in candidates:
        if candidate.list_columns() and has_columns(first_row, candidate):
            return _add_negatives(candidate, names)
    listed_names = ", ".join(map(repr, names))
    raise TaskError(
        f"{path}: no column has a standard name; the columns are {listed_names}; name the columns: "
        f"{advice}"
    )


def read_first_row(path: Path, settings: ReadingSettings, columns: TextColumns) -> Row | None:
    """Return the first valid row of a table; None if there is none. See ``open_rows``."""
    with open_rows(path, settings, columns) as rows:
        return next((row for row in rows if not row.error), None)


def has_columns(row: Row, columns: TextColumns) -> bool:
    """Return whether a row has all of the columns."""
    return all(has_column(row, name) for name in columns.list_columns())


def _add_negatives(columns: TextColumns, names: Sequence[str]) -> TextColumns:
    """Add the columns of negatives with standard names to the standard columns of pairs."""
    if columns.pair != "positive" or columns.negatives:
        return columns
    negatives = [name for name in names if _STANDARD_NEGATIVES.fullmatch(name)]
    return columns.model_copy(update={"negatives": negatives})


@contextmanager
def open_rows(
    path: Path, settings: ReadingSettings, columns: TextColumns, notes: list[str] | None = None
) -> Iterator[Iterator[Row]]:
    """Open a table. In a .txt file, each line is a text, unless ``columns`` names the columns.

    Args:
        path: The table.
        settings: How to read the table.
        columns: The columns that the user has named.
        notes: A list to which messages about how the file is read are appended.

    Raises:
        TaskError: The file cannot be read.
    """
    if has_txt_suffix(path) and columns.text in (None, LINE_COLUMN):
        with open_text(path, encoding=settings.encoding) as chunks:
            yield _read_lines(split_lines(chunks), path)
        return
    source = TableSource(
        path,
        has_header=settings.header,
        encoding=settings.encoding,
        delimiter=settings.delimiter or None,
    )
    with open_table(source) as table:
        if notes is not None:
            notes += table.notes
        yield table.rows


def _read_lines(lines: Iterator[str], path: Path) -> Iterator[Row]:
    """Yield a row for each line that is not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Row(f"{path}, line {number:,}", {LINE_COLUMN: line.strip()})
