"""Rows of CSV, TSV, JSON and Parquet files, each with its place for error messages."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import MissingExtraError, TaskError
from bertsmith.tasks import delimited, json_rows
from bertsmith.tasks.delimited import TAB, Dialect
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.text_files import UTF8, detect_table_format, open_text, split_lines
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.archives import COMPRESSION_SUFFIXES, DECOMPRESSION_ERRORS, decompress

_QUOTED = (
    "a quotation mark that does not end its cell; inside a cell that begins with one it is written "
    "twice"
)
_KNOWN = ".csv, .tsv, .txt, .jsonl, .json, .parquet"


@dataclass(frozen=True)
class TableSource:
    """A table to read.

    format: csv, tsv, jsonl, json or parquet; None: by the suffix. header: whether the first line of
    CSV or TSV names the columns. delimiter: of CSV; None: a comma, or what else splits the records
    evenly. stream: read instead of the file; then ``path`` is a name for messages.
    """

    path: Path
    format: str | None = None
    header: bool = True
    encoding: str = UTF8
    delimiter: str | None = None
    stream: IO[bytes] | None = None


@dataclass(frozen=True)
class Table:
    """An open table. columns: None for JSON, where each row has its own.

    dialect: of CSV and TSV. schema: of Parquet. notes: what a user should know of how it is read.
    """

    rows: Iterator["Row"]
    format: str
    columns: list[str] | None = None
    dialect: Dialect | None = None
    schema: Any = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One row. ``where``: file and line for people. ``cells``: by column name, or by number.

    ``fault``: why the row cannot be read, if it cannot; then it has no cells. ``own``: whether its
    columns may be others than those of the first row.
    """

    location: str
    cells: Mapping[str, Any]
    error: str = ""
    has_own_columns: bool = False


def get_cell(row: Row, name: str) -> Any:
    """Return the value of a column; BadExampleError for nothing.

    Where there is no such column: BadExampleError if this row alone lacks it, else TaskError.
    """
    if row.error:
        raise BadExampleError(row.error)
    value = nested_value(row.cells, name)
    if value is _ABSENT:
        fault, known = f"there is no column {name!r}", ", ".join(map(repr, row.cells))
        if row.has_own_columns:
            raise BadExampleError(fault, f"; the columns are {known}")
        raise TaskError(f"{row.location}: {fault}; the columns are {known}")
    if value is None:
        raise BadExampleError("nothing where a value is expected", f" in column {name!r}")
    return value


#: What ``nested_value`` returns where there is no such column.
_ABSENT = object()


def nested_value(cells: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column; "labels.label" is a key of the object in the column "labels".

    ``_ABSENT`` where there is no such column, or no such key.
    """
    if name in cells:
        return cells[name]
    first, dot, other = name.partition(".")
    inner = cells.get(first)
    if dot and isinstance(inner, Mapping):
        return nested_value(inner, other)
    return _ABSENT


def has_column(row: Row, name: str) -> bool:
    """Tell whether a row has a column, or a key in one; see ``nested_value``."""
    return nested_value(row.cells, name) is not _ABSENT


def get_text(row: Row, name: str) -> str:
    """Return the text of a column; BadExampleError for what is none, or empty."""
    return check_text(get_cell(row, name), name)


def check_text(value: Any, name: str) -> str:
    """Return a text of the column ``name``; BadExampleError for what is none, or empty."""
    if not isinstance(value, str):
        # A number would have lost the form that it was written in, such as its zeros.
        raise BadExampleError("no text", f" in column {name!r}, but {_kind_of(value)}: {value!r}")
    if not value.strip():
        raise BadExampleError("an empty text", f" in column {name!r}")
    reject_lone_surrogates(value, name)
    return value


def reject_lone_surrogates(text: str, name: str) -> None:
    """Raise BadExampleError where a text of the column ``name`` has half of a character.

    JSON can write it, and no encoding of a text has it.
    """
    if has_surrogates(text):
        raise BadExampleError("half a character", f" (a surrogate) in column {name!r}")


def read_unique_id(row: Row, column: str, seen: set[str], *, needed: bool = False) -> str:
    """Return what stands in the column of ids, "" where nothing does and nothing is ``needed``.

    ``seen``: the ids before it, to which it is added; BadExampleError where it is one of them.
    """
    if not needed and not row.error and row.cells.get(column) in (None, ""):
        return ""
    name = str(get_cell(row, column)).strip()
    if name in seen:
        detail = f": {name!r}; if the column {column!r} names no rows, say --set task.id="
        raise BadExampleError("an id that stood before", detail)
    seen.add(name)
    return name


def _kind_of(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list",
             dict: "an object"}  # fmt: skip
    return kinds.get(type(value), type(value).__name__)


def read_rows(
    path: Path,
    *,
    header: bool = True,
    encoding: str = UTF8,
    delimiter: str | None = None,
    notes: list[str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a table; its suffix tells its format, and ``.txt`` is read as ``.tsv``.

    CSV is quoted as usual; in TSV a quotation mark is a character like any other, as in GLUE's
    files. Without ``header`` the columns are named "0", "1" and so on. notes: what a user should
    know of how it is read is added to it. Raises TaskError.
    """
    source = TableSource(path, header=header, encoding=encoding, delimiter=delimiter)
    with open_table(source) as table:
        if notes is not None:
            notes += table.notes
        yield from table.rows


def read_task_rows(path: Path, task: TaskSettings, counts: ExampleCounts) -> Iterator[Row]:
    """Yield the rows of one of a task's tables; see ``read_rows``."""
    return read_rows(
        path, header=task.header, encoding=task.encoding, delimiter=task.delimiter or None,
        notes=counts.notes,
    )  # fmt: skip


@contextmanager
def open_table(source: TableSource) -> Iterator[Table]:
    """Open a table to be read row by row, with flat memory. Raises TaskError."""
    path = source.path
    if source.stream is None and path.is_dir():
        raise TaskError(f"{path}: a folder; expected a file, {_KNOWN}")
    form = source.format or detect_table_format(path)
    if form is None and _is_text(path):
        form = "tsv"
    if form is None:
        raise TaskError(f"{path}: unknown kind of table; expected one of {_KNOWN}")
    if form == "parquet":
        yield _parquet_table(source)
        return
    with open_text(path, encoding=source.encoding, stream=source.stream) as pieces:
        if form == "json":
            yield Table(_objects(json_rows.read_json(pieces, path), path), form)
        elif form == "jsonl":
            yield Table(_objects(json_rows.read_json_lines(split_lines(pieces)), path), form)
        else:
            yield _delimited_table(split_lines(pieces), source, form)


def _is_text(path: Path) -> bool:
    suffixes = [
        suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSION_SUFFIXES
    ]
    return suffixes[-1:] == [".txt"]


def _delimited_table(lines: Iterator[str], source: TableSource, form: str) -> Table:
    path, delimiter = source.path, source.delimiter
    if delimiter is not None:
        delimiter = delimited.parse_delimiter(delimiter)
    dialect, count, lines = delimited.open_records(
        lines, tsv=form == "tsv", delimiter=delimiter, header=source.header
    )
    records = delimited.read_records(lines, dialect, path, header=source.header)
    names, first = [str(number) for number in range(count or 0)], 0
    if source.header:
        first, cells = next(((line, cells) for line, cells in records if cells), (0, None))
        names = cells or []
        _refuse_twins(names, f"{path}, line {first:,}")
    notes: list[str] = []
    if delimiter is None and form == "csv" and dialect.delimiter != ",":
        shown = "a tab" if dialect.delimiter == TAB else f"{dialect.delimiter!r}"
        notes.append(f"{path}: columns are separated by {shown}")
    return Table(_rows(records, names, path), form, names, dialect, notes=notes)


def _rows(
    records: Iterator[tuple[int, list[str] | None]], names: list[str], path: Path
) -> Iterator[Row]:
    for number, cells in records:
        where = f"{path}, line {number:,}"
        if cells is None:
            yield Row(where, {}, _QUOTED)
        elif len(cells) == len(names):
            yield Row(where, dict(zip(names, cells, strict=True)))
        elif cells:
            yield Row(where, {}, f"{len(cells)} columns where {len(names)} are expected")


def _refuse_twins(names: list[str], where: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise TaskError(f"{where}: the column {twice[0]!r} stands there twice; rename one of them")


def _objects(values: Iterator[json_rows.JsonRow], path: Path) -> Iterator[Row]:
    is_later = False
    for number, value, fault in values:
        yield Row(f"{path}, line {number:,}", value, fault, has_own_columns=is_later)
        is_later = is_later or not fault


def _parquet_table(source: TableSource) -> Table:
    path = source.path
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "parquet", f"{path}: reading Parquet") from None
    try:
        # Parquet is read from its end, so what is packed or piped is held in memory.
        if source.stream is not None:
            file = ParquetFile(BytesIO(decompress(source.stream)[1].read()))
        elif path.suffix.lower() in COMPRESSION_SUFFIXES:
            with path.open("rb") as packed:
                file = ParquetFile(BytesIO(decompress(packed)[1].read()))
        else:
            file = ParquetFile(path)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file") from None
    except (OSError, ArrowInvalid, *DECOMPRESSION_ERRORS) as error:
        raise TaskError(f"{path}: not a readable Parquet file: {error}") from None
    schema = file.schema_arrow
    _refuse_twins(schema.names, str(path))
    return Table(_parquet_rows(file, path), "parquet", list(schema.names), schema=schema)


def _parquet_rows(file: Any, path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid

    number = 0
    try:
        for batch in file.iter_batches():
            for cells in _plain(batch, path, number):
                number += 1
                yield Row(f"{path}, row {number:,}", cells)
    except (OSError, ArrowInvalid) as error:
        raise TaskError(f"{path}: not a readable Parquet file: {error}") from None
    finally:
        file.close()


def _plain(batch: Any, path: Path, before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch as plain values; TaskError for those that Python cannot hold.

    before: the number of rows before it.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (ValueError, OverflowError) as error:
            raise TaskError(
                f"{path}, rows {before + 1:,} to {before + len(batch):,}: a value in the column "
                f"{name!r} cannot be read: {error}; mend it, or leave the column out of the file"
            ) from None
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
