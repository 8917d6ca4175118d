"""Write vectors to files incrementally, so that an interrupted run can be resumed.

``commit`` returns a position. A writer that is opened at this position continues from there.
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
from bertsmith.files import dump_json, sync
from bertsmith.progress import Progress
from bertsmith.use.table_output import (
    Cells,
    TableLayout,
    import_pyarrow,
    merge_parquet_parts,
    to_arrow_table,
    to_json_line,
    unify_schemas,
    write_part,
)
from bertsmith.use.token_vectors import Floats, TokenVectors

#: Vectors of n texts: float32 [n, W] with one vector of width W per text, or the token vectors of
#: each text.
Vectors = Floats | Sequence[TokenVectors]
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class TableColumns:
    """Columns of an output table: the columns of the input table, and added columns.

    Attributes:
        columns: Columns of the input table.
        added_names: Default name of each added column -> its name in the output.
        schema: Arrow schema of the input table; None if the input is not Parquet.
        text_column: The column of the input table that contains the texts.
    """

    columns: Sequence[str]
    added_names: Mapping[str, str]
    schema: Any = None
    text_column: str = "text"


class VectorWriter(Protocol):
    """Writes texts and their vectors."""

    def append(
        self, texts: Sequence[str], vectors: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write the vectors of one or more texts.

        Args:
            texts: The texts.
            vectors: The vectors of the texts.
            rows: The table rows that contain the texts; None if the input is not a table.
        """

    def commit(self) -> int:
        """Flush to disk; return the position from which a later run can continue."""

    def finish(self, progress: Progress) -> None:
        """Complete the file.

        After an interruption, a writer opened at the last position can repeat this call.
        """

    def close(self) -> None:
        """Close the file, whether or not it is complete."""


def _open_at_position(path: Path, position: int, run_dir: Path | None = None) -> IO[bytes]:
    """Open a file for writing at a byte position; discard everything after it.

    Args:
        path: The file.
        position: Number of bytes already written.
        run_dir: The directory of the unfinished run, for error messages; None for that of the file.
    """
    if position and (not path.is_file() or path.stat().st_size < position):
        raise InputError(
            f"{path}: shorter than when its run was interrupted; remove {run_dir or path.parent} "
            "and start again"
        )
    file = path.open("r+b" if position else "w+b")
    file.truncate(position)
    file.seek(position)
    return file


def flush_to_disk(file: IO[bytes]) -> None:
    """Write buffered data to disk."""
    file.flush()
    os.fsync(file.fileno())


class NpyWriter:
    """Writes one array, float32 [n, W], as a .npy file."""

    def __init__(self, path: Path, width: int, position: int, run_dir: Path | None = None) -> None:
        """Open the file.

        Args:
            path: The file.
            width: Width of the vectors.
            position: Number of rows already written.
            run_dir: The directory of the unfinished run; None for that of the file.
        """
        self._width = width
        self.num_rows = position
        header = self._build_header()
        num_bytes = 0
        if position:
            num_bytes = len(header) + position * width * _FLOAT32_BYTES
        self._file = _open_at_position(path, num_bytes, run_dir)
        if not position:
            self._file.write(header)

    def _build_header(self) -> bytes:
        """Return the .npy header for the current number of rows."""
        # NumPy pads the header, so its size does not depend on the number of rows.
        fields = {"descr": "<f4", "fortran_order": False, "shape": (self.num_rows, self._width)}
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, fields)
        return buffer.getvalue()

    def append(
        self, texts: Sequence[str], vectors: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write the vectors; the texts are not written."""
        assert isinstance(vectors, np.ndarray)
        self._file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
        self.num_rows += len(vectors)

    def commit(self) -> int:
        """Flush to disk; return the number of rows."""
        flush_to_disk(self._file)
        return self.num_rows

    def finish(self, progress: Progress) -> None:
        """Write the number of rows to the header."""
        self._file.seek(0)
        self._file.write(self._build_header())
        flush_to_disk(self._file)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()


class JsonlWriter:
    """Writes JSON lines: each text with its vector, or with its tokens and their vectors."""

    def __init__(self, path: Path, position: int, columns: TableColumns | None = None) -> None:
        """Open the file.

        Args:
            path: The file.
            position: Number of bytes already written.
            columns: Columns of the table that contains the texts.
        """
        self._file = _open_at_position(path, position)
        self._columns = columns

    def append(
        self, texts: Sequence[str], vectors: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write a line for each text."""
        for index, (text, text_vectors) in enumerate(zip(texts, vectors, strict=True)):
            row = None if rows is None else rows[index]
            line = format_json_line(text, text_vectors, row, self._columns)
            self._file.write(line.encode() + b"\n")

    def commit(self) -> int:
        """Flush to disk; return the number of bytes."""
        flush_to_disk(self._file)
        return self._file.tell()

    def finish(self, progress: Progress) -> None:
        """Do nothing: the file is complete after each commit."""

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()


def format_json_line(
    text: str,
    vectors: Floats | TokenVectors,
    row: Cells | None = None,
    columns: TableColumns | None = None,
) -> str:
    """Format a text with its vector, or with its tokens and their vectors, as one line of JSON.

    Args:
        text: The text.
        vectors: float32 [W], or the token vectors.
        row: The table row that contains the text; its cells come first.
        columns: Columns of the output table.
    """
    names = columns.added_names if columns else {}
    text_json = dump_json({"text": text}) if row is None else to_json_line(row)
    # The JSON objects are joined as text, because the vectors are already JSON.
    members = [text_json[1:-1]]
    if isinstance(vectors, TokenVectors):
        fields = {"tokens": vectors.tokens, "ids": vectors.ids, "offsets": vectors.offsets}
        tokens_json = dump_json({names.get(name, name): value for name, value in fields.items()})
        key = dump_json(names.get("vectors", "vectors"))
        vectors_json = ", ".join(map(_vector_to_json, vectors.vectors))
        members += [tokens_json[1:-1], f"{key}: [{vectors_json}]"]
    else:
        key = dump_json(names.get("vector", "vector"))
        members.append(f"{key}: {_vector_to_json(vectors)}")
    return f"{{{', '.join(members)}}}"


def _vector_to_json(vector: Floats) -> str:
    """Return a vector as JSON. Nine significant digits represent every float32 exactly."""
    if not np.isfinite(vector).all():
        return dump_json(vector.tolist())
    # Formatting all numbers with one format string is faster than formatting each number.
    format_string = ", ".join(["%.9g"] * len(vector))
    return f"[{format_string % tuple(vector.tolist())}]"


class ParquetWriter:
    """Writes a table with the column "vector", or "tokens", "ids", "offsets" and "vectors".

    The other columns are those of the input table, or "text" if the input is not a table. A Parquet
    file cannot be appended to, so each call of ``append`` writes a part file, and ``finish`` merges
    the parts.
    """

    def __init__(self, path: Path, position: int, columns: TableColumns | None = None) -> None:
        """Open the file.

        Args:
            path: The file.
            position: Number of part files already written.
            columns: Columns of the table that contains the texts.
        """
        self._path = path
        self._num_parts = position
        self._arrow = import_pyarrow()
        self._table_columns = columns
        self._parts_dir = path.with_name(f"{path.name}.parts")
        self._parts_dir.mkdir(exist_ok=True)
        parts = map(self._get_part_path, range(position))
        #: Schemas of which a common one must exist: that of all parts so far, or none.
        self._schemas = [self._arrow.parquet.read_schema(part) for part in parts]

    def _get_part_path(self, index: int) -> Path:
        return self._parts_dir / f"{index:06}.parquet"

    def append(
        self, texts: Sequence[str], vectors: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write a part file.

        Raises:
            InputError: The values of a column have no common type with those of earlier rows.
        """
        pa = self._arrow
        columns = {"text": pa.array(list(texts), pa.string())}
        names: Mapping[str, str] = {}
        if self._table_columns is not None and rows is not None:
            layout = TableLayout(
                "parquet", self._table_columns.columns, schema=self._table_columns.schema
            )
            table = to_arrow_table(rows, layout)
            columns = dict(zip(table.column_names, table.columns, strict=True))
            names = self._table_columns.added_names
        if isinstance(vectors, np.ndarray):
            added_columns = {"vector": self._to_arrow_lists(vectors)}
        else:
            added_columns = self._to_token_columns(vectors)
        columns |= {names.get(name, name): column for name, column in added_columns.items()}
        part = self._get_part_path(self._num_parts)
        part_table = pa.table(columns)
        # Without this check, ``finish`` would fail after all vectors are computed.
        self._schemas = [unify_schemas([*self._schemas, part_table.schema])]
        write_part(part_table, part)
        sync(part)
        self._num_parts += 1

    def _to_arrow_lists(self, vectors: Floats) -> Any:
        """Convert float32 [n, W] to an Arrow array of lists of length W."""
        pa = self._arrow
        flat = pa.array(vectors.reshape(-1), pa.float32())
        return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])

    def _to_token_columns(self, texts: Sequence[TokenVectors]) -> dict[str, Any]:
        """Convert the token vectors of texts to Arrow columns."""
        pa = self._arrow
        offsets = np.cumsum([0, *(len(text.ids) for text in texts)], dtype=np.int32)
        vectors = self._to_arrow_lists(np.concatenate([text.vectors for text in texts]))
        return {
            "tokens": pa.array([text.tokens for text in texts], pa.list_(pa.string())),
            "ids": pa.array([text.ids for text in texts], pa.list_(pa.int64())),
            "offsets": pa.array(
                [text.offsets for text in texts], pa.list_(pa.list_(pa.int64(), 2))
            ),
            "vectors": pa.ListArray.from_arrays(offsets, vectors),
        }

    def commit(self) -> int:
        """Flush to disk; return the number of part files."""
        sync(self._parts_dir)
        return self._num_parts

    def finish(self, progress: Progress) -> None:
        """Merge the part files; each becomes a row group."""
        merge_parquet_parts(list(map(self._get_part_path, range(self._num_parts))), self._path)
        sync(self._path)

    def close(self) -> None:
        """Do nothing: no file remains open between calls."""
