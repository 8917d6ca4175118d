"""Rows and columns of the tables of texts on which embedding models are trained."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final

from bertsmith.errors import TaskError
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.tables import Row, TableSource, has_txt_suffix, open_table
from bertsmith.tasks.text_files import open_text, split_lines

#: Column of the lines of a text file.
LINE_COLUMN: Final = "line"
#: Standard columns, in the order in which they are looked for.
STANDARD_COLUMNS: Final = (
    TextColumns(text="anchor", pair="positive"),
    TextColumns(text="sentence1", pair="sentence2", score="score"),
    TextColumns(text="text", label="label"),
    TextColumns(text="text"),
    TextColumns(text=LINE_COLUMN),
)
#: Standard names of the columns of negatives, next to the columns "anchor" and "positive".
_STANDARD_NEGATIVES: Final = re.compile(r"negatives?(_[0-9]+)?")


def resolve_columns(
    path: Path,
    settings: EmbeddingSettings,
    columns: TextColumns,
    other_columns: TextColumns | None = None,
) -> TextColumns:
    """Return the columns of a table.

    Args:
        path: The table.
        settings: How to read the table.
        columns: The columns that the user has named. If there are none, the table is searched for
            ``other_columns``, and for the standard names.
        other_columns: The columns of another table.

    Raises:
        TaskError: The file cannot be read, or its columns have other names.
    """
    if columns.list_columns():
        return columns
    with open_rows(path, settings, columns) as rows:
        first_row = next((row for row in rows if not row.error), None)
    if first_row is None:
        raise TaskError(f"{path}: this file has no examples; expected at least one")
    names = list(first_row.cells)
    candidates = [*([] if other_columns is None else [other_columns]), *STANDARD_COLUMNS]
    for candidate in candidates:
        if candidate.list_columns() and set(candidate.list_columns()) <= set(names):
            return _add_negatives(candidate, names)
    listed_names = ", ".join(map(repr, names))
    raise TaskError(
        f"{path}: no column has a standard name; the columns are {listed_names}; name the columns: "
        "--text and --pair for pairs (and --negatives, or --score for scored pairs), --text and "
        "--label for labeled texts, or only --text"
    )


def _add_negatives(columns: TextColumns, names: Sequence[str]) -> TextColumns:
    """Add the columns of negatives with standard names to the standard columns of pairs."""
    if columns != STANDARD_COLUMNS[0]:
        return columns
    negatives = [name for name in names if _STANDARD_NEGATIVES.fullmatch(name)]
    return columns.model_copy(update={"negatives": negatives})


@contextmanager
def open_rows(
    path: Path, settings: EmbeddingSettings, columns: TextColumns, notes: list[str] | None = None
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
        # Reading the first row detects the format of CSV, about which there may be a note.
        first_rows = [row for row in (next(table.rows, None),) if row is not None]
        if notes is not None:
            notes += table.notes
        yield chain(first_rows, table.rows)


def _read_lines(lines: Iterator[str], path: Path) -> Iterator[Row]:
    """Yield a row for each line that is not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Row(f"{path}, line {number:,}", {LINE_COLUMN: line.strip()})
