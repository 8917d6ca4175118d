"""Tables written row by row: CSV, TSV, JSON and Parquet files that appear whole or not at all."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import zstandard

from bertsmith.errors import InputError, MissingExtraError
from bertsmith.files import dump_json, sync
from bertsmith.tasks.delimited import Dialect
from bertsmith.tasks.text_files import UTF8, detect_table_format
from bertsmith.text.archives import COMPRESSION_SUFFIXES

Cells = Mapping[str, Any]
CSV = Dialect(",", has_quotes=True)
_PACKERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0),
    "xz": lambda file: lzma.LZMAFile(file, "wb"),  # noqa: SIM115 - open_output closes it
    "bzip2": lambda file: bz2.BZ2File(file, "wb"),
    "zstd": lambda file: zstandard.ZstdCompressor().stream_writer(file, closefd=False),
}


@dataclass(frozen=True)
class TableLayout:
    """How a table is written. format: csv, tsv, jsonl, json or parquet.

    columns: in their order; JSON takes them from the rows. types: of columns of Parquet, see
    ``arrow_type``. schema: that of a Parquet table whose columns come first.
    """

    format: str
    columns: Sequence[str]
    dialect: Dialect = CSV
    header: bool = True
    types: Mapping[str, str] | None = None
    schema: Any = None


class RowWriter(Protocol):
    """What takes the rows of a table."""

    def append(self, rows: Sequence[Cells]) -> None:
        """Write some rows, one or more."""

    def finish(self) -> None:
        """Write what stands after the last row."""


def output_format(out: Path) -> str:
    """Return the format of a table to be written. Raises QuestionError."""
    form = detect_table_format(out)
    if form is None or (form == "parquet" and out.suffix.lower() in COMPRESSION_SUFFIXES):
        raise InputError(
            f"{out}: expected a name that ends in .csv, .tsv, .jsonl, .json or .parquet; all but "
            "the last may be followed by .gz, .xz, .bz2 or .zst"
        )
    return form


@contextmanager
def atomic_file(out: Path) -> Iterator[Path]:
    """Yield a temporary path that takes the place of ``out`` when the block ends well."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(out)
        sync(out.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_text_output(out: Path, encoding: str = UTF8) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes text to a new file, packed as its name says."""
    packing = COMPRESSION_SUFFIXES.get(out.suffix.lower())
    with atomic_file(out) as temporary, temporary.open("wb") as raw:
        packed = _PACKERS[packing](raw) if packing else raw
        text = io.TextIOWrapper(packed, encoding=encoding, newline="")

        def write(piece: str) -> None:
            try:
                text.write(piece)
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{out}: {encoding} has no character {error.object[error.start]!r}; write a "
                    "table of another format (.jsonl, .parquet), or give --encoding utf-8"
                ) from None

        yield write
        text.flush()
        if packing:
            packed.close()


@contextmanager
def open_row_writer(out: Path, layout: TableLayout, encoding: str = UTF8) -> Iterator[RowWriter]:
    """Yield what takes the rows of a new file; it appears when the block ends well."""
    if layout.format == "parquet":
        with atomic_file(out) as temporary:
            writer = ParquetRows(temporary, layout)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()
        return
    with open_text_output(out, encoding) as write:
        text = create_text_writer(write, layout)
        yield text
        text.finish()


def create_text_writer(write: Callable[[str], object], layout: TableLayout) -> RowWriter:
    """Return what writes rows as text by a function."""
    if layout.format in ("csv", "tsv"):
        return _DelimitedRows(write, layout)
    return _JsonRows(write, is_array=layout.format == "json")


class _Target:
    """A function that writes text, as csv expects a file."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write


class _DelimitedRows:
    def __init__(self, write: Callable[[str], object], layout: TableLayout) -> None:
        self._columns, self._dialect = layout.columns, layout.dialect
        self._is_tsv = not layout.dialect.has_quotes
        self._writer = csv.writer(
            _Target(write), delimiter=layout.dialect.delimiter, quotechar='"',
            lineterminator=layout.dialect.newline,
            quoting=csv.QUOTE_NONE if self._is_tsv else csv.QUOTE_MINIMAL,
        )  # fmt: skip
        if self._is_tsv:
            self._write = write
        if layout.header:
            self._put(list(layout.columns))

    def append(self, rows: Sequence[Cells]) -> None:
        for row in rows:
            self._put([cell_text(row.get(name)) for name in self._columns])

    def _put(self, cells: list[str]) -> None:
        if not self._is_tsv:
            self._writer.writerow(cells)
            return
        for cell in cells:
            if any(mark in cell for mark in (self._dialect.delimiter, "\r", "\n")):
                raise InputError(
                    f"TSV cannot hold a tab or a line end, as in {cell[:60]!r}; write .csv, "
                    ".jsonl or .parquet"
                )
        self._write(self._dialect.delimiter.join(cells) + self._dialect.newline)

    def finish(self) -> None:
        """Do nothing: nothing stands after the last row."""


class _JsonRows:
    def __init__(self, write: Callable[[str], object], *, is_array: bool) -> None:
        self._write, self._is_array, self._count = write, is_array, 0

    def append(self, rows: Sequence[Cells]) -> None:
        for row in rows:
            if self._is_array:
                self._write(",\n" if self._count else "[\n")
            self._write(to_json_line(row) + ("" if self._is_array else "\n"))
            self._count += 1

    def finish(self) -> None:
        if self._is_array:
            self._write("\n]\n" if self._count else "[]\n")


def cell_text(value: Any) -> str:
    """Return a value as a cell of CSV: texts as they are, lists and objects as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value)
    return to_json_line(value)


def to_json_line(value: Any) -> str:
    """Return a value as JSON on one line; what JSON has no form for, such as a time, as text."""
    try:
        text = dump_json(to_json_value(value))
        text.encode()
    except UnicodeEncodeError:
        # Half of a character can only be written as an escape.
        return json.dumps(to_json_value(value))
    return text


def to_json_value(value: Any) -> Any:
    """Return a value of Parquet as JSON has it."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def import_pyarrow() -> Any:
    """Return the module pyarrow. Raises MissingExtraError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "parquet", "writing Parquet") from None
    return pa


def arrow_type(name: str) -> Any:
    """Return the type of a column of predictions by its name here."""
    pa = import_pyarrow()
    span = [("text", pa.string()), ("start", pa.int64()), ("end", pa.int64()),
            ("label", pa.string()), ("probability", pa.float64())]  # fmt: skip
    return {
        "text": pa.string(), "texts": pa.list_(pa.string()),
        "number": pa.float64(), "numbers": pa.list_(pa.float64()),
        "index": pa.int64(), "spans": pa.list_(pa.struct(span)),
    }[name]  # fmt: skip


def to_arrow_table(rows: Sequence[Cells], layout: TableLayout) -> Any:
    """Return rows as a table of pyarrow. Raises QuestionError for values without a common type."""
    pa = import_pyarrow()
    columns = {}
    for name in layout.columns:
        kind = None
        if layout.types and name in layout.types:
            kind = arrow_type(layout.types[name])
        elif layout.schema is not None:
            kind = layout.schema.field(name).type
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise InputError(
                f"Parquet cannot hold the column {name!r}: {error}; write .jsonl instead"
            ) from None
    return pa.table(columns)


class ParquetRows:
    """A Parquet file whose columns may turn out to have a type only in later rows.

    Each window of rows is a file of its own until the end.
    """

    def __init__(self, path: Path, layout: TableLayout) -> None:
        self._path, self._layout, self._count = path, layout, 0
        self._arrow = import_pyarrow()
        self._folder = path.with_name(f"{path.name}.parts")
        self._folder.mkdir()

    def append(self, rows: Sequence[Cells]) -> None:
        """Write a part."""
        part = self._folder / f"{self._count:06}.parquet"
        self._arrow.parquet.write_table(to_arrow_table(rows, self._layout), part)
        self._count += 1

    def finish(self) -> None:
        """Join the parts; a table without rows has its columns."""
        if not self._count:
            self.append([])
        parts = [self._folder / f"{number:06}.parquet" for number in range(self._count)]
        merge_parquet_parts(parts, self._path)

    def close(self) -> None:
        """Remove the parts."""
        shutil.rmtree(self._folder, ignore_errors=True)


def merge_parquet_parts(parts: Sequence[Path], path: Path) -> None:
    """Write one Parquet file of several, a row group each, with types that hold all values."""
    pa = import_pyarrow()
    schemas = [pa.parquet.read_schema(part) for part in parts]
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(
            f"{path}: Parquet holds one type a column: {error}; write .jsonl instead"
        ) from None
    with pa.parquet.ParquetWriter(path, schema) as whole:
        for part in parts:
            table = pa.parquet.read_table(part)
            columns = [table[name] if name in table.column_names
                       else pa.nulls(len(table), schema.field(name).type)
                       for name in schema.names]  # fmt: skip
            whole.write_table(pa.table(columns, names=schema.names).cast(schema))


def unused_column_names(
    names: Sequence[str], existing: Sequence[str], path: Path
) -> tuple[dict[str, str], list[str]]:
    """Return the names under which columns are added to a table, and notes on those that changed.

    A name that the table has already gets the prefix "predicted_", and if need be a number.
    """
    chosen: dict[str, str] = {}
    notes: list[str] = []
    for name in names:
        free, number = name, 1
        while free in existing or free in chosen.values():
            suffix = f"_{number}" if number > 1 else ""
            free, number = f"predicted_{name}{suffix}", number + 1
        chosen[name] = free
        if free != name:
            notes.append(f"{path}: the column {name!r} exists already; adding {free!r}")
    return chosen, notes
