"""Reading rows of CSV, TSV, JSON and Parquet files, with the location of each row for messages."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import TaskError, require_extra
from bertsmith.files import describe_missing_path
from bertsmith.plurals import count_noun
from bertsmith.tasks import delimited, json_rows
from bertsmith.tasks.delimited import TAB, Dialect
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.text_files import (
    UTF8,
    detect_table_format,
    open_text,
    split_lines,
)
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.archives import (
    COMPRESSION_SUFFIXES,
    DECOMPRESSION_ERRORS,
    decompress,
    get_format_suffix,
)

_UNBALANCED_QUOTES = (
    "a quotation mark that does not end its cell; marks inside a quoted cell must be doubled"
)
_SUPPORTED_SUFFIXES = ".csv, .tsv, .txt, .jsonl, .json, .parquet"


@dataclass(frozen=True)
class TableSource:
    """A file or stream that contains a table.

    Attributes:
        path: The file. If there is a stream, ``path`` is only its name in messages.
        format: csv, tsv, jsonl, json or parquet; None to detect it from the suffix.
        has_header: Whether the first line of CSV or TSV names the columns.
        encoding: The text encoding.
        delimiter: Delimiter of CSV; None to detect it.
        stream: The stream to read, None to read the file.
    """

    path: Path
    format: str | None = None
    has_header: bool = True
    encoding: str = UTF8
    delimiter: str | None = None
    stream: IO[bytes] | None = None


@dataclass(frozen=True)
class Table:
    """An open table.

    Attributes:
        rows: The rows.
        format: csv, tsv, jsonl, json or parquet.
        columns: Names of the columns, None for JSON, whose rows may have different columns.
        dialect: Format of the records of CSV and TSV, None for other formats.
        schema: Arrow schema of Parquet, None for other formats.
        notes: Messages for the user about how the file is read.
    """

    rows: Iterator["Row"]
    format: str
    columns: list[str] | None = None
    dialect: Dialect | None = None
    schema: Any = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        location: File and line, for messages.
        cells: Values by column name, or by column number if the table has no header. Empty if the
            row is invalid.
        error: Why the row is invalid, "" for a valid row.
        has_variable_columns: Whether the rows of the table may have different columns.
        header_location: File and line of the header, "" without one.
    """

    location: str
    cells: Mapping[str, Any]
    error: str = ""
    has_variable_columns: bool = False
    header_location: str = ""


def get_cell(row: Row, name: str, option: str = "") -> Any:
    """Return the value of a column.

    Args:
        row: The row.
        name: Name of the column.
        option: Command-line option that names the column, for the error if there is no such column.

    Raises:
        BadExampleError: The row is invalid, its cell is empty, or perhaps only this row lacks the
            column.
        TaskError: The table has no such column.
    """
    if row.error:
        raise BadExampleError(row.error)
    value = get_nested_value(row.cells, name)
    if value is _MISSING_COLUMN:
        columns = ", ".join(map(repr, row.cells))
        error = f"there is no column {name!r}"
        advice = f"; name the column with {option}" if option else ""
        if row.has_variable_columns:
            raise BadExampleError(error, f"; the columns are {columns}{advice}")
        location = row.header_location or row.location
        raise TaskError(f"{location}: {error}; the columns are {columns}{advice}")
    if value is None:
        raise BadExampleError("a missing value", f" in column {name!r}")
    return value


#: Returned by ``get_nested_value`` for a missing column.
_MISSING_COLUMN = object()


def get_nested_value(cells: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, ``_MISSING_COLUMN`` if there is none.

    The name "labels.label" denotes the key "label" of the object in the column "labels".
    """
    if name in cells:
        return cells[name]
    column, dot, key = name.partition(".")
    value = cells.get(column)
    if dot and isinstance(value, Mapping):
        return get_nested_value(value, key)
    return _MISSING_COLUMN


def has_column(row: Row, name: str) -> bool:
    """Return whether a row has a column or nested key; see ``get_nested_value``."""
    return get_nested_value(row.cells, name) is not _MISSING_COLUMN


def get_text(row: Row, name: str, option: str = "") -> str:
    """Return the text of a column; raise BadExampleError if it is empty or not text.

    ``option`` is as in ``get_cell``.
    """
    return require_text(get_cell(row, name, option), name)


def require_text(value: Any, name: str) -> str:
    """Return a value of the column ``name``; raise BadExampleError if it is empty or not text."""
    if not isinstance(value, str):
        # Numbers are not converted, because their notation, such as leading zeros, is lost.
        detail = f" in column {name!r}: found {_describe_type(value)}: {value!r}"
        raise BadExampleError("a value that is not text", detail)
    if not value.strip():
        raise BadExampleError("an empty text", f" in column {name!r}")
    reject_lone_surrogates(value, name)
    return value


def drop_zero_decimals(text: str) -> str:
    """Return "1" for "1.0", as pandas writes an integer column with missing values to CSV.

    Any other text is returned unchanged.
    """
    match = re.fullmatch(r"([+-]?[0-9]{1,18})\.0+", text)
    return str(int(match[1])) if match else text


def reject_lone_surrogates(text: str, name: str) -> None:
    """Raise BadExampleError if a text of the column ``name`` has a lone surrogate.

    Half of a UTF-16 surrogate pair can occur as an escape in JSON, but cannot be encoded.
    """
    if has_surrogates(text):
        raise BadExampleError("a lone surrogate (half of a character)", f" in column {name!r}")


def read_unique_id(row: Row, column: str, seen_ids: set[str], *, is_required: bool = False) -> str:
    """Return the id of a row and add it to ``seen_ids``.

    Args:
        row: The row.
        column: The column of the ids; "" for rows without ids.
        seen_ids: The ids of previous rows.
        is_required: Whether each row must have an id; otherwise a missing id is returned as "".

    Raises:
        BadExampleError: A previous row has the same id, or a required id is missing.
    """
    is_missing = not row.error and row.cells.get(column) in (None, "")
    if not is_required and (is_missing or not column):
        return ""
    row_id = str(get_cell(row, column)).strip()
    if row_id in seen_ids:
        detail = (
            f": {row_id!r}; if the column {column!r} does not hold ids, give --set task.id_column="
        )
        raise BadExampleError("a duplicate id", detail)
    seen_ids.add(row_id)
    return row_id


def _describe_type(value: Any) -> str:
    """Return the type of a JSON value for messages, such as "a number"."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def read_rows(
    path: Path,
    *,
    has_header: bool = True,
    encoding: str = UTF8,
    delimiter: str | None = None,
    notes: list[str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a table in the format of its suffix; ``.txt`` is read as TSV.

    Cells of CSV may be quoted. In TSV, quotation marks are ordinary characters, as in GLUE's files.

    Args:
        path: The file.
        has_header: Whether the first line names the columns; otherwise the names are "0", "1", ….
        encoding: The text encoding.
        delimiter: Delimiter of CSV; None to detect it.
        notes: A list to which messages about how the file is read are appended.

    Raises:
        TaskError: The file cannot be read.
    """
    source = TableSource(path, has_header=has_header, encoding=encoding, delimiter=delimiter)
    with open_table(source) as table:
        if notes is not None:
            notes += table.notes
        yield from table.rows


def read_task_rows(path: Path, task: TaskSettings, counts: ExampleCounts) -> Iterator[Row]:
    """Yield the rows of a task's file, and add messages to ``counts.notes``; see ``read_rows``."""
    return read_rows(
        path,
        has_header=task.header,
        encoding=task.encoding,
        delimiter=task.delimiter or None,
        notes=counts.notes,
    )


@contextmanager
def open_table(source: TableSource) -> Iterator[Table]:
    """Open a table for reading row by row with constant memory.

    Raises:
        TaskError: The file cannot be read or has an unknown format.
    """
    path = source.path
    if source.stream is None and path.is_dir():
        raise TaskError(f"{path}: is a folder; expected a file: {_SUPPORTED_SUFFIXES}")
    table_format = source.format or detect_table_format(path)
    if table_format is None and has_txt_suffix(path):
        table_format = "tsv"
    if table_format is None:
        raise TaskError(f"{path}: unknown table format; expected one of {_SUPPORTED_SUFFIXES}")
    if table_format == "parquet":
        yield _open_parquet(source)
        return
    with open_text(path, encoding=source.encoding, stream=source.stream) as chunks:
        if table_format == "json":
            yield Table(_to_rows(json_rows.read_json(chunks, path), path), table_format)
        elif table_format == "jsonl":
            json_lines = json_rows.read_json_lines(split_lines(chunks))
            yield Table(_to_rows(json_lines, path), table_format)
        else:
            yield _open_delimited(split_lines(chunks), source, table_format)


def has_txt_suffix(path: Path) -> bool:
    """Return whether the suffix is .txt, ignoring suffixes of compressed files."""
    return get_format_suffix(path) == ".txt"


def _open_delimited(lines: Iterator[str], source: TableSource, table_format: str) -> Table:
    """Open CSV or TSV."""
    path = source.path
    delimiter = None
    if source.delimiter is not None:
        delimiter = delimited.parse_delimiter(source.delimiter)
    dialect, num_columns, lines = delimited.detect_dialect(
        lines,
        is_tsv=table_format == "tsv",
        delimiter=delimiter,
        has_header=source.has_header,
    )
    records = delimited.read_records(lines, dialect, path, has_header=source.has_header)
    if source.has_header:
        columns, header_location = _read_header(records, path)
    else:
        columns, header_location = [str(number) for number in range(num_columns or 0)], ""
    notes: list[str] = []
    if delimiter is None and table_format == "csv" and dialect.delimiter != ",":
        separator = "a tab" if dialect.delimiter == TAB else f"{dialect.delimiter!r}"
        notes.append(f"{path}: columns are separated by {separator}")
    rows = _read_delimited_rows(records, columns, path, header_location)
    return Table(rows, table_format, columns, dialect, notes=notes)


def _read_header(
    records: Iterator[tuple[int, list[str] | None]], path: Path
) -> tuple[list[str], str]:
    """Return the cells and the location of the first record that is not blank.

    Raises:
        TaskError: A column name occurs twice.
    """
    for line_number, cells in records:
        if cells:
            location = f"{path}, line {line_number:,}"
            _reject_duplicate_columns(cells, location)
            return cells, location
    return [], ""


def _read_delimited_rows(
    records: Iterator[tuple[int, list[str] | None]],
    columns: list[str],
    path: Path,
    header_location: str,
) -> Iterator[Row]:
    """Convert the records of CSV or TSV to rows; blank lines are skipped."""
    for line_number, cells in _drop_trailing_empty_records(records):
        location = f"{path}, line {line_number:,}"
        if cells is None:
            yield Row(location, {}, _UNBALANCED_QUOTES)
        elif len(cells) == len(columns):
            row_cells = dict(zip(columns, cells, strict=True))
            yield Row(location, row_cells, header_location=header_location)
        elif cells:
            yield Row(
                location,
                {},
                f"{count_noun(len(cells), 'column')} where {len(columns)} are expected",
            )


def _drop_trailing_empty_records(
    records: Iterator[tuple[int, list[str] | None]],
) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the records without those at the end that have several cells, all of them empty.

    Spreadsheets write such lines, such as ";;", below a table.
    """
    empty_records: list[tuple[int, int]] = []
    for line_number, cells in records:
        if cells is not None and len(cells) > 1 and not any(cells):
            empty_records.append((line_number, len(cells)))
        elif cells != []:
            yield from ((number, [""] * num_cells) for number, num_cells in empty_records)
            empty_records.clear()
            yield line_number, cells


def _reject_duplicate_columns(columns: list[str], location: str) -> None:
    duplicates = sorted(name for name, count in Counter(columns).items() if count > 1)
    if duplicates:
        raise TaskError(f"{location}: duplicate column {duplicates[0]!r}; rename one of them")


def _to_rows(values: Iterator[json_rows.JsonRow], path: Path) -> Iterator[Row]:
    """Convert JSON objects to rows, which may have different columns."""
    for line_number, value, error in values:
        yield Row(f"{path}, line {line_number:,}", value, error, has_variable_columns=True)


def _open_parquet(source: TableSource) -> Table:
    """Open a Parquet file or stream.

    Raises:
        TaskError: The file cannot be read, or column names are repeated.
        MissingExtraError: pyarrow is not installed.
    """
    path = source.path
    with require_extra("parquet", f"{path}: reading Parquet", package="pyarrow"):
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    try:
        # Parquet is read from its end, so compressed files and streams are read into memory.
        if source.stream is not None:
            file = ParquetFile(BytesIO(decompress(source.stream)[1].read()))
        elif path.suffix.lower() in COMPRESSION_SUFFIXES:
            with path.open("rb") as compressed_file:
                file = ParquetFile(BytesIO(decompress(compressed_file)[1].read()))
        else:
            file = ParquetFile(path)
    except FileNotFoundError:
        raise TaskError(describe_missing_path(path)) from None
    except (OSError, ArrowInvalid, *DECOMPRESSION_ERRORS) as error:
        raise TaskError(f"{path}: not a readable Parquet file: {error}") from None
    schema = file.schema_arrow
    _reject_duplicate_columns(schema.names, str(path))
    return Table(_read_parquet_rows(file, path), "parquet", list(schema.names), schema=schema)


def _read_parquet_rows(file: Any, path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid

    num_rows = 0
    try:
        for batch in file.iter_batches():
            for cells in _to_python_rows(batch, path, num_rows):
                num_rows += 1
                yield Row(f"{path}, row {num_rows:,}", cells)
    except (OSError, ArrowInvalid) as error:
        raise TaskError(f"{path}: not a readable Parquet file: {error}") from None
    finally:
        file.close()


def _to_python_rows(batch: Any, path: Path, num_previous_rows: int) -> list[dict[str, Any]]:
    """Convert an Arrow batch to rows of Python values.

    Raises:
        TaskError: Python cannot represent a value, such as a date after the year 9999.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (ValueError, OverflowError) as error:
            first, last = num_previous_rows + 1, num_previous_rows + len(batch)
            raise TaskError(
                f"{path}, rows {first:,} to {last:,}: a value in the column {name!r} cannot be "
                f"read: {error}; correct it, or remove the column from the file",
            ) from None
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
