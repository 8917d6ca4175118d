"""Write tables row by row as CSV, TSV, JSON or Parquet. Files are written atomically."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

from bertsmith.errors import InputError, require_extra
from bertsmith.files import atomic_file, dump_json
from bertsmith.tasks.delimited import TAB, Dialect
from bertsmith.tasks.text_files import UTF8, detect_table_format
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.archives import COMPRESSION_SUFFIXES, compress

#: The cells of a row by column name.
Cells = Mapping[str, Any]
#: A new file, or a function to which its text is passed.
TextOutput = Path | Callable[[str], object]
CSV, TSV = Dialect(",", has_quotes=True), Dialect(TAB, has_quotes=False)


@dataclass(frozen=True)
class TableLayout:
    """How a table is written.

    Attributes:
        format: "csv", "tsv", "jsonl", "json" or "parquet".
        columns: Column names in order; ignored for JSON, which writes the keys of each row.
        dialect: Delimiter, quoting and line endings of CSV and TSV; None for the usual ones.
        header: Whether CSV and TSV have a header.
        types: Types of the added columns in Parquet; see ``get_arrow_type``.
        schema: Arrow schema of the input table, which determines the types of the other columns in
            Parquet; None if the input is not Parquet.
    """

    format: str
    columns: Sequence[str]
    dialect: Dialect | None = None
    header: bool = True
    types: Mapping[str, str] | None = None
    schema: Any = None


class RowWriter(Protocol):
    """Writes the rows of a table."""

    def append(self, rows: Sequence[Cells]) -> None:
        """Write one or more rows."""

    def finish(self) -> None:
        """Write the end of the table."""


def get_output_format(out: Path) -> str:
    """Return the table format that the suffix of a path indicates.

    Raises:
        InputError: The suffix is unknown.
    """
    table_format = detect_table_format(out)
    if table_format is None or (
        table_format == "parquet" and out.suffix.lower() in COMPRESSION_SUFFIXES
    ):
        raise InputError(
            f"{out}: expected a name that ends in .csv, .tsv, .jsonl, .json or .parquet; .gz, .xz, "
            ".bz2 or .zst may follow, except after .parquet"
        )
    return table_format


@contextmanager
def open_text_output(out: TextOutput, encoding: str = UTF8) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes text.

    Args:
        out: A new file, whose suffix determines its compression, or the function to yield.
        encoding: Encoding of the file.
    """
    if not isinstance(out, Path):
        yield out
        return
    with (
        atomic_file(out) as temporary,
        temporary.open("wb") as file,
        compress(file, out) as compressed,
    ):
        text_file = io.TextIOWrapper(compressed, encoding=encoding, newline="")

        def write(text: str) -> None:
            try:
                text_file.write(text)
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{out}: {encoding} has no character {error.object[error.start]!r}; write a "
                    "table in another format (.jsonl, .parquet), or give --encoding utf-8"
                ) from None

        yield write
        text_file.flush()


@contextmanager
def open_row_writer(
    out: TextOutput, layout: TableLayout, encoding: str = UTF8
) -> Iterator[RowWriter]:
    """Yield a writer for the rows of a table.

    Args:
        out: A new file, which is created only if the block succeeds, or a function. Parquet is not
            text: a function receives JSON lines instead.
        layout: How the table is written.
        encoding: Encoding of a text file.
    """
    if layout.format == "parquet" and isinstance(out, Path):
        with atomic_file(out) as temporary:
            writer = ParquetRowWriter(temporary, layout)
            try:
                yield writer
                writer.finish()
            finally:
                writer.close()
        return
    with open_text_output(out, encoding) as write:
        text_writer: RowWriter
        if layout.format in ("csv", "tsv"):
            text_writer = _DelimitedWriter(write, layout, is_file=isinstance(out, Path))
        else:
            text_writer = _JsonWriter(write, is_array=layout.format == "json")
        yield text_writer
        text_writer.finish()


class _CsvFile:
    """A file object for csv.writer that passes the text to a function."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write


def check_tsv_cell(cell: str, delimiter: str = TAB) -> None:
    """Raise InputError if a cell cannot be written without quotes."""
    if any(separator in cell for separator in (delimiter, "\r", "\n")):
        raise InputError(
            f"TSV cannot hold a tab or line break inside a cell, as in {cell[:60]!r}; "
            "write .csv, .jsonl or .parquet"
        )


def _create_surrogate_error(
    format_name: str, columns: Sequence[str], cells: Sequence[Any]
) -> InputError:
    """Return the error for the first cell that has a lone surrogate.

    Args:
        format_name: The format that cannot hold it.
        columns: The name of the column of each cell.
        cells: The cells, of which at least one has a lone surrogate.
    """
    texts = (
        cell if isinstance(cell, str) else json.dumps(to_json_value(cell), ensure_ascii=False)
        for cell in cells
    )
    column, text = next(
        item for item in zip(columns, texts, strict=True) if has_surrogates(item[1])
    )
    surrogate = next(re.finditer("[\ud800-\udfff]", text))
    # 30 characters before the surrogate, and 30 after it.
    excerpt = ascii(text[max(surrogate.start() - 30, 0) : surrogate.end() + 30])
    return InputError(
        f"{format_name} cannot hold a lone surrogate (half of a character), as in the column "
        f"{column!r}: {excerpt}; correct it, or write .jsonl instead"
    )


class _DelimitedWriter:
    """Writes CSV with quotes where necessary, or TSV without quotes."""

    def __init__(
        self, write: Callable[[str], object], layout: TableLayout, *, is_file: bool
    ) -> None:
        self._write = write
        #: Whether the text is encoded. The standard output escapes surrogates.
        self._is_file = is_file
        self._columns = layout.columns
        self._dialect = layout.dialect or (TSV if layout.format == "tsv" else CSV)
        # The writer quotes the characters of the line ending, and readers end lines at both.
        self._csv_writer = csv.writer(
            _CsvFile(self._write_csv_row),
            delimiter=self._dialect.delimiter,
            quotechar='"',
            lineterminator="\r\n",
            quoting=csv.QUOTE_MINIMAL,
        )
        if layout.header:
            self._write_cells(list(layout.columns))

    def append(self, rows: Sequence[Cells]) -> None:
        for row in rows:
            self._write_cells([to_csv_cell(row.get(name)) for name in self._columns])

    def _write_csv_row(self, text: str) -> None:
        self._write(text.removesuffix("\r\n") + self._dialect.newline)

    def _write_cells(self, cells: list[str]) -> None:
        """Write a row; raise InputError if a cell cannot be written."""
        if self._is_file and has_surrogates("".join(cells)):
            raise _create_surrogate_error("CSV and TSV", self._columns, cells)
        if self._dialect.has_quotes:
            self._csv_writer.writerow(cells)
            return
        for cell in cells:
            check_tsv_cell(cell, self._dialect.delimiter)
        self._write(self._dialect.delimiter.join(cells) + self._dialect.newline)

    def finish(self) -> None:
        """Do nothing: delimited text has no end marker."""


class _JsonWriter:
    """Writes JSON lines, or a JSON array of objects."""

    def __init__(self, write: Callable[[str], object], *, is_array: bool) -> None:
        self._write = write
        self._is_array = is_array
        self._num_rows = 0

    def append(self, rows: Sequence[Cells]) -> None:
        for row in rows:
            line = to_json_line(row)
            if self._is_array:
                self._write((",\n" if self._num_rows else "[\n") + line)
            else:
                self._write(f"{line}\n")
            self._num_rows += 1

    def finish(self) -> None:
        if self._is_array:
            self._write("\n]\n" if self._num_rows else "[]\n")


def to_csv_cell(value: Any) -> str:
    """Return a value as text for a CSV cell.

    Missing values and NaN become an empty cell, lists and objects become JSON.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return repr(value)
    json_value = to_json_value(value)
    return json_value if isinstance(json_value, str) else to_json_line(json_value)


def to_json_line(value: Any) -> str:
    """Return a value as JSON on one line. Types without a JSON form, such as dates, become text."""
    try:
        text = dump_json(to_json_value(value))
        text.encode()
    except UnicodeEncodeError:
        # A lone surrogate cannot be encoded as UTF-8, but as an ASCII escape.
        return dump_json(to_json_value(value), ensure_ascii=True)
    return text


def to_json_value(value: Any) -> Any:
    """Convert a Parquet value to types that JSON supports."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def import_pyarrow() -> Any:
    """Return the module pyarrow.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    with require_extra("parquet", "writing Parquet", package="pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet
    return pa


def get_arrow_type(name: str) -> Any:
    """Return the Arrow type of a column.

    Args:
        name: "text", "texts", "number", "numbers", "index", or "spans" for a list of labeled spans.
    """
    pa = import_pyarrow()
    span_fields = [
        ("text", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("label", pa.string()),
        ("probability", pa.float64()),
    ]
    arrow_types = {
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "number": pa.float64(),
        "numbers": pa.list_(pa.float64()),
        "index": pa.int64(),
        "spans": pa.list_(pa.struct(span_fields)),
    }
    return arrow_types[name]


def to_arrow_table(rows: Sequence[Cells], layout: TableLayout) -> Any:
    """Convert rows to a pyarrow table.

    Raises:
        InputError: The values of a column have no common type, or a lone surrogate.
    """
    pa = import_pyarrow()
    if has_surrogates("".join(layout.columns)):
        raise _create_surrogate_error("Parquet", layout.columns, layout.columns)
    columns = {}
    for name in layout.columns:
        column_type = None
        if layout.types and name in layout.types:
            column_type = get_arrow_type(layout.types[name])
        elif layout.schema is not None:
            column_type = layout.schema.field(name).type
        values = [row.get(name) for row in rows]
        try:
            columns[name] = _remove_empty_struct(pa.array(values, column_type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise InputError(
                f"Parquet cannot hold the column {name!r}: {error}; write .jsonl instead"
            ) from None
        except UnicodeEncodeError:
            raise _create_surrogate_error("Parquet", [name] * len(values), values) from None
    return pa.table(columns)


def _remove_empty_struct(column: Any) -> Any:
    """Return a column of nulls if all objects of a column are empty, which Parquet cannot hold."""
    pa = import_pyarrow()
    if pa.types.is_struct(column.type) and not column.type.num_fields:
        return pa.nulls(len(column))
    return column


def write_part(table: Any, path: Path) -> None:
    """Write a Parquet file.

    Raises:
        InputError: Parquet cannot hold a type of the table.
    """
    pa = import_pyarrow()
    try:
        pa.parquet.write_table(table, path)
    except pa.ArrowNotImplementedError as error:
        raise InputError(f"Parquet cannot hold the table: {error}; write .jsonl instead") from None


class ParquetRowWriter:
    """Writes a Parquet file whose column types may only be known after the last row.

    Each call of ``append`` writes a part file, and ``finish`` merges the parts. A conflict between
    types is an error in ``append``, before later rows are predicted.
    """

    def __init__(self, path: Path, layout: TableLayout) -> None:
        self._path = path
        self._layout = layout
        self._num_parts = 0
        #: Column types that fit all parts.
        self._schema: Any = None
        self._folder = path.with_name(f"{path.name}.parts")
        # A killed process with the same id, as in containers, leaves its folder.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()

    def append(self, rows: Sequence[Cells]) -> None:
        """Write rows to a new part file.

        Raises:
            InputError: The values of a column have no common type with those of earlier rows.
        """
        table = to_arrow_table(rows, self._layout)
        earlier_schemas = [] if self._schema is None else [self._schema]
        self._schema = unify_schemas([*earlier_schemas, table.schema])
        write_part(table, self._get_part_path(self._num_parts))
        self._num_parts += 1

    def _get_part_path(self, index: int) -> Path:
        return self._folder / f"{index:06}.parquet"

    def finish(self) -> None:
        """Merge the parts; a table without rows still has its columns."""
        if not self._num_parts:
            self.append([])
        parts = list(map(self._get_part_path, range(self._num_parts)))
        merge_parquet_parts(parts, self._path)

    def close(self) -> None:
        """Remove the parts."""
        shutil.rmtree(self._folder, ignore_errors=True)


def merge_parquet_parts(parts: Sequence[Path], path: Path) -> None:
    """Merge Parquet files: each becomes a row group, with column types that fit all files.

    Raises:
        InputError: The values of a column have no common type.
    """
    pa = import_pyarrow()
    schema = unify_schemas([pa.parquet.read_schema(part) for part in parts])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for part in parts:
            table = pa.parquet.read_table(part)
            columns = []
            for name in schema.names:
                if name in table.column_names:
                    columns.append(table[name])
                else:
                    columns.append(pa.nulls(len(table), schema.field(name).type))
            table = pa.table(columns, names=schema.names)
            try:
                writer.write_table(table.cast(schema))
            except pa.ArrowInvalid as error:
                # For example, an integer of 64 bits in a column that also has decimal numbers.
                raise InputError(
                    f"Parquet cannot hold a column: {error}; write .jsonl instead"
                ) from None


def unify_schemas(schemas: Sequence[Any]) -> Any:
    """Return an Arrow schema with column types that fit all schemas.

    Raises:
        InputError: The types of a column have no common type.
    """
    pa = import_pyarrow()
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(
            f"the values of a Parquet column must have one type: {error}; write .jsonl instead"
        ) from None


def choose_column_names(
    names: Sequence[str], existing: Sequence[str], path: Path
) -> tuple[dict[str, str], list[str]]:
    """Choose names for added columns that differ from the existing columns of a table.

    If a preferred name exists, the prefix "predicted_" is added; if this name exists too, also a
    number.

    Args:
        names: Preferred names of the added columns.
        existing: Columns of the table.
        path: Path of the table, for the notes.

    Returns:
        A mapping from preferred to chosen names, and a note about each name that was changed.
    """
    chosen: dict[str, str] = {}
    notes: list[str] = []
    for name in names:
        candidates = chain(
            [name, f"predicted_{name}"], (f"predicted_{name}_{number}" for number in count(2))
        )
        used_names = {*existing, *chosen.values()}
        chosen[name] = next(candidate for candidate in candidates if candidate not in used_names)
        if chosen[name] != name:
            notes.append(f"{path}: the column {name!r} exists already; adding {chosen[name]!r}")
    return chosen, notes
