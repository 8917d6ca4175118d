"""Mine hard negatives: lines of an index that are similar to a query, but not its positive.

The corpus stays on disk; only the table of queries and positives is in memory. The conditions are
those of ``mine_hard_negatives`` in sentence-transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError, TaskError
from bertsmith.files import check_new_file
from bertsmith.progress import NullProgress, Progress
from bertsmith.tasks.embedding_columns import open_rows, resolve_columns
from bertsmith.tasks.embedding_settings import TextColumns
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.tables import get_text
from bertsmith.tasks.text_files import reject_ignored_settings
from bertsmith.use.inputs import chunked
from bertsmith.use.mining_settings import MiningSettings
from bertsmith.use.model_setup import resolve_reranker
from bertsmith.use.rerank import rank_documents
from bertsmith.use.search import Searcher, SearchResult
from bertsmith.use.search_index import LINES_FILE, to_index_line
from bertsmith.use.table_output import (
    TableLayout,
    check_tsv_cell,
    get_output_format,
    open_row_writer,
)
from bertsmith.use.token_vectors import Floats

_STANDARD_COLUMNS: Final = (
    TextColumns(text="anchor", pair="positive"),
    TextColumns(text="query", pair="positive"),
    TextColumns(text="query", pair="document"),
    TextColumns(text="query", pair="passage"),
)
_ADVICE: Final = "--text for the query and --pair for its positive"
#: Number of queries that are embedded together.
_QUERIES_PER_BATCH: Final = 256


@dataclass
class MiningCounts:
    """How many negatives were found.

    Attributes:
        num_pairs: Number of queries with a positive.
        num_rows: Number of rows written.
        num_negatives: Number of negatives of all pairs written.
        num_pairs_without_negatives: Pairs that were not written, because no line is a negative.
        rejected: Number of candidates that are not used, by reason.
        examples: Counts of the rows of the table.
    """

    num_pairs: int = 0
    num_rows: int = 0
    num_negatives: int = 0
    num_pairs_without_negatives: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    examples: ExampleCounts = field(default_factory=ExampleCounts)

    def reject(self, reason: str, count: int) -> None:
        """Count candidates that are not used."""
        if count:
            self.rejected[reason] = self.rejected.get(reason, 0) + count


@dataclass(frozen=True)
class _Query:
    """A query, its positives and the similarity of each positive."""

    text: str
    positives: Sequence[str]
    positive_scores: Sequence[float]


def mine_negatives(
    index: Path | str,
    data: Path | str,
    out: Path | str,
    *,
    settings: MiningSettings | None = None,
    model: Path | str | None = None,
    reranker: FineTunedBundle | Path | str | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> MiningCounts:
    """Write a table of queries, positives and hard negatives from the lines of an index.

    The result is training data for ``finetune_embedder`` and ``finetune_reranker``, with the
    columns anchor, positive and negatives, a list. In CSV and TSV, each negative has its own row
    with the columns anchor, positive and negative.

    Args:
        index: An index directory written by ``bertsmith embed``.
        data: A table of queries and positives.
        out: The table to write, as .jsonl, .json, .parquet, .csv or .tsv.
        settings: Columns of the table, and which lines are negatives.
        model: Current path of the model of the index, if it was moved.
        reranker: A model with one output. Its relevance replaces the cosine similarity in margins,
            limits and order.
        device: Device of the model of the index.
        progress: Receives the number of queries.

    Raises:
        BertsmithError: The index or the table cannot be read, or no negative was found. Then
            ``out`` is not created.
    """
    settings = settings or MiningSettings()
    progress = progress or NullProgress()
    data, out = Path(data), Path(out)
    check_new_file(out)
    reject_ignored_settings(None, settings.model_dump(), [data])
    table_format = get_output_format(out)
    counts = MiningCounts()
    positives = _read_pairs(data, settings, counts)
    if table_format == "tsv":
        # Otherwise the error would come after hours, when the row is written.
        for text in chain(positives, *positives.values()):
            check_tsv_cell(text)
    searcher = Searcher(index, model=model, device=device)
    if table_format == "tsv":
        _check_tsv_lines(searcher.path / LINES_FILE)
    miner = _Miner(
        searcher,
        None if reranker is None else resolve_reranker(reranker, device=device),
        settings,
        counts,
    )
    layout = _choose_layout(table_format)
    progress.start("mining", len(positives), "queries")
    try:
        with open_row_writer(out, layout) as writer:
            for batch in chunked(positives.items(), _QUERIES_PER_BATCH):
                rows = list(miner.mine(dict(batch), has_lists="negatives" in layout.columns))
                if rows:
                    writer.append(rows)
                counts.num_rows += len(rows)
                progress.advance(len(batch))
            if not counts.num_rows:
                raise TaskError(
                    f"{data}: no line of the index is a negative; lower --relative-margin or "
                    "--skip, or raise --candidates"
                )
    finally:
        progress.finish()
    return counts


def _check_tsv_lines(path: Path) -> None:
    """Raise InputError if a line of an index cannot be written to TSV."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if b"\t" in line or b"\r" in line:
                raise InputError(
                    f"{path}, line {number:,}: TSV cannot hold the tab or carriage return of this "
                    "line; write .csv, .jsonl or .parquet"
                )


def _choose_layout(table_format: str) -> TableLayout:
    """Return the columns of the table to write."""
    negatives = "negative" if table_format in ("csv", "tsv") else "negatives"
    types = {"anchor": "text", "positive": "text", "negative": "text", "negatives": "texts"}
    return TableLayout(table_format, ("anchor", "positive", negatives), types=types)


def _read_pairs(
    path: Path, settings: MiningSettings, counts: MiningCounts
) -> dict[str, dict[str, None]]:
    """Return the distinct positives of each query, in the order of the table.

    Raises:
        TaskError: The table cannot be read, or has no pair.
    """
    columns = resolve_columns(
        path, settings, settings.columns, standard_columns=_STANDARD_COLUMNS, advice=_ADVICE
    )
    assert columns.text is not None
    assert columns.pair is not None
    positives: dict[str, dict[str, None]] = {}
    examples = counts.examples
    with open_rows(path, settings, columns, examples.notes) as rows:
        for row in rows:
            with examples.count_example(row.location, settings):
                query = get_text(row, columns.text, "--text")
                positive = get_text(row, columns.pair, "--pair")
                positives.setdefault(query, {})[positive] = None
    counts.num_pairs = sum(map(len, positives.values()))
    if not positives:
        raise TaskError(f"{path}: this file has no valid pair; expected at least one")
    return positives


class _Miner:
    """Finds the negatives of queries."""

    def __init__(
        self,
        searcher: Searcher,
        reranker: FineTunedBundle | None,
        settings: MiningSettings,
        counts: MiningCounts,
    ) -> None:
        self._searcher = searcher
        self._reranker = reranker
        self._settings = settings
        self._counts = counts
        self._rng = np.random.default_rng(settings.seed)

    def mine(
        self, positives: Mapping[str, Mapping[str, None]], *, has_lists: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of several queries.

        Args:
            positives: The positives of each query.
            has_lists: Whether the negatives of a row are a list; otherwise each has its own row.
        """
        settings = self._settings
        vectors = self._searcher.encode_queries(list(positives))
        texts = [text for query_positives in positives.values() for text in query_positives]
        positive_vectors = iter(self._searcher.encode_documents(texts))
        candidates = self._searcher.find_neighbors(vectors, settings.candidates)
        for (text, query_positives), vector, results in zip(
            positives.items(), vectors, candidates, strict=True
        ):
            scores = [_compute_cosine(vector, next(positive_vectors)) for _ in query_positives]
            query = _Query(text, list(query_positives), scores)
            negatives = self._select(query, results)
            if not negatives:
                self._counts.num_pairs_without_negatives += len(query_positives)
            for positive in query_positives if negatives else ():
                self._counts.num_negatives += len(negatives)
                pair = {"anchor": text, "positive": positive}
                if has_lists:
                    yield {**pair, "negatives": negatives}
                else:
                    yield from ({**pair, "negative": negative} for negative in negatives)

    def _select(self, query: _Query, results: Sequence[SearchResult]) -> list[str]:
        """Return the negatives of a query among similar lines, most similar first."""
        positives = set(map(to_index_line, (query.text, *query.positives)))
        scores: dict[str, float] = {}
        for result in results:
            if result.text.strip() and result.text not in positives:
                scores.setdefault(result.text, result.cosine)
        self._counts.reject("blank, duplicate, query or positive", len(results) - len(scores))
        positive_scores = query.positive_scores
        if self._reranker is not None and scores:
            scores = self._score(query.text, list(scores))
            positive_scores = list(self._score(query.text, query.positives).values())
        candidates = sorted(scores, key=lambda text: -scores[text])
        limit = self._compute_limit(min(positive_scores))
        negatives = [text for text in candidates if scores[text] <= limit]
        self._counts.reject("too similar", len(candidates) - len(negatives))
        if self._settings.min_score is not None:
            similar = [text for text in negatives if scores[text] >= self._settings.min_score]
            self._counts.reject("not similar enough", len(negatives) - len(similar))
            negatives = similar
        negatives = negatives[self._settings.skip :]
        count = self._settings.num_negatives
        if self._settings.sampling == "random" and len(negatives) > count:
            drawn = np.sort(self._rng.choice(len(negatives), count, replace=False))
            return [negatives[position] for position in drawn]
        return negatives[:count]

    def _score(self, query: str, texts: Sequence[str]) -> dict[str, float]:
        """Return the relevance of texts that the reranker predicts."""
        assert self._reranker is not None
        return {item.text: item.score for item in rank_documents(self._reranker, query, texts)}

    def _compute_limit(self, positive_score: float) -> float:
        """Return the maximum similarity of a negative.

        Args:
            positive_score: The lowest similarity of a positive of the query.
        """
        settings = self._settings
        limits = [float("inf")]
        if settings.absolute_margin is not None:
            limits.append(positive_score - settings.absolute_margin)
        if settings.relative_margin is not None:
            # A fraction of the magnitude, so that the limit of a negative similarity is lower too.
            limits.append(positive_score - abs(positive_score) * settings.relative_margin)
        if settings.max_score is not None:
            limits.append(settings.max_score)
        return min(limits)


def _compute_cosine(first: Floats, second: Floats) -> float:
    norms = max(float(np.linalg.norm(first) * np.linalg.norm(second)), 1e-12)
    return float(first @ second) / norms
