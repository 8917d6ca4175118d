"""Files that vectors are written to, piece by piece, so that a killed run can go on.

It never knows a model. A sink that is opened at a place which ``commit`` told goes on from there.
"""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from bertsmith.errors import InputError
from bertsmith.files import dump_json, sync, write_json
from bertsmith.progress import Progress
from bertsmith.use.embed import Floats, TokenVectors
from bertsmith.use.nearest_neighbors import GRAPH_FILE, VECTORS_FILE, build_graph
from bertsmith.use.table_output import (
    Cells,
    TableLayout,
    import_pyarrow,
    merge_parquet_parts,
    to_arrow_table,
    to_json_line,
)

#: What is made of some texts: float32 [n, W], or vectors of the tokens of each.
Vectors = Floats | Sequence[TokenVectors]
#: Names of the parts of an index, beside those of its vectors.
LINES_FILE, OFFSETS_FILE, MANIFEST_FILE = "lines.txt", "places.npy", "index.json"


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table, the names of those that are added, and its schema if it has one."""

    columns: Sequence[str]
    added_names: Mapping[str, str]
    schema: Any = None


class VectorWriter(Protocol):
    """What takes texts and their vectors."""

    def append(
        self, texts: Sequence[str], found: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Take some texts, one or more, with the rows of the table that they stand in, if any."""

    def commit(self) -> int:
        """Put what was taken on the disk; return the place to go on from."""

    def finish(self, progress: Progress) -> None:
        """Make the file whole; may be done again from the last place, if it was cut short."""

    def close(self) -> None:
        """Let go of the file, whatever state it is in."""


def _opened(path: Path, place: int) -> IO[bytes]:
    """Open a file of which ``place`` bytes are good, and go on behind them."""
    if place and (not path.is_file() or path.stat().st_size < place):
        raise InputError(
            f"{path}: it is shorter than its run left it; remove {path.parent} and begin anew"
        )
    file = path.open("r+b" if place else "w+b")
    file.truncate(place)
    file.seek(place)
    return file


def _flushed(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


class NpyWriter:
    """One array, float32 [n, W], as numpy.load reads it, mapped if need be."""

    def __init__(self, path: Path, width: int, place: int) -> None:
        """``place``: rows that are there."""
        self._width, self.rows = width, place
        header = self._header()
        self._file = _opened(path, len(header) + place * width * 4 if place else 0)
        if not place:
            self._file.write(header)

    def _header(self) -> bytes:
        # numpy leaves room for the number of rows to grow, so that it can be written anew.
        told = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self._width)}
        written = io.BytesIO()
        np.lib.format.write_array_header_1_0(written, told)
        return written.getvalue()

    def append(
        self, texts: Sequence[str], found: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write the vectors; the texts stay where they are."""
        assert isinstance(found, np.ndarray)
        self._file.write(np.ascontiguousarray(found, "<f4").tobytes())
        self.rows += len(found)

    def commit(self) -> int:
        """Return the number of rows."""
        _flushed(self._file)
        return self.rows

    def finish(self, progress: Progress) -> None:
        """Write the number of rows into the header."""
        self._file.seek(0)
        self._file.write(self._header())
        _flushed(self._file)

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            self._file.close()


class JsonlWriter:
    """A line of JSON a text: the text, its vector, or its tokens with theirs."""

    def __init__(self, path: Path, place: int, columns: TableColumns | None = None) -> None:
        """``place``: bytes that are there. columns: those of a table that the texts stand in."""
        self._file, self._columns = _opened(path, place), columns

    def append(
        self, texts: Sequence[str], found: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write a line for each text."""
        for number, (text, own) in enumerate(zip(texts, found, strict=True)):
            row = None if rows is None else rows[number]
            line = format_json_line(text, own, row, self._columns)
            self._file.write(line.encode() + b"\n")

    def commit(self) -> int:
        """Return the number of bytes."""
        _flushed(self._file)
        return self._file.tell()

    def finish(self, progress: Progress) -> None:
        """Do nothing: it is whole after each commit."""

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            self._file.close()


def format_json_line(
    text: str,
    own: Floats | TokenVectors,
    row: Cells | None = None,
    columns: TableColumns | None = None,
) -> str:
    """Return a text and its vector, or its tokens with theirs, as one line of JSON.

    row: the row of a table that the text stands in, whose columns come first.
    """
    names = columns.added_names if columns else {}
    start = dump_json({"text": text}) if row is None else to_json_line(row)
    if isinstance(own, TokenVectors):
        parts = {"tokens": own.tokens, "ids": own.ids, "offsets": own.offsets}
        told = dump_json({names.get(name, name): value for name, value in parts.items()})
        vectors = ", ".join(map(_numbers, own.vectors))
        key = dump_json(names.get("vectors", "vectors"))
        return f"{start[:-1]}, {told[1:-1]}, {key}: [{vectors}]}}"
    return f"{start[:-1]}, {dump_json(names.get('vector', 'vector'))}: {_numbers(own)}}}"


def _numbers(own: Floats) -> str:
    """Return a vector as JSON; nine digits tell any float32 exactly."""
    if not np.isfinite(own).all():
        return dump_json(own.tolist())
    return f"[{', '.join(['%.9g'] * len(own)) % tuple(own.tolist())}]"


class ParquetWriter:
    """A table with the columns text and vector, or text, tokens, ids, offsets and vectors.

    Instead of the text, the columns of the table that it stands in.

    A Parquet file cannot be gone on with, so each piece is a file of its own until the end.
    """

    def __init__(self, path: Path, place: int, columns: TableColumns | None = None) -> None:
        """``place``: files that are there. columns: those of a table that the texts stand in."""
        self._path, self._parts, self._arrow = path, place, import_pyarrow()
        self._table = columns
        self._folder = path.with_name(f"{path.name}.parts")
        self._folder.mkdir(exist_ok=True)

    def _part(self, number: int) -> Path:
        return self._folder / f"{number:06}.parquet"

    def append(
        self, texts: Sequence[str], found: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write a file."""
        pa = self._arrow
        columns = {"text": pa.array(list(texts), pa.string())}
        names: Mapping[str, str] = {}
        if self._table is not None and rows is not None:
            table = to_arrow_table(rows, TableLayout("parquet", self._table.columns,
                                             schema=self._table.schema))  # fmt: skip
            columns = dict(zip(table.column_names, table.columns, strict=True))
            names = self._table.added_names
        if isinstance(found, np.ndarray):
            added = {"vector": self._rows(found)}
        else:
            added = self._columns(found)
        columns |= {names.get(name, name): column for name, column in added.items()}
        part = self._part(self._parts)
        pa.parquet.write_table(pa.table(columns), part)
        sync(part)
        self._parts += 1

    def _rows(self, vectors: Floats) -> Any:
        pa = self._arrow
        flat = pa.array(vectors.reshape(-1), pa.float32())
        return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])

    def _columns(self, found: Sequence[TokenVectors]) -> dict[str, Any]:
        pa = self._arrow
        ends = np.cumsum([0, *(len(own.ids) for own in found)], dtype=np.int32)
        rows = self._rows(np.concatenate([own.vectors for own in found]))
        return {
            "tokens": pa.array([own.tokens for own in found], pa.list_(pa.string())),
            "ids": pa.array([own.ids for own in found], pa.list_(pa.int64())),
            "offsets": pa.array([own.offsets for own in found], pa.list_(pa.list_(pa.int64(), 2))),
            "vectors": pa.ListArray.from_arrays(ends, rows),
        }

    def commit(self) -> int:
        """Return the number of files."""
        sync(self._folder)
        return self._parts

    def finish(self, progress: Progress) -> None:
        """Join the files, a row group each."""
        merge_parquet_parts(list(map(self._part, range(self._parts))), self._path)
        sync(self._path)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class IndexWriter:
    """A folder to be searched: the vectors, a graph of them, the lines, where each begins."""

    def __init__(self, path: Path, width: int, place: int, about: dict[str, Any]) -> None:
        """``place``: rows that are there. ``about``: which model makes vectors of questions."""
        path.mkdir(exist_ok=True)
        self._path, self._about = path, about
        self._vectors = NpyWriter(path / VECTORS_FILE, width, place)
        self._lines = (path / LINES_FILE).open("r+b" if place else "w+b")
        for _ in range(place):
            self._lines.readline()
        self._lines.truncate(self._lines.tell())

    def append(
        self, texts: Sequence[str], found: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write vectors and lines."""
        self._vectors.append(texts, found)
        # A line that was given with an end of line inside is one line here all the same.
        self._lines.writelines(text.replace("\n", " ").encode() + b"\n" for text in texts)

    def commit(self) -> int:
        """Return the number of rows."""
        _flushed(self._lines)
        return self._vectors.commit()

    def finish(self, progress: Progress) -> None:
        """Write where each line begins, the graph, and what the folder is."""
        self._vectors.finish(progress)
        self._lines.seek(0)
        sizes = np.fromiter(map(len, self._lines), np.int64, self._vectors.rows)
        np.save(self._path / OFFSETS_FILE, np.append(0, np.cumsum(sizes)))
        build_graph(self._path, progress)
        write_json(self._path / MANIFEST_FILE, self._about)
        for name in (OFFSETS_FILE, GRAPH_FILE):
            sync(self._path / name)

    def close(self) -> None:
        """Let go of the files."""
        self._vectors.close()
        with suppress(OSError):
            self._lines.close()
