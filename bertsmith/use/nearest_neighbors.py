"""The nearest of many vectors by their cosine: quickly by a graph, or exactly by all of them.

It never knows what the vectors stand for.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import InputError, MissingExtraError
from bertsmith.progress import Progress

Floats = NDArray[np.float32]
VECTORS_FILE, GRAPH_FILE = "vectors.npy", "graph.usearch"
#: Rows that are read at once.
_ROWS = 2**14
#: Candidates that the graph gives for each neighbour that is asked for: its numbers have 8 bits,
#: and the vectors themselves then say which are nearest.
_CANDIDATES = 4
#: How many places of the graph a search looks at, at least; twice the library's own default, since
#: what it costs is little beside the question's own vector.
_SEEN = 128


def import_usearch() -> Any:
    """Return the module usearch.index. Raises MissingExtraError."""
    try:
        import usearch.index as library
    except ModuleNotFoundError:
        raise MissingExtraError("usearch", "search", "an index to be searched") from None
    return library


def open_mapped_array(path: Path) -> Any:
    """Return the array of an index's file, mapped. Raises QuestionError where it cannot be read."""
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise damaged_index_error(path, error) from None


def damaged_index_error(path: Path, error: Exception) -> InputError:
    """Return the error for a file of an index that cannot be read."""
    return InputError(
        f"{path}: this part of the index is missing or damaged ({error}); make it again with "
        "bertsmith embed"
    )


def build_graph(folder: Path, progress: Progress) -> None:
    """Write the graph of the vectors that stand in ``folder`` beside them."""
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
    graph = import_usearch().Index(ndim=vectors.shape[1], metric="cos", dtype="i8")
    progress.start("joining neighbours", len(vectors), "vectors")
    for first in range(0, len(vectors), _ROWS):
        rows = np.asarray(vectors[first : first + _ROWS])
        graph.add(np.arange(first, first + len(rows)), rows / _lengths(rows)[:, None])
        progress.advance(len(rows))
    progress.finish()
    graph.save(str(folder / GRAPH_FILE))


class VectorIndex:
    """The vectors of a folder and their graph, both mapped: what is not looked at is not read."""

    def __init__(self, folder: Path) -> None:
        """Open what ``build_graph`` wrote."""
        self.vectors: Floats = open_mapped_array(folder / VECTORS_FILE)
        self._path = folder / GRAPH_FILE
        self._graph: Any = None

    def search(self, asked: Floats, top: int, *, exact: bool = False) -> list[tuple[int, float]]:
        """Return the rows nearest to a vector, float32 [W], and their cosines, the nearest first.

        ``exact``: every row is looked at.
        """
        unit = asked / max(float(np.linalg.norm(asked)), 1e-12)
        rows = self._all(unit, top) if exact else self._candidates(unit, top)
        cosines = _cosines(np.asarray(self.vectors[rows]), unit)
        order = np.lexsort((rows, -cosines))[:top]
        return [(int(rows[place]), float(cosines[place])) for place in order]

    def _candidates(self, unit: Floats, top: int) -> NDArray[np.int64]:
        if self._graph is None:
            library = import_usearch()
            try:
                self._graph = library.Index.restore(str(self._path), view=True)
            except (ValueError, RuntimeError, OSError) as error:
                raise damaged_index_error(self._path, error) from None
        wanted = min(top * _CANDIDATES, len(self.vectors))
        self._graph.expansion_search = max(_SEEN, wanted)
        return np.sort(self._graph.search(unit, wanted).keys.astype(np.int64))

    def _all(self, unit: Floats, top: int) -> NDArray[np.int64]:
        """Return the rows of the highest cosines, reading some at a time."""
        rows, best = np.empty(0, np.int64), np.empty(0, np.float32)
        for first in range(0, len(self.vectors), _ROWS):
            own = _cosines(np.asarray(self.vectors[first : first + _ROWS]), unit)
            rows = np.append(rows, np.arange(first, first + len(own)))
            best = np.append(best, own)
            kept = np.argsort(-best, kind="stable")[:top]
            rows, best = rows[kept], best[kept]
        return rows


def _cosines(vectors: Floats, unit: Floats) -> Floats:
    """[n, W], [W] -> [n]."""
    found: Floats = (vectors @ unit) / _lengths(vectors)
    return found


def _lengths(vectors: Floats) -> Floats:
    """[n, W] -> [n], never 0."""
    found: Floats = np.linalg.norm(vectors, axis=1).clip(1e-12)
    return found
