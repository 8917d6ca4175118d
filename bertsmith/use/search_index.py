"""The directory of an index for ``bertsmith search``: its files, reading and writing."""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.compatibility import find_index_file, upgrade_embedding_settings
from bertsmith.errors import InputError
from bertsmith.files import parse_json, sync, write_json
from bertsmith.progress import Progress
from bertsmith.use.nearest_neighbors import (
    DUPLICATES_FILE,
    GRAPH_FILE,
    VECTORS_FILE,
    build_graph,
    memory_map_array,
)
from bertsmith.use.table_output import Cells
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vector_writers import NpyWriter, Vectors, flush_to_disk

#: Files of an index, besides the vectors and their graph.
LINES_FILE, OFFSETS_FILE, MANIFEST_FILE = "lines.txt", "offsets.npy", "index.json"


def read_index_manifest(index: Path) -> dict[str, Any]:
    """Read the manifest of an index: the path and hash of its model, and the vector settings.

    Raises:
        InputError: There is no index, or it is damaged.
    """
    file_names = {MANIFEST_FILE, VECTORS_FILE, GRAPH_FILE, LINES_FILE, OFFSETS_FILE}
    if not index.exists():
        raise InputError(
            f"{index}: no such directory; create an index with: bertsmith embed MODEL FILE --out "
            "NAME.index"
        )
    missing = sorted(name for name in file_names if not find_index_file(index, name).is_file())
    if missing:
        raise InputError(
            f"{index}: not an index (it has no {missing[0]}); create one with: bertsmith embed "
            "MODEL FILE --out NAME.index"
        )
    try:
        content = parse_json((index / MANIFEST_FILE).read_text(encoding="utf-8"))
        manifest = upgrade_embedding_settings(dict(content))
    except (ValueError, TypeError):
        manifest = {}
    if not {"model_path", "model_sha256", "fast", *VectorSettings.model_fields} <= set(manifest):
        raise InputError(
            f"{index / MANIFEST_FILE}: damaged; recreate the index with bertsmith embed"
        )
    return manifest


def count_index_lines(index: Path) -> int:
    """Return the number of lines of an index."""
    return len(memory_map_array(find_index_file(index, OFFSETS_FILE))) - 1


def hash_index_lines(index: Path) -> str:
    """Return the SHA-256 of the lines of an index, in hexadecimal."""
    with (index / LINES_FILE).open("rb") as lines:
        return hashlib.file_digest(lines, "sha256").hexdigest()


def copy_index(index: Path, new: Path) -> None:
    """Copy the lines, vectors and graph of an index, so that an ``IndexWriter`` can add lines."""
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for name in (LINES_FILE, VECTORS_FILE, GRAPH_FILE):
        shutil.copyfile(find_index_file(index, name), new / name)


def to_index_line(text: str) -> str:
    """Return a text as an index stores it: on one line."""
    return text.replace("\n", " ")


class IndexWriter:
    """Writes a directory for search: vectors, their graph, lines, and line offsets."""

    def __init__(self, path: Path, width: int, position: int, manifest: dict[str, Any]) -> None:
        """Open the index.

        Args:
            path: The index directory.
            width: Width of the vectors.
            position: Number of rows already written, of this run or of ``copy_index``.
            manifest: The model and the settings of the vectors, with which queries are embedded.
        """
        if not position and path.exists():
            # The copy of an index from a killed run.
            shutil.rmtree(path)
        path.mkdir(exist_ok=True)
        # Temporary files of a killed run.
        for file in path.glob(".*.tmp"):
            file.unlink()
        self._path = path
        self._manifest = manifest
        self._vectors = NpyWriter(path / VECTORS_FILE, width, position, path.parent)
        self._lines = (path / LINES_FILE).open("r+b" if position else "w+b")
        for _ in range(position):
            self._lines.readline()
        self._lines.truncate(self._lines.tell())

    def append(
        self, texts: Sequence[str], vectors: Vectors, rows: Sequence[Cells] | None = None
    ) -> None:
        """Write vectors and lines."""
        self._vectors.append(texts, vectors)
        self._lines.writelines(to_index_line(text).encode() + b"\n" for text in texts)

    def commit(self) -> int:
        """Flush to disk; return the number of rows."""
        flush_to_disk(self._lines)
        return self._vectors.commit()

    def finish(self, progress: Progress) -> None:
        """Write the line offsets, the graph and the manifest."""
        self._vectors.finish(progress)
        self._lines.seek(0)
        line_sizes = np.fromiter(map(len, self._lines), np.int64, self._vectors.num_rows)
        np.save(self._path / OFFSETS_FILE, np.append(0, np.cumsum(line_sizes)))
        build_graph(self._path, progress)
        write_json(self._path / MANIFEST_FILE, self._manifest)
        for name in (OFFSETS_FILE, GRAPH_FILE, DUPLICATES_FILE):
            if (self._path / name).exists():
                sync(self._path / name)

    def close(self) -> None:
        """Close the files."""
        self._vectors.close()
        with suppress(OSError):
            self._lines.close()
