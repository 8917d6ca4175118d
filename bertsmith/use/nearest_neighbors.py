"""Find nearest neighbors by cosine similarity: approximately with an HNSW graph, or exactly.

In shapes, n is the number of vectors and W their width.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import InputError, require_extra
from bertsmith.progress import Progress
from bertsmith.use.token_vectors import Floats

VECTORS_FILE, GRAPH_FILE = "vectors.npy", "graph.usearch"
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
    """Build the HNSW graph of the vectors in a directory, and write it to this directory."""
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
    graph = import_usearch().Index(ndim=vectors.shape[1], metric="cos", dtype="i8")
    progress.start("indexing", len(vectors), "vectors")
    for start in range(0, len(vectors), _ROWS_PER_CHUNK):
        chunk = np.asarray(vectors[start : start + _ROWS_PER_CHUNK])
        graph.add(np.arange(start, start + len(chunk)), chunk / _compute_norms(chunk)[:, None])
        progress.advance(len(chunk))
    progress.finish()
    _save_graph(graph, folder / GRAPH_FILE)


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
        self.vectors: Floats = memory_map_array(folder / VECTORS_FILE)
        self._graph_path = folder / GRAPH_FILE
        self._graph: Any = None

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
        """Return the rows of the candidates from the graph, in ascending order."""
        if self._graph is None:
            library = import_usearch()
            try:
                self._graph = library.Index.restore(str(self._graph_path), view=True)
            except (ValueError, RuntimeError, OSError) as error:
                raise create_damaged_index_error(self._graph_path, str(error)) from None
        num_candidates = top * _CANDIDATES_PER_RESULT
        self._graph.expansion_search = max(_MIN_EXPANSION, num_candidates)
        return np.sort(self._graph.search(unit_query, num_candidates).keys.astype(np.int64))

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


def _compute_norms(vectors: Floats) -> Floats:
    """Return the length of each vector, at least 1e-12 to avoid division by zero: [n, W] -> [n]."""
    norms: Floats = np.linalg.norm(vectors, axis=1).clip(1e-12)
    return norms
