"""Retrieval data in BEIR's format."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.errors import TaskError
from bertsmith.tasks.beir import RetrievalSet, find_qrels, is_beir_folder, read_retrieval_set
from bertsmith.tasks.inputs import ExampleCounts

CORPUS = [
    {"_id": "d1", "title": "Title", "text": "one"},
    {"_id": "d2", "title": "", "text": "two"},
    {"_id": "q2", "title": "", "text": "second query"},
]
QUERIES = [
    {"_id": "q1", "text": "first query"},
    {"_id": "q2", "text": "second query"},
    {"_id": "q3", "text": "without judgment"},
]
JUDGMENTS = [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d2", 1)]


def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
    """Return the code points of each text as its token ids."""
    return [[ord(character) for character in text] for text in texts]


def write_beir_folder(
    folder: Path,
    corpus: Sequence[dict[str, Any]] = CORPUS,
    queries: Sequence[dict[str, Any]] = QUERIES,
    judgments: Sequence[tuple[Any, Any, Any]] = JUDGMENTS,
    split: str = "test",
) -> Path:
    """Write a folder in BEIR's format."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in judgments)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def read(folder: Path, split: str = "test") -> RetrievalSet:
    """Read a folder."""
    return read_retrieval_set(folder, find_qrels(folder, [split]), tokenize)[0]


def test_folder_is_read(tmp_path: Path) -> None:
    """Titles precede texts, judgments of 0 are not relevant, and a query is not its own result."""
    folder = write_beir_folder(tmp_path / "data")
    assert is_beir_folder(folder)
    assert not is_beir_folder(tmp_path)
    retrieval = read(folder)
    texts = ["".join(map(chr, retrieval.texts.get(i))) for i in range(len(retrieval.texts))]
    assert [texts[i] for i in retrieval.documents] == ["Title one", "two", "second query"]
    assert [texts[i] for i in retrieval.queries] == ["first query", "second query"]
    assert retrieval.relevance == [{0: 2.0}, {1: 1.0}]
    assert retrieval.excluded.tolist() == [-1, 2]
    # Vectors for which the first query finds d2 first, and the second query finds itself first.
    vectors = np.array([[1, 0], [0.05, 1], [0, 1], [0.1, 1]], np.float32)
    metrics = retrieval.compute_metrics(vectors)
    assert metrics["mrr@10"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["recall@1"] == 0.5
    assert metrics["recall@100"] == 1.0


def test_relevant_document_with_the_id_of_its_query_is_found(tmp_path: Path) -> None:
    """Queries and documents may be numbered in parallel; the document is then not the query."""
    corpus = [{"_id": str(number), "title": "", "text": f"answer {number}"} for number in range(3)]
    queries = [{"_id": str(number), "text": f"question {number}"} for number in range(3)]
    judgments = [(str(number), str(number), 1) for number in range(3)]
    retrieval = read(write_beir_folder(tmp_path / "data", corpus, queries, judgments))
    assert retrieval.excluded.tolist() == [-1, -1, -1]
    vectors = np.concatenate([np.eye(3), np.eye(3)]).astype(np.float32)
    assert retrieval.compute_metrics(vectors)["recall@1"] == 1.0


def test_compressed_files_are_read(tmp_path: Path) -> None:
    """The corpus and the queries may be compressed."""
    folder = write_beir_folder(tmp_path / "data")
    for name in ("corpus", "queries"):
        path = folder / f"{name}.jsonl"
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert is_beir_folder(folder)
    assert len(read(folder)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judgments": [("q1", "d9", 1)]}, "test.tsv, line 2: the document 'd9' is not in the"),
        ({"judgments": [("q9", "d1", 1)]}, "the query 'q9' is not in the file of queries"),
        ({"judgments": [("q1", "d1", 0)]}, "no query has a relevant document"),
        ({"judgments": [("q1", "d1", "x")]}, "line 2: the score is 'x'; expected a number"),
        ({"judgments": [("q1", "d1", "inf")]}, "line 2: the score is 'inf'; expected a number"),
        ({"judgments": [("q1", "d1", "nan")]}, "line 2: the score is 'nan'; expected a number"),
        ({"corpus": [CORPUS[0], CORPUS[0]]}, "corpus.jsonl, line 2: the _id 'd1' occurs twice"),
        ({"corpus": [{"text": "a"}]}, "corpus.jsonl, line 1: there is no _id"),
        ({"queries": [{"_id": "q1"}]}, "queries.jsonl, line 1: the text is None"),
        (
            {"queries": [{"_id": "q1", "text": "a\ud800"}]},
            "queries.jsonl, line 1: a lone surrogate (half of a character) in column 'text'; corr",
        ),
        (
            {"corpus": [{"_id": "d1", "title": "\ud800", "text": "a"}]},
            "corpus.jsonl, line 1: a lone surrogate (half of a character) in column 'title'",
        ),
    ],
)
def test_invalid_files_are_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """An error names the file, the line and the id."""
    folder = write_beir_folder(tmp_path / "data", **changes)
    with pytest.raises(TaskError) as error:
        read(folder)
    assert message in str(error.value)


def test_judgments_without_header_are_an_error(tmp_path: Path) -> None:
    """The first line is not skipped if it is a judgment."""
    folder = write_beir_folder(tmp_path / "data")
    qrels = folder / "qrels" / "test.tsv"
    _, *lines = qrels.read_text().splitlines()
    for text in ("\n".join(lines), lines[0]):
        qrels.write_text(text)
        with pytest.raises(TaskError, match=r"test.tsv: the header is missing: .* 'q1 d1 2'"):
            read(folder)


def test_missing_parts_are_errors(tmp_path: Path) -> None:
    """The error lists the existing splits, or names the missing file."""
    folder = write_beir_folder(tmp_path / "data", split="dev")
    with pytest.raises(TaskError, match=r"no qrels/test.tsv; the splits are dev; rename"):
        read(folder)
    (folder / "queries.jsonl").unlink()
    with pytest.raises(TaskError, match=r"queries.jsonl: no such file"):
        read(folder, "dev")
