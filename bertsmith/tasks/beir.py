"""Retrieval data in BEIR's format: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv.

In shapes, Q is the number of queries and N the number of documents.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bertsmith.errors import TaskError
from bertsmith.tasks.embedding_data import (
    EncodedTexts,
    Ints,
    TextCollector,
    TextPrompts,
    TokenizeTexts,
)
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts
from bertsmith.tasks.retrieval import (
    Floats,
    compute_retrieval_metrics,
    rank_documents,
)
from bertsmith.tasks.tables import (
    Row,
    TableSource,
    open_table,
    read_rows,
    reject_lone_surrogates,
)

#: Values of k of recall@k.
RECALL_CUTOFFS: Final = (1, 10, 100)
METRIC_NAMES: Final = ("ndcg@10", "mrr@10", *(f"recall@{cutoff}" for cutoff in RECALL_CUTOFFS))
_SUFFIXES: Final = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, documents, and the relevant documents of each query.

    Attributes:
        texts: All distinct texts.
        queries: int64 [Q], the text of each query.
        documents: int64 [N], the text of each document.
        relevance: For each query, the grade of each relevant document.
        excluded: int64 [Q], the document with the id of the query, which is ranked last; -1 for
            none.
    """

    texts: EncodedTexts
    queries: Ints
    documents: Ints
    relevance: list[dict[int, float]]
    excluded: Ints

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.queries)

    def list_used_texts(self) -> Ints:
        """Return the numbers of all texts, in ascending order."""
        return np.arange(len(self.texts))

    def compute_metrics(self, vectors: Floats) -> dict[str, float]:
        """Return nDCG@10, MRR@10 and recall; ``vectors`` has the vector of each text."""
        rankings = rank_documents(
            vectors[self.queries], vectors[self.documents], max(RECALL_CUTOFFS), self.excluded
        )
        return compute_retrieval_metrics(rankings, self.relevance, RECALL_CUTOFFS)


def is_beir_folder(path: Path) -> bool:
    """Return whether a path is a folder with a corpus and relevance judgments."""
    return (path / "qrels").is_dir() and any((path / f"corpus{s}").is_file() for s in _SUFFIXES)


def find_qrels(folder: Path, splits: Sequence[str]) -> Path:
    """Return the file with the relevance judgments of the first split that exists.

    Raises:
        TaskError: There is no such split.
    """
    for split in splits:
        if (folder / "qrels" / f"{split}.tsv").is_file():
            return folder / "qrels" / f"{split}.tsv"
    existing = sorted(path.stem for path in (folder / "qrels").glob("*.tsv"))
    expected = " or ".join(f"qrels/{split}.tsv" for split in splits)
    raise TaskError(
        f"{folder}: there is no {expected}; the splits are {', '.join(existing) or 'missing'}; "
        "rename one of them, or give another split or folder"
    )


def read_retrieval_set(
    folder: Path, qrels: Path, tokenize: TokenizeTexts, prompts: TextPrompts | None = None
) -> tuple[RetrievalSet, ExampleCounts]:
    """Read a folder in BEIR's format. Only queries with a relevant document are used.

    The text of a document is its title and its text, separated by a space.

    Args:
        folder: The folder with corpus.jsonl and queries.jsonl.
        qrels: The relevance judgments; see ``find_qrels``.
        tokenize: Tokenizes texts that include their prompts.
        prompts: The prompts of queries and documents; None for no prompts.

    Returns:
        The queries and documents, and the counts of the queries.

    Raises:
        TaskError: A file is missing or has an invalid row, or a judgment has an unknown id.
    """
    counts = ExampleCounts()
    collector = TextCollector(tokenize, prompts)
    document_rows: dict[str, int] = {}
    documents: list[int] = []
    for row, document_id in _iter_rows(_find_file(folder, "corpus"), document_rows):
        document_rows[document_id] = len(documents)
        title = str(row.cells.get("title") or "").strip()
        _check_no_surrogates(row, "title", title)
        text = f"{title} {_get_text(row)}".strip()
        documents.append(collector.add(text, counts, "document"))
    grades = _read_grades(qrels, document_rows)
    query_ids: dict[str, int] = {}
    queries: list[int] = []
    relevance: list[dict[int, float]] = []
    for row, query_id in _iter_rows(_find_file(folder, "queries"), query_ids):
        query_ids[query_id] = len(queries)
        if grades.get(query_id):
            counts.num_read += 1
            counts.num_used += 1
            queries.append(collector.add(_get_text(row), counts, "query"))
            relevance.append(grades[query_id])
    unknown_ids = sorted(grades.keys() - query_ids.keys())
    if unknown_ids:
        raise TaskError(f"{qrels}: the query {unknown_ids[0]!r} is not in the file of queries")
    if not queries:
        raise TaskError(f"{qrels}: no query has a relevant document; expected at least one")
    collector.flush(counts)
    used_ids = [query_id for query_id in query_ids if grades.get(query_id)]
    # A document with the id of the query is the query itself, unless it is judged relevant.
    query_rows = [document_rows.get(query_id, -1) for query_id in used_ids]
    excluded = np.array(
        [
            -1 if row in grades[query_id] else row
            for query_id, row in zip(used_ids, query_rows, strict=True)
        ],
        np.int64,
    )
    texts = collector.collect()
    return (
        RetrievalSet(
            texts, np.array(queries, np.int64), np.array(documents, np.int64), relevance, excluded
        ),
        counts,
    )


def _find_file(folder: Path, name: str) -> Path:
    """Return the JSON lines file with this name; it may be compressed."""
    for suffix in _SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise TaskError(f"{folder / name}.jsonl: no such file; expected a folder in BEIR's format")


def _iter_rows(path: Path, seen_ids: dict[str, int]) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a file and their ids; raise TaskError for an invalid or repeated id."""
    for row in read_rows(path):
        row_id = row.cells.get("_id")
        if row.error or not isinstance(row_id, str | int):
            raise TaskError(f"{row.location}: {row.error or 'there is no _id'}; correct it")
        if str(row_id) in seen_ids:
            raise TaskError(f"{row.location}: the _id {row_id!r} occurs twice; remove one row")
        yield row, str(row_id)


def _get_text(row: Row) -> str:
    text: Any = row.cells.get("text")
    if not isinstance(text, str):
        raise TaskError(f"{row.location}: the text is {text!r}; expected a text")
    _check_no_surrogates(row, "text", text)
    return text.strip()


def _check_no_surrogates(row: Row, column: str, text: str) -> None:
    """Raise TaskError if a text cannot be tokenized."""
    try:
        reject_lone_surrogates(text, column)
    except BadExampleError as error:
        raise TaskError(f"{row.location}: {error}; correct it") from None


def _require_header(qrels: Path) -> None:
    """Raise TaskError if the first line is a judgment instead of the names of the columns."""
    with open_table(TableSource(qrels)) as table:
        columns = table.columns or []
    try:
        float(columns[2])
    except (ValueError, IndexError):
        return
    raise TaskError(
        f"{qrels}: the header is missing: the first line is the judgment {' '.join(columns)!r}; "
        "insert a line with the column names query-id, corpus-id and score"
    )


def _read_grades(qrels: Path, document_rows: dict[str, int]) -> dict[str, dict[int, float]]:
    """Return the grades above 0 of the documents of each query, by row of the document."""
    _require_header(qrels)
    grades: dict[str, dict[int, float]] = {}
    for row in read_rows(qrels):
        if row.error or len(row.cells) < 3:
            problem = row.error or "expected query-id, corpus-id and score"
            raise TaskError(f"{row.location}: {problem}; correct it")
        query_id, document_id, score = list(row.cells.values())[:3]
        if document_id not in document_rows:
            raise TaskError(f"{row.location}: the document {document_id!r} is not in the corpus")
        try:
            grade = float(score)
        except ValueError:
            grade = math.nan
        if not math.isfinite(grade):
            raise TaskError(f"{row.location}: the score is {score!r}; expected a number")
        query_grades = grades.setdefault(query_id, {})
        if grade > 0:
            query_grades[document_rows[document_id]] = grade
    return grades
