"""Reading of queries and their documents; each distinct text is tokenized once.

In shapes, Q is the number of queries and n the number of pairs of a query and a document.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import TaskError
from bertsmith.tasks.embedding_columns import (
    STANDARD_RERANKING_COLUMNS,
    open_rows,
    resolve_columns,
)
from bertsmith.tasks.embedding_data import (
    EncodedTexts,
    Ints,
    TextCollector,
    TokenizeTexts,
    parse_texts,
)
from bertsmith.tasks.embedding_settings import TextColumns
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts, TokenSequence
from bertsmith.tasks.label_values import parse_score
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.tasks.tables import Row, get_cell, get_text
from bertsmith.tasks.text_pairs import add_special_tokens, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

#: [CLS] and two [SEP].
NUM_SPECIAL_TOKENS: Final = 3
_DUPLICATE: Final = "a duplicate of earlier examples"
_ADVICE: Final = (
    "--text for the query and --pair for the document, with --score for its relevance or "
    "--negatives for other documents"
)


@dataclass(frozen=True)
class RerankingExamples:
    """Queries, and the scored documents of each query; texts are given by their number.

    Attributes:
        texts: All distinct texts, without special tokens.
        queries: int64 [Q], the text of each query.
        offsets: int64 [Q + 1], the first document of each query in ``documents``.
        documents: int64 [n], the text of each document.
        scores: float32 [n], the relevance of each document.
    """

    texts: EncodedTexts
    queries: Ints
    offsets: Ints
    documents: Ints
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.queries)

    @property
    def counts(self) -> Ints:
        """Number of documents of each query, int64 [Q]."""
        return np.diff(self.offsets)

    @property
    def query_rows(self) -> Ints:
        """The index of the query of each pair, int64 [n]."""
        return np.repeat(np.arange(len(self)), self.counts)

    def select(self, indices: Ints) -> "RerankingExamples":
        """Return the queries with these indices and their documents; all texts are kept."""
        counts = self.counts[indices]
        rows = [np.arange(self.offsets[index], self.offsets[index + 1]) for index in indices]
        pairs = np.concatenate([np.empty(0, np.int64), *rows])
        return RerankingExamples(
            self.texts,
            self.queries[indices],
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            self.documents[pairs],
            self.scores[pairs],
        )

    def is_relevant(self, threshold: float) -> NDArray[np.bool_]:
        """Return whether each document is relevant: its score exceeds the threshold, bool [n]."""
        relevant: NDArray[np.bool_] = self.scores > threshold
        return relevant


class PairEncoder:
    """Joins the token ids of a query and a document to the input of the model."""

    def __init__(self, texts: EncodedTexts, tokenizer: Tokenizer, max_seqlen: int) -> None:
        """Create the encoder.

        Args:
            texts: Tokenized texts.
            tokenizer: Has the special tokens.
            max_seqlen: Maximum tokens of an input, including special tokens.
        """
        self._texts = texts
        self._tokenizer = tokenizer
        self._max_text_tokens = max_seqlen - NUM_SPECIAL_TOKENS

    def encode(self, query: int, document: int) -> TokenSequence:
        """Return [CLS] query [SEP] document [SEP] of the texts with these numbers."""
        texts = [self._texts.get(query), self._texts.get(document)]
        return add_special_tokens(truncate_texts(texts, self._max_text_tokens), self._tokenizer)

    def count_tokens(self, queries: Ints, documents: Ints) -> Ints:
        """Return the number of tokens of each pair, int64 [n]."""
        num_text_tokens = self._texts.get_lengths(queries) + self._texts.get_lengths(documents)
        counts: Ints = np.minimum(num_text_tokens, self._max_text_tokens) + NUM_SPECIAL_TOKENS
        return counts


def build_tokenize_function(tokenizer: Tokenizer, max_seqlen: int) -> TokenizeTexts:
    """Return a function that tokenizes texts without special tokens.

    A text that alone fills an input is truncated to ``max_seqlen`` tokens.
    """

    def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        encoded = tokenizer.with_counter(counts.token_counts).encode_batch(texts)
        return [list(ids[:max_seqlen]) for ids in encoded]

    return tokenize


@dataclass
class _PairCollector:
    """The pairs read so far."""

    texts: TextCollector
    index_of_query: dict[int, int] = field(default_factory=dict)
    query_rows: "array[int]" = field(default_factory=lambda: array("q"))
    documents: "array[int]" = field(default_factory=lambda: array("q"))
    scores: "array[float]" = field(default_factory=lambda: array("f"))
    score_of_pair: dict[tuple[int, int], float] = field(default_factory=dict)

    def add_row(self, row: Row, columns: TextColumns, counts: ExampleCounts) -> None:
        """Add the pairs of a row.

        Raises:
            BadExampleError: The row is invalid, or has another score for a pair than before.
        """
        assert columns.text is not None
        query_text = get_text(row, columns.text, "--text")
        pairs = _read_documents(row, columns)
        scores: dict[str, float] = {}
        for text, score in pairs:
            if scores.setdefault(text, score) != score:
                raise _create_conflict_error(text, scores[text], score)
        query = self.texts.add(query_text, counts)
        new_pairs = {}
        for text, score in scores.items():
            document = self.texts.add(text, counts)
            previous = self.score_of_pair.get((query, document))
            if previous is None:
                new_pairs[query, document] = score
            elif previous != score:
                raise _create_conflict_error(text, previous, score)
        if not new_pairs:
            counts.skipped[_DUPLICATE] += 1
            counts.first_skipped.setdefault(_DUPLICATE, row.location)
            counts.num_used -= 1
            return
        self.score_of_pair |= new_pairs
        query_row = self.index_of_query.setdefault(query, len(self.index_of_query))
        for (_, document), score in new_pairs.items():
            self.query_rows.append(query_row)
            self.documents.append(document)
            self.scores.append(score)

    def collect(self) -> RerankingExamples:
        """Return all pairs, grouped by query."""
        query_rows = np.array(self.query_rows, np.int64)
        order = np.argsort(query_rows, kind="stable")
        counts = np.bincount(query_rows, minlength=len(self.index_of_query))
        return RerankingExamples(
            self.texts.collect(),
            np.array(list(self.index_of_query), np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.array(self.documents, np.int64)[order],
            np.array(self.scores, np.float32)[order],
        )


def _read_documents(row: Row, columns: TextColumns) -> list[tuple[str, float]]:
    """Return the documents of a row and their scores.

    With a column of scores, both cells are a single value, or both are lists of equal length.
    Without one, the document is relevant (1), and the negatives are not (0).
    """
    assert columns.pair is not None
    documents = parse_texts(get_cell(row, columns.pair, "--pair"), columns.pair)
    if columns.score is not None:
        value = get_cell(row, columns.score, "--score")
        values = value if isinstance(value, list) else [value]
        if len(values) != len(documents):
            raise BadExampleError(
                "different numbers of documents and scores",
                f": {len(documents)} in column {columns.pair!r}, {len(values)} in column "
                f"{columns.score!r}",
            )
        return [(text, _parse_relevance(v)) for text, v in zip(documents, values, strict=True)]
    negatives = []
    for column in columns.negatives:
        negatives += parse_texts(get_cell(row, column, "--negatives"), column)
    return [(text, 1.0) for text in documents] + [(text, 0.0) for text in negatives]


def _parse_relevance(value: Any) -> float:
    """Convert a cell to a score; true is 1 and false is 0."""
    return float(value) if isinstance(value, bool) else parse_score(value)


def _create_conflict_error(text: str, first: float, second: float) -> BadExampleError:
    """Return the error for a document with two different scores for the same query."""
    return BadExampleError(
        "a document with two different scores for its query",
        f": {first:g} and {second:g} for {text[:60]!r}",
    )


def read_reranking_examples(
    paths: Sequence[Path],
    settings: RerankingSettings,
    tokenizer: Tokenizer,
    max_seqlen: int,
    columns: TextColumns,
    other_columns: TextColumns | None = None,
) -> tuple[RerankingExamples, list[ExampleCounts]]:
    """Read the queries and documents of one or several tables.

    The documents of a query need not be in consecutive rows, nor in the same file. Duplicates are
    dropped and counted.

    Args:
        paths: The tables.
        settings: How to read the tables.
        tokenizer: Tokenizes texts.
        max_seqlen: Maximum tokens of an input; longer pairs are counted as truncated.
        columns: The columns that the user has named; see ``resolve_reranking_columns``.
        other_columns: Columns to look for if the user has named none.

    Returns:
        The examples, and the counts of each table.

    Raises:
        TaskError: A table cannot be read or has no valid example.
    """
    collector = _PairCollector(TextCollector(build_tokenize_function(tokenizer, max_seqlen)))
    all_counts: list[ExampleCounts] = []
    num_pairs = [0]
    for path in paths:
        file_columns = resolve_reranking_columns(path, settings, columns, other_columns)
        counts = ExampleCounts()
        all_counts.append(counts)
        with open_rows(path, settings, file_columns, counts.notes) as rows:
            for row in rows:
                with counts.count_example(row.location, settings):
                    collector.add_row(row, file_columns, counts)
        collector.texts.flush(counts)
        num_pairs.append(len(collector.documents))
        if not counts.num_used:
            reason = "this file has none"
            if counts.num_read:
                reason = f"all {counts.num_read:,} are duplicates or invalid"
            raise TaskError(f"{path}: {reason}; expected at least one valid example")
    examples = collector.collect()
    _count_truncated_pairs(collector, examples, max_seqlen, num_pairs, all_counts)
    return examples, all_counts


def _count_truncated_pairs(
    collector: _PairCollector,
    examples: RerankingExamples,
    max_seqlen: int,
    num_pairs: Sequence[int],
    all_counts: Sequence[ExampleCounts],
) -> None:
    """Set the number of truncated pairs in the counts of each file.

    Args:
        collector: The pairs in the order in which they were read.
        examples: The same pairs.
        max_seqlen: Maximum tokens of an input.
        num_pairs: Number of pairs before the first file and after each file.
        all_counts: The counts of each file.
    """
    queries = examples.queries[np.array(collector.query_rows, np.int64)]
    documents = np.array(collector.documents, np.int64)
    num_tokens = examples.texts.get_lengths(queries) + examples.texts.get_lengths(documents)
    is_truncated = num_tokens > max_seqlen - NUM_SPECIAL_TOKENS
    for counts, (start, end) in zip(all_counts, pairwise(num_pairs), strict=True):
        counts.num_truncated = int(is_truncated[start:end].sum())


def resolve_reranking_columns(
    path: Path,
    settings: RerankingSettings,
    columns: TextColumns,
    other_columns: TextColumns | None = None,
) -> TextColumns:
    """Return the columns of a table of queries and documents; see ``resolve_columns``."""
    return resolve_columns(
        path,
        settings,
        columns,
        other_columns,
        standard_columns=STANDARD_RERANKING_COLUMNS,
        advice=_ADVICE,
    )
