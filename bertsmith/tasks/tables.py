"""Rows of CSV, TSV, JSON lines and Parquet files, each with its place for error messages.

It never knows what a column means.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bertsmith.errors import MissingExtraError, TaskError
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.text.alphabet import has_surrogates

#: Cells can be long texts; csv's own limit is 128 KB.
_LONGEST_CELL = 2**27
_QUOTED = (
    "a quotation mark that does not end its cell; inside a cell that begins with one it is written "
    "twice"
)
SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    """One row. ``where``: file and line for people. ``cells``: by column name, or by number.

    ``fault``: why the row cannot be read, if it cannot; then it has no cells. ``own``: whether its
    columns may be others than those of the first row.
    """

    where: str
    cells: Mapping[str, Any]
    fault: str = ""
    own: bool = False


def cell(row: Row, name: str) -> Any:
    """Return the value of a column; BadExampleError for nothing.

    Where there is no such column: BadExampleError if this row alone lacks it, else TaskError.
    """
    if row.fault:
        raise BadExampleError(row.fault)
    if name not in row.cells:
        fault, known = f"there is no column {name!r}", ", ".join(map(repr, row.cells))
        if row.own:
            raise BadExampleError(fault, f"; the columns are {known}")
        raise TaskError(f"{row.where}: {fault}; the columns are {known}")
    value = row.cells[name]
    if value is None:
        raise BadExampleError("nothing where a value is expected", f" in column {name!r}")
    return value


def text_of(row: Row, name: str) -> str:
    """Return the text of a column; BadExampleError for what is none, or empty."""
    return checked_text(cell(row, name), name)


def checked_text(value: Any, name: str) -> str:
    """Return a text of the column ``name``; BadExampleError for what is none, or empty."""
    if not isinstance(value, str):
        # A number would have lost the form that it was written in, such as its zeros.
        raise BadExampleError("no text", f" in column {name!r}, but {_kind_of(value)}: {value!r}")
    if not value.strip():
        raise BadExampleError("an empty text", f" in column {name!r}")
    refuse_half(value, name)
    return value


def refuse_half(text: str, name: str) -> None:
    """Raise BadExampleError where a text of the column ``name`` has half of a character.

    JSON can write it, and no encoding of a text has it.
    """
    if has_surrogates(text):
        raise BadExampleError("half a character", f" (a surrogate) in column {name!r}")


def unique_id(row: Row, column: str, seen: set[str], *, needed: bool = False) -> str:
    """Return what stands in the column of ids, "" where nothing does and nothing is ``needed``.

    ``seen``: the ids before it, to which it is added; BadExampleError where it is one of them.
    """
    if not needed and not row.fault and row.cells.get(column) in (None, ""):
        return ""
    name = str(cell(row, column)).strip()
    if name in seen:
        detail = f": {name!r}; if the column {column!r} names no rows, say --set task.id="
        raise BadExampleError("an id that stood before", detail)
    seen.add(name)
    return name


def _kind_of(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list",
             dict: "an object"}  # fmt: skip
    return kinds.get(type(value), type(value).__name__)


def rows(path: Path, *, header: bool = True) -> Iterator[Row]:
    """Yield the rows of a table; what kind it is, the suffix tells (``.txt`` is read as ``.tsv``).

    CSV is quoted as usual; in TSV a quotation mark is a character like any other, as in GLUE's
    files. Without ``header`` the columns are named "0", "1" and so on. Raises TaskError.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        raise TaskError(f"{path}: a folder; expected a file, {', '.join(SUFFIXES)}")
    if suffix not in SUFFIXES:
        raise TaskError(f"{path}: unknown kind of table; expected one of {', '.join(SUFFIXES)}")
    if suffix == ".parquet":
        yield from _parquet(path)
        return
    with opened(path) as file:
        yield from _json_lines(file, path) if suffix == ".jsonl" else _cells(file, path, header)


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a text file, UTF-8 with or without a mark; what goes wrong is a TaskError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise no_utf8(path) from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}") from None


def no_utf8(path: Path) -> TaskError:
    """Return the error for a file that is not UTF-8, with the first line that is not."""
    # The decoder's own error counts from the start of a chunk. Here each byte that it cannot take
    # stands as half a character, which cannot be encoded.
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            try:
                line.encode()
            except UnicodeEncodeError as error:
                byte = ord(line[error.start]) & 0xFF
                return TaskError(f"{path}, line {number:,}: not UTF-8, but the byte 0x{byte:02x}; "
                                 "expected UTF-8")  # fmt: skip
    return TaskError(f"{path}: not UTF-8; expected UTF-8")


def _cells(file: TextIO, path: Path, header: bool) -> Iterator[Row]:
    names: list[str] | None = None
    for number, cells in _records(file, path):
        where = f"{path}, line {number:,}"
        if cells is None:
            yield Row(where, {}, _QUOTED)
            continue
        if names is None:
            names = cells if header else [str(number) for number in range(len(cells))]
            _refuse_twins(names, where)
            if header:
                continue
        if not cells:
            continue
        if len(cells) != len(names):
            yield Row(where, {}, f"{len(cells)} columns where {len(names)} are expected")
            continue
        yield Row(where, dict(zip(names, cells, strict=True)))


def _records(file: TextIO, path: Path) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the last line of each record, and its cells; None for one that cannot be parted.

    TaskError where more lines than one are lost to it: how many rows those were, nobody knows.
    """
    csv.field_size_limit(_LONGEST_CELL)
    plain = path.suffix.lower() != ".csv"
    reader = (
        csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if plain
        # Strict: else a quotation mark that is never closed would swallow the rest of the file.
        else csv.reader(file, strict=True)
    )
    while True:
        begun, cells = reader.line_num + 1, None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if begun == 1 or reader.line_num > begun:
                raise TaskError(
                    f"{path}, line {begun:,}: the row that begins here cannot be parted into cells "
                    f"(line {reader.line_num:,}: {error}); a cell that begins with a quotation "
                    "mark ends with one, and one inside it is written twice"
                ) from None
        yield reader.line_num, cells


def _refuse_twins(names: list[str], where: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise TaskError(f"{where}: the column {twice[0]!r} stands there twice; rename one of them")


def _json_lines(file: TextIO, path: Path) -> Iterator[Row]:
    later = False
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number:,}"
        try:
            value = json.loads(line, object_pairs_hook=_once)
        except BadExampleError as fault:
            yield Row(where, {}, str(fault))
            continue
        except (ValueError, RecursionError):
            yield Row(where, {}, "a line that is not JSON")
            continue
        if isinstance(value, dict):
            yield Row(where, value, own=later)
            later = True
        else:
            yield Row(where, {}, "a line that is no JSON object")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; BadExampleError where a key stands twice: one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadExampleError("a key that stands twice in its object")
    return found


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "parquet", f"{path}: reading Parquet") from None
    try:
        number, file = 0, ParquetFile(path)
        _refuse_twins(file.schema_arrow.names, str(path))
        for batch in file.iter_batches():
            for cells in _plain(batch, path, number):
                number += 1
                yield Row(f"{path}, row {number:,}", cells)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file") from None
    except (OSError, ArrowInvalid) as error:
        raise TaskError(f"{path}: not a readable Parquet file: {error}") from None


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
