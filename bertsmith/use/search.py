"""Search embedded lines with the model that embedded them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from bertsmith.bundle import FineTunedBundle, hash_model_files
from bertsmith.compatibility import find_index_file
from bertsmith.errors import InputError, ModelError
from bertsmith.text.unknown import TokenCounts
from bertsmith.use.embed import Embedder
from bertsmith.use.late_interaction import (
    compute_maxsim,
    encode_line_tokens,
    encode_query_tokens,
)
from bertsmith.use.model_setup import resolve_reranker
from bertsmith.use.nearest_neighbors import (
    VectorIndex,
    create_damaged_index_error,
    memory_map_array,
)
from bertsmith.use.rerank import rank_documents
from bertsmith.use.search_index import LINES_FILE, OFFSETS_FILE, read_index_manifest
from bertsmith.use.token_vectors import Floats
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings

#: Default number of most similar lines that a reranker or late interaction orders.
DEFAULT_CANDIDATES: Final = 50


@dataclass(frozen=True)
class SearchResult:
    """A line of the index that is similar to a query.

    Attributes:
        line: Line number, from 1.
        text: Text of the line.
        cosine: Cosine similarity of the line and the query.
        relevance: Relevance from 0 to 1 that a reranker predicts; None without a reranker.
        maxsim: Mean over the query's tokens of the highest cosine similarity with a token of the
            line; None without late interaction.
    """

    line: int
    text: str
    cosine: float
    relevance: float | None = None
    maxsim: float | None = None


class Searcher:
    """Searches an index that ``bertsmith embed`` wrote, with the model that embedded its lines."""

    def __init__(
        self,
        index: Path | str,
        *,
        model: Path | str | None = None,
        device: torch.device | str = "cpu",
        prompt_name: str | None = None,
    ) -> None:
        """Open an index.

        Args:
            index: The index directory.
            model: Current path of the model, if it was moved since the lines were embedded.
            device: Device of the model.
            prompt_name: Name of the prompt of queries; see ``Embedder.with_prompt``. None for the
                model's prompt of queries.

        Raises:
            InputError: The index is missing or damaged, or the model declares no such prompt.
            ModelError: The model is missing or has changed.
        """
        self.path = Path(index)
        manifest = read_index_manifest(self.path)
        #: Numbers of tokens and of [UNK] tokens in all queries so far.
        self.token_counts = TokenCounts()
        embedder = _load_embedder(self.path, manifest, model, device).with_token_counter(
            self.token_counts
        )
        self._query_embedder = (
            embedder.with_query_prompt()
            if prompt_name is None
            else embedder.with_prompt(prompt_name)
        )
        self._document_embedder = embedder.with_prompt(manifest.get("prompt_name"))
        settings = {name: manifest[name] for name in VectorSettings.model_fields}
        self._settings = build_vector_settings(settings.pop("layers"), **settings)
        self._vector_index = VectorIndex(self.path)
        self._line_offsets = memory_map_array(find_index_file(self.path, OFFSETS_FILE))
        self._check_lines()

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._line_offsets) - 1

    def search(
        self,
        queries: Sequence[str],
        top: int = 5,
        *,
        exact: bool = False,
        reranker: FineTunedBundle | None = None,
        candidates: int = DEFAULT_CANDIDATES,
        late: bool = False,
    ) -> list[list[SearchResult]]:
        """Return the most similar lines for each query, most similar first.

        Args:
            queries: The queries.
            top: Number of lines to find for each query.
            exact: Whether to compare the query with every line instead of searching the graph.
            reranker: A model with one output, which orders the most similar lines by relevance.
            candidates: Number of most similar lines that the reranker or late interaction orders.
            late: Whether to order the most similar lines by late interaction.
        """
        if top < 1:
            raise InputError(f"top is {top}; expected 1 or more")
        if late and reranker is not None:
            raise InputError("late interaction and a reranker exclude each other; use one of them")
        count = max(top, candidates) if late or reranker is not None else top
        results = self.find_neighbors(self.encode_queries(queries), count, exact=exact)
        if late:
            return [query_results[:top] for query_results in self._order_late(queries, results)]
        if reranker is None:
            return results
        return [
            _rerank_results(reranker, query, query_results)[:top]
            for query, query_results in zip(queries, results, strict=True)
        ]

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """Return the vector of each query, with the settings of the index; float32 [n, W]."""
        return self._encode(self._query_embedder, texts)

    def encode_documents(self, texts: Sequence[str]) -> Floats:
        """Return the vector of each text as if it were a line of the index; float32 [n, W]."""
        return self._encode(self._document_embedder, texts)

    def _encode(self, embedder: Embedder, texts: Sequence[str]) -> Floats:
        return embedder.encode_with_spec(texts, embedder.resolve_settings(self._settings))

    def find_neighbors(
        self, vectors: Floats, top: int, *, exact: bool = False
    ) -> list[list[SearchResult]]:
        """Return the lines whose vectors are most similar to each vector, most similar first.

        Args:
            vectors: float32 [n, W].
            top: Number of lines to find for each vector.
            exact: Whether to compare with every line instead of searching the graph.
        """
        return [
            [
                SearchResult(row + 1, self._read_line(row), cosine)
                for row, cosine in self._vector_index.search(vector, top, exact=exact)
            ]
            for vector in vectors
        ]

    def _order_late(
        self, queries: Sequence[str], results: Sequence[Sequence[SearchResult]]
    ) -> list[list[SearchResult]]:
        """Return the results of each query ordered by late interaction."""
        all_query_vectors = encode_query_tokens(self._query_embedder, self._settings, queries)
        ordered = []
        for query_vectors, query_results in zip(all_query_vectors, results, strict=True):
            texts = [result.text for result in query_results]
            line_vectors = encode_line_tokens(self._document_embedder, self._settings, texts)
            scores = compute_maxsim(query_vectors, line_vectors)
            scored = [
                replace(result, maxsim=score)
                for result, score in zip(query_results, scores, strict=True)
            ]
            ordered.append(sorted(scored, key=lambda result: -(result.maxsim or 0.0)))
        return ordered

    def _check_lines(self) -> None:
        """Raise InputError unless the files have the same number of lines and bytes."""
        if len(self) != len(self._vector_index.vectors):
            problem = f"{len(self):,} lines for {len(self._vector_index.vectors):,} vectors"
            raise create_damaged_index_error(self.path / OFFSETS_FILE, problem)
        lines, expected = self.path / LINES_FILE, int(self._line_offsets[-1])
        num_bytes = lines.stat().st_size
        if num_bytes != expected:
            problem = f"{num_bytes:,} instead of {expected:,} bytes"
            raise create_damaged_index_error(lines, problem)

    def _read_line(self, row: int) -> str:
        """Return the text of the line in a row of the index."""
        start, end = (int(offset) for offset in self._line_offsets[row : row + 2])
        with (self.path / LINES_FILE).open("rb") as lines:
            lines.seek(start)
            return lines.read(end - start - 1).decode()


def search(
    index: Path | str,
    queries: Sequence[str],
    top: int = 5,
    *,
    exact: bool = False,
    model: Path | str | None = None,
    reranker: FineTunedBundle | Path | str | None = None,
    candidates: int = DEFAULT_CANDIDATES,
    late: bool = False,
    device: torch.device | str = "cpu",
    prompt_name: str | None = None,
) -> list[list[SearchResult]]:
    """Find the lines of an index that are most similar to each query.

    A ``Searcher`` is faster for repeated searches, because it loads the model once.

    Args:
        index: An index directory written by ``bertsmith embed``.
        queries: The queries.
        top: Number of lines to find for each query.
        exact: Whether to compare the query with every line instead of searching the graph.
        model: Current path of the model, if it was moved since the lines were embedded.
        reranker: A model with one output, which orders the most similar lines by relevance.
        candidates: Number of most similar lines that the reranker or late interaction orders.
        late: Whether to order the most similar lines by late interaction.
        device: Device of the model and of a reranker that is given as a path.
        prompt_name: Name of the prompt of queries; None for the model's prompt of queries.

    Returns:
        The lines found for each query, most similar (with a reranker, most relevant) first.

    Raises:
        InputError: The index is missing or damaged.
        ModelError: The model is missing or has changed, or the reranker does not have one output.
    """
    searcher = Searcher(index, model=model, device=device, prompt_name=prompt_name)
    bundle = None if reranker is None else resolve_reranker(reranker, device=device)
    return searcher.search(
        queries, top, exact=exact, reranker=bundle, candidates=candidates, late=late
    )


def _rerank_results(
    reranker: FineTunedBundle, query: str, results: Sequence[SearchResult]
) -> list[SearchResult]:
    """Return the results ordered by relevance. Blank lines are last, with the relevance 0."""
    texts = [result.text for result in results if result.text.strip()]
    with_text = [result for result in results if result.text.strip()]
    blank = [replace(result, relevance=0.0) for result in results if not result.text.strip()]
    ranking = rank_documents(reranker, query, texts)
    return [replace(with_text[item.index], relevance=item.score) for item in ranking] + blank


def _load_embedder(
    index: Path, manifest: dict[str, Any], model: Path | str | None, device: torch.device | str
) -> Embedder:
    """Load the model that embedded the lines.

    Raises:
        ModelError: The model is missing or has changed.
    """
    path = Path(str(model or manifest["model_path"]))
    if model is None and not path.is_dir():
        raise ModelError(
            f"{index}: its model {path} no longer exists; restore it, or give its current path "
            "with --model (in Python, model=)"
        )
    embedder = Embedder.load(path, device=device, fast=bool(manifest["fast"]))
    if hash_model_files(embedder.path) != manifest["model_sha256"]:
        raise ModelError(
            f"{index}: the model at {path} is not the model that embedded the lines of this index, "
            "or its files have changed; give the path of the original model with --model, or embed "
            "the lines again"
        )
    return embedder
