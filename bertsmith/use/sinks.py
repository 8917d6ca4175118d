"""Files that vectors are written to, piece by piece, so that a killed run can go on.

It never knows a model. Each sink has ``append``, ``commit``, which makes all of it safe and tells
where it is, and ``finish``; opened at such a place, it goes on from there.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import MissingExtraError
from bertsmith.files import sync, write_json

Floats = NDArray[np.float32]
#: Names of the parts of an index.
VECTORS, LINES, PLACES, ABOUT = "vectors.npy", "lines.txt", "places.npy", "index.json"


class Sink(Protocol):
    """What takes texts and their vectors: float32 [n, W], or rows for JSON where there is none."""

    def append(self, texts: Sequence[str], vectors: Floats, told: Sequence[dict[str, Any]]) -> None:
        """Take some; ``told``: what else there is to say of each, such as its tokens."""

    def commit(self) -> int:
        """Put what was taken on the disk; return the place to go on from."""

    def finish(self) -> None:
        """Make the file whole."""


class NpySink:
    """One array, float32 [n, W], as numpy.load reads it, mapped if need be."""

    def __init__(self, path: Path, width: int, place: int) -> None:
        """``place``: rows that are there."""
        self._width, self.rows = width, place
        self._file = path.open("r+b" if place else "w+b")
        self._header()
        self._file.truncate(self._start + place * width * 4)
        self._file.seek(0, os.SEEK_END)

    def _header(self) -> None:
        # numpy leaves room for the number of rows to grow, so that it can be written anew.
        self._file.seek(0)
        shape = (self.rows, self._width)
        told = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, told)
        self._start = self._file.tell()

    def append(self, texts: Sequence[str], vectors: Floats, told: Sequence[dict[str, Any]]) -> None:
        """Write the vectors; the texts stay where they are."""
        self._file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
        self.rows += len(vectors)

    def commit(self) -> int:
        """Return the number of rows."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.rows

    def finish(self) -> None:
        """Write the number of rows into the header."""
        self._header()
        self.commit()
        self._file.close()


class JsonSink:
    """A line of JSON a text: the text, its vector, or its tokens with theirs."""

    def __init__(self, path: Path, place: int) -> None:
        """``place``: bytes that are there."""
        self._file = path.open("r+b" if place else "wb")
        self._file.truncate(place)
        self._file.seek(place)

    def append(self, texts: Sequence[str], vectors: Floats, told: Sequence[dict[str, Any]]) -> None:
        """Write a line for each text."""
        for text, own in zip(texts, told or map(_vector, vectors), strict=True):
            line = json.dumps({"text": text, **own}, ensure_ascii=False)
            self._file.write(line.encode() + b"\n")

    def commit(self) -> int:
        """Return the number of bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self) -> None:
        """Close the file."""
        self.commit()
        self._file.close()


def _vector(own: Floats) -> dict[str, Any]:
    return {"vector": own.tolist()}


class ParquetSink:
    """A table with the columns text and vector, or text, tokens, ids, offsets and vectors.

    A Parquet file cannot be gone on with, so each commit is a file of its own until the end.
    """

    def __init__(self, path: Path, place: int) -> None:
        """``place``: files that are there."""
        self._path, self._parts = path, place
        self._tables: list[Any] = []
        self._folder = path.with_name(f"{path.name}.parts")
        self._folder.mkdir(exist_ok=True)
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("pyarrow", "parquet", "writing Parquet") from None
        self._arrow, self._parquet = pa, pq

    def append(self, texts: Sequence[str], vectors: Floats, told: Sequence[dict[str, Any]]) -> None:
        """Keep a table until the next commit."""
        arrow = self._arrow
        columns: dict[str, Any] = {"text": arrow.array(list(texts), arrow.string())}
        if told:
            lists = arrow.list_
            kinds = {
                "tokens": lists(arrow.string()),
                "ids": lists(arrow.int64()),
                "offsets": lists(lists(arrow.int64())),
                "vectors": lists(lists(arrow.float32())),
            }
            for name, kind in kinds.items():
                columns[name] = arrow.array([own[name] for own in told], kind)
        else:
            flat = arrow.array(vectors.reshape(-1), arrow.float32())
            columns["vector"] = arrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        self._tables.append(arrow.table(columns))

    def commit(self) -> int:
        """Return the number of files."""
        if self._tables:
            part = self._folder / f"{self._parts:06}.parquet"
            self._parquet.write_table(self._arrow.concat_tables(self._tables), part)
            sync(part)
            self._parts, self._tables = self._parts + 1, []
        return self._parts

    def finish(self) -> None:
        """Join the files, a row group each."""
        self.commit()
        parts = [self._folder / f"{number:06}.parquet" for number in range(self._parts)]
        parquet = self._parquet
        with parquet.ParquetWriter(self._path, parquet.read_schema(parts[0])) as whole:
            for part in parts:
                whole.write_table(parquet.read_table(part))
        sync(self._path)
        for part in self._folder.iterdir():
            part.unlink()
        self._folder.rmdir()


class IndexSink:
    """A folder to be searched: the vectors, the lines, and where each line begins."""

    def __init__(self, path: Path, width: int, place: int, about: dict[str, Any]) -> None:
        """``place``: rows that are there. ``about``: which model makes vectors of questions."""
        path.mkdir(exist_ok=True)
        self._path, self._about = path, about
        self._vectors = NpySink(path / VECTORS, width, place)
        self._lines = (path / LINES).open("r+b" if place else "w+b")
        for _ in range(place):
            self._lines.readline()
        self._lines.truncate(self._lines.tell())

    def append(self, texts: Sequence[str], vectors: Floats, told: Sequence[dict[str, Any]]) -> None:
        """Write vectors and lines."""
        self._vectors.append(texts, vectors, told)
        # A line that holds another end of line than "\n" is still one line here.
        self._lines.writelines(text.replace("\n", " ").encode() + b"\n" for text in texts)

    def commit(self) -> int:
        """Return the number of rows."""
        self._lines.flush()
        os.fsync(self._lines.fileno())
        return self._vectors.commit()

    def finish(self) -> None:
        """Write where each line begins, and what the folder is."""
        self.commit()
        self._vectors.finish()
        self._lines.seek(0)
        sizes = np.fromiter(map(len, self._lines), np.int64, self._vectors.rows)
        self._lines.close()
        np.save(self._path / PLACES, np.append(0, np.cumsum(sizes)))
        write_json(self._path / ABOUT, self._about)
