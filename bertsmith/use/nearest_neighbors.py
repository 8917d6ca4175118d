"""Find nearest neighbors by cosine similarity: approximately with an HNSW graph, or exactly.

In shapes, n is the number of vectors and W their width.

The graph stores the direction of each vector in 8 bits per number. Vectors that are equal there,
such as those of blank lines, would be each other's only neighbors in the graph, and a search could
not reach the others. So the graph contains only the first row of equal vectors, and a file lists
the other rows.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import InputError, require_extra
from bertsmith.progress import Progress
from bertsmith.splitmix64 import INCREMENT, UInt64Array, mix
from bertsmith.use.token_vectors import Floats

VECTORS_FILE, GRAPH_FILE = "vectors.npy", "graph.usearch"
#: int64 [2, m], sorted: the rows in the graph, and the m other rows with equal vectors. The file is
#: absent if all vectors are distinct, or if an earlier version added all rows to the graph.
DUPLICATES_FILE = "duplicates.npy"
#: Number of vectors read at once.
_ROWS_PER_CHUNK = 2**14
#: The graph search returns this many candidates per requested neighbor. It uses 8-bit vectors, so
#: the candidates are then ranked by their float32 vectors.
_CANDIDATES_PER_RESULT = 4
#: Minimum size of the candidate list during a graph search (`ef` in HNSW). It is twice usearch's
#: default, because the search takes much less time than embedding the query.
_MIN_EXPANSION = 128


def import_usearch() -> Any:
    """Return the module usearch.index.

    Raises:
        MissingExtraError: usearch is not installed.
    """
    with require_extra("search", "searching an index", package="usearch"):
        import usearch.index as library
    return library


def memory_map_array(path: Path) -> Any:
    """Memory-map a .npy file of an index.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise create_damaged_index_error(path, str(error)) from None


def create_damaged_index_error(path: Path, problem: str) -> InputError:
    """Return the error to raise for an index file that cannot be read."""
    return InputError(
        f"{path}: this part of the index is missing or damaged ({problem}); recreate the index "
        "with bertsmith embed"
    )


def build_graph(folder: Path, progress: Progress) -> None:
    """Build the HNSW graph of the vectors in a directory, and write it to this directory.

    If the directory has a graph of the first vectors, the other vectors are added to it. A graph of
    other vectors must be removed before. If vectors are equal in the graph, their rows are written
    too.
    """
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
    duplicates = _find_duplicates(vectors)
    is_first = np.ones(len(vectors), bool)
    is_first[duplicates[1]] = False
    rows = np.flatnonzero(is_first)
    graph = _load_partial_graph(folder / GRAPH_FILE, rows, vectors.shape[1])
    num_finished = 0
    if graph is None:
        graph = import_usearch().Index(ndim=vectors.shape[1], metric="cos", dtype="i8")
    elif len(graph):
        num_finished = int(rows[len(graph) - 1]) + 1
    progress.start("indexing", len(vectors), "vectors", num_finished)
    for start in range(num_finished, len(vectors), _ROWS_PER_CHUNK):
        chunk = np.asarray(vectors[start : start + _ROWS_PER_CHUNK])
        chunk_is_first = is_first[start : start + len(chunk)]
        graph.add(start + np.flatnonzero(chunk_is_first), _normalize(chunk[chunk_is_first]))
        progress.advance(len(chunk))
    progress.finish()
    (folder / DUPLICATES_FILE).unlink(missing_ok=True)
    if duplicates.size:
        np.save(folder / DUPLICATES_FILE, duplicates)
    _save_graph(graph, folder / GRAPH_FILE)


def _load_partial_graph(path: Path, rows: NDArray[np.int64], width: int) -> Any:
    """Load a graph of the first vectors; return None if there is none, or it has other rows.

    Args:
        path: The file of the graph.
        rows: The rows of all vectors of the complete graph, int64 [m], in ascending order.
        width: Width of the vectors.
    """
    try:
        graph = import_usearch().Index.restore(str(path))
    except (ValueError, RuntimeError, OSError):
        return None
    # ``restore`` returns None if there is no file.
    if graph is None or graph.ndim != width:
        return None
    has_first_rows = np.array_equal(np.sort(np.asarray(graph.keys)), rows[: len(graph)])
    return graph if has_first_rows else None


def _find_duplicates(vectors: Floats) -> NDArray[np.int64]:
    """Find the rows of vectors that are equal in the graph to the vector of an earlier row.

    Returns:
        int64 [2, m]: for each of the m rows, the first row with the same vector, and the row. The
        columns are in ascending order.
    """
    hashes = np.empty(len(vectors), np.uint64)
    for start in range(0, len(vectors), _ROWS_PER_CHUNK):
        chunk = np.asarray(vectors[start : start + _ROWS_PER_CHUNK])
        hashes[start : start + len(chunk)] = _hash_directions(chunk)
    order = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    starts_group = np.append(True, sorted_hashes[1:] != sorted_hashes[:-1])[: len(order)]
    is_duplicate = ~starts_group
    first_rows = order[starts_group][np.cumsum(starts_group)[is_duplicate] - 1]
    duplicates = np.stack([first_rows, order[is_duplicate]]).astype(np.int64)
    return duplicates[:, np.lexsort(duplicates[::-1])]


def _hash_directions(vectors: Floats) -> UInt64Array:
    """Return a hash of each vector as the graph stores it: [n, W] -> [n]."""
    width = vectors.shape[1]
    codes = np.zeros((len(vectors), -(-width // 8) * 8), np.int8)
    # usearch truncates in the same way.
    codes[:, :width] = _normalize(vectors) * 127
    words = codes.view(np.uint64)
    # Different keys of the columns make the hash depend on the order of the words.
    words += np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(INCREMENT)
    return mix(mix(words).sum(axis=1, dtype=np.uint64))


def _save_graph(graph: Any, path: Path) -> None:
    """Write a graph; raise OSError if it is not completely written.

    usearch raises RuntimeError if the disk is full, but does not report it for its last buffer.
    """
    problem = ""
    try:
        graph.save(str(path))
    except RuntimeError as error:
        problem = str(error)
    if problem or path.stat().st_size < graph.serialized_length:
        raise OSError(errno.ENOSPC, problem or os.strerror(errno.ENOSPC), str(path))


class VectorIndex:
    """Memory-mapped vectors and their HNSW graph, for nearest-neighbor search."""

    def __init__(self, folder: Path) -> None:
        """Open a directory with vectors and the graph that ``build_graph`` wrote."""
        # All files are opened at once, because lines may be added to the index later.
        self.vectors: Floats = memory_map_array(folder / VECTORS_FILE)
        self._duplicates = np.empty((2, 0), np.int64)
        if (folder / DUPLICATES_FILE).exists():
            self._duplicates = memory_map_array(folder / DUPLICATES_FILE)
        self._graph = self._load_graph(folder / GRAPH_FILE)

    def search(self, query: Floats, top: int, *, exact: bool = False) -> list[tuple[int, float]]:
        """Find the vectors with the highest cosine similarity to a query.

        Args:
            query: float32 [W].
            top: Number of vectors to find.
            exact: Whether to compare the query with every vector instead of searching the graph.

        Returns:
            Pairs (row of the vector, cosine similarity), most similar first.
        """
        unit_query = query / max(float(np.linalg.norm(query)), 1e-12)
        # If all vectors would be candidates, the graph saves no comparisons, and may miss vectors.
        if exact or top * _CANDIDATES_PER_RESULT >= len(self.vectors):
            rows = self._search_all(unit_query, top)
        else:
            rows = self._search_graph(unit_query, top)
        similarities = _compute_cosine_similarities(np.asarray(self.vectors[rows]), unit_query)
        order = np.lexsort((rows, -similarities))[:top]
        return [(int(rows[index]), float(similarities[index])) for index in order]

    def _search_graph(self, unit_query: Floats, top: int) -> NDArray[np.int64]:
        """Return the rows with the highest similarities among the candidates from the graph."""
        num_candidates = top * _CANDIDATES_PER_RESULT
        self._graph.expansion_search = max(_MIN_EXPANSION, num_candidates)
        candidates = self._graph.search(unit_query, num_candidates).keys.astype(np.int64)
        similarities = _compute_cosine_similarities(
            np.asarray(self.vectors[candidates]), unit_query
        )
        rows: list[int] = []
        for row in candidates[np.lexsort((candidates, -similarities))].tolist():
            rows += [row, *self._get_duplicates(row, top - 1)]
            if len(rows) >= top:
                break
        return np.asarray(rows, np.int64)

    def _load_graph(self, path: Path) -> Any:
        """Memory-map the graph.

        Raises:
            InputError: The graph cannot be read, or rows are missing in the index.
        """
        try:
            graph = import_usearch().Index.restore(str(path), view=True)
        except (ValueError, RuntimeError, OSError) as error:
            raise create_damaged_index_error(path, str(error)) from None
        num_missing = len(self.vectors) - len(graph) - self._duplicates.shape[1]
        if num_missing > 0:
            problem = f"{num_missing:,} vectors are neither in the graph nor in this file"
            raise create_damaged_index_error(path.with_name(DUPLICATES_FILE), problem)
        if num_missing < 0:
            raise InputError(
                f"{path.parent}: the index was replaced while it was opened; open it again"
            )
        return graph

    def _get_duplicates(self, row: int, limit: int) -> list[int]:
        """Return the first rows with the same vector as a row in the graph, at most ``limit``."""
        first_rows, other_rows = self._duplicates
        start, end = np.searchsorted(first_rows, [row, row + 1])
        rows: list[int] = other_rows[start : min(end, start + limit)].tolist()
        return rows

    def _search_all(self, unit_query: Floats, top: int) -> NDArray[np.int64]:
        """Return the rows with the highest similarities, reading the vectors in chunks."""
        rows, similarities = np.empty(0, np.int64), np.empty(0, np.float32)
        for start in range(0, len(self.vectors), _ROWS_PER_CHUNK):
            chunk = np.asarray(self.vectors[start : start + _ROWS_PER_CHUNK])
            chunk_similarities = _compute_cosine_similarities(chunk, unit_query)
            rows = np.append(rows, np.arange(start, start + len(chunk_similarities)))
            similarities = np.append(similarities, chunk_similarities)
            best = np.argsort(-similarities, kind="stable")[:top]
            rows, similarities = rows[best], similarities[best]
        return rows


def _compute_cosine_similarities(vectors: Floats, unit_query: Floats) -> Floats:
    """Return the similarity of each vector to the query: [n, W], [W] -> [n]."""
    similarities: Floats = (vectors @ unit_query) / _compute_norms(vectors)
    return similarities


def _normalize(vectors: Floats) -> Floats:
    """Return the vectors with length 1: [n, W] -> [n, W]."""
    unit_vectors: Floats = vectors / _compute_norms(vectors)[:, None]
    return unit_vectors


def _compute_norms(vectors: Floats) -> Floats:
    """Return the length of each vector, at least 1e-12 to avoid division by zero: [n, W] -> [n]."""
    norms: Floats = np.linalg.norm(vectors, axis=1).clip(1e-12)
    return norms
