"""Tables of queries and documents: columns, grouping, duplicates and errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.embedding_settings import TextColumns
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.reranking_data import (
    PairEncoder,
    RerankingExamples,
    read_reranking_examples,
)
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from tests.tasks.test_embedding_data import write_json_lines

WORDS = "abcdefgh"
TOKENIZER = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *WORDS)))
Judgments = dict[str, dict[str, float]]


def decode(examples: RerankingExamples) -> Judgments:
    """Return the score of each document of each query, in the order of the examples."""
    texts = [TOKENIZER.decode(examples.texts.get(i)) for i in range(len(examples.texts))]
    judgments: Judgments = {texts[query]: {} for query in examples.queries}
    for row, document, score in zip(
        examples.query_rows, examples.documents, examples.scores.tolist(), strict=True
    ):
        judgments[texts[examples.queries[row]]][texts[document]] = score
    return judgments


def read(
    *paths: Path, columns: dict[str, Any] | None = None, max_seqlen: int = 99, **values: Any
) -> tuple[Judgments, list[ExampleCounts]]:
    """Read the judgments of tables; keywords are settings."""
    text_columns = TextColumns.parse(columns or {}, "the columns")
    examples, counts = read_reranking_examples(
        paths, RerankingSettings(**values), TOKENIZER, max_seqlen, text_columns
    )
    return decode(examples), counts


def test_every_format_and_layout_gives_the_same_judgments(tmp_path: Path) -> None:
    """CSV, Parquet, rows with lists and triplets with standard columns are read without options."""
    expected = {"a": {"b": 1.0, "c d": 0.0}, "d": {"c d": 1.0, "e": 0.0, "f": 0.0}}
    pairs = [(query, *pair) for query, scores in expected.items() for pair in scores.items()]
    lines = [f"{query},{document},{score}" for query, document, score in pairs]
    (tmp_path / "a.csv").write_text("\n".join(["query,passage,label", *lines]) + "\n")
    # The documents of a query are not in consecutive rows, and scores may be booleans.
    (tmp_path / "b.csv").write_text("\n".join(["query,document,score", lines[0], *lines[:0:-1]]))
    names = ("sentence1", "sentence2", "score")
    columns = {
        name: list(values) for name, values in zip(names, zip(*pairs, strict=True), strict=True)
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    lists = [{"query": query, "docs": [*scores], "labels": [score > 0 for score in scores.values()]}
             for query, scores in expected.items()]  # fmt: skip
    write_json_lines(tmp_path / "lists.jsonl", lists)
    write_json_lines(
        tmp_path / "triplets.jsonl",
        [
            {"anchor": "a", "positive": "b", "negative": "c d"},
            {"anchor": "d", "positive": "c d", "negative": ["e", "f"]},
        ],
    )
    for name in ("a.csv", "b.csv", "a.parquet", "lists.jsonl", "triplets.jsonl"):
        judgments, [counts] = read(tmp_path / name)
        assert judgments == expected, name
        assert counts.num_used == counts.num_read
    (tmp_path / "odd.csv").write_text("q;d;rel;x\n" + "a;b;1;c d\n")
    judgments, _ = read(tmp_path / "odd.csv", columns={"text": "q", "pair": "d", "score": "rel"})
    assert judgments == {"a": {"b": 1.0}}
    judgments, _ = read(
        tmp_path / "odd.csv", columns={"text": "q", "pair": "d", "negatives": ["x"]}
    )
    assert judgments == {"a": {"b": 1.0, "c d": 0.0}}


def test_files_share_queries_and_duplicates_are_counted(tmp_path: Path) -> None:
    """A query may occur in several files; a row that adds nothing is counted as a duplicate."""
    first = write_json_lines(
        tmp_path / "a.jsonl",
        [
            {"query": "a", "positive": "b", "negative": "c"},
            {"query": "a", "positive": "b", "negative": "d"},
            {"query": "a", "positive": "b", "negative": "c"},
        ],
    )
    second = write_json_lines(
        tmp_path / "b.jsonl", [{"query": "a", "document": "e", "score": 0.25}]
    )
    judgments, counts = read(first, second)
    assert judgments == {"a": {"b": 1.0, "c": 0.0, "d": 0.0, "e": 0.25}}
    assert [(c.num_read, c.num_used) for c in counts] == [(3, 2), (1, 1)]
    assert counts[0].skipped == {"a duplicate of earlier examples": 1}
    assert counts[0].first_skipped["a duplicate of earlier examples"].endswith("line 3")


def test_long_pairs_are_truncated_and_counted(tmp_path: Path) -> None:
    """Truncation removes tokens of the longer text first; counts belong to the file."""
    long_text = " ".join(WORDS)
    rows = [
        {"query": "a", "document": long_text, "score": 1},
        {"query": "a b c d e", "document": long_text, "score": 0},
        {"query": "a", "document": "b", "score": 0},
    ]
    paths = [write_json_lines(tmp_path / f"{i}.jsonl", rows[i : i + 1]) for i in range(3)]
    examples, counts = read_reranking_examples(
        paths, RerankingSettings(), TOKENIZER, 11, TextColumns()
    )
    assert [c.num_truncated for c in counts] == [1, 1, 0]
    encoder = PairEncoder(examples.texts, TOKENIZER, 11)
    queries = examples.queries[examples.query_rows]
    decoded, lengths = [], []
    for query, document in zip(queries.tolist(), examples.documents.tolist(), strict=True):
        ids, segments = encoder.encode(query, document)
        lengths.append(len(ids))
        decoded.append((TOKENIZER.decode(ids), sum(segments)))
    assert sorted(decoded) == [("a a b c d e f g", 8), ("a b", 2), ("a b c d a b c d", 5)]
    assert encoder.count_tokens(queries, examples.documents).tolist() == lengths


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "a", "document": "b", "score": 1}, {"query": "a", "document": "b", "score": 0}],
         "line 2: a document with two different scores for its query: 1 and 0 for 'b'; correct"),
        ([{"query": "a", "positive": "b", "negative": "b"}],
         "line 1: a document with two different scores for its query: 1 and 0"),
        ([{"query": "a", "positive": "b", "negative": "c"},
          {"query": "a", "positive": "c", "negative": "d"}], "line 2: a document with two"),
        ([{"query": "a", "document": "b", "score": "high"}], "line 1: a score that is not a numb"),
        ([{"query": "a", "document": "b", "score": None}], "line 1: a missing value in column"),
        ([{"query": "", "document": "b", "score": 1}], "line 1: an empty text in column 'query'"),
        ([{"query": "a", "docs": ["b", "c"], "labels": [1]}],
         "different numbers of documents and scores: 2 in column 'docs', 1 in column 'labels'"),
        ([{"query": "a", "docs": [], "labels": []}], "an empty list of texts in column 'docs'"),
        ([{"question": "a", "answer": "b"}],
         "the columns are 'question', 'answer'; name the columns: --text for the query and"),
        ([], "this file has no examples"),
    ],
)  # fmt: skip
def test_invalid_rows_are_errors_with_a_location(
    tmp_path: Path, rows: Sequence[object], message: str
) -> None:
    """An invalid row names its line and what is wrong."""
    with pytest.raises(TaskError) as raised:
        read(write_json_lines(tmp_path / "a.jsonl", rows))
    assert message in str(raised.value)


def test_invalid_rows_can_be_skipped(tmp_path: Path) -> None:
    """skip_invalid counts invalid rows, and adds no document of such a row."""
    rows = [
        {"query": "a", "positive": "b", "negative": ["c"]},
        {"query": "a", "positive": "d", "negative": ["e", "b"]},
        {"query": "a", "positive": " ", "negative": ["f"]},
    ]
    path = write_json_lines(tmp_path / "a.jsonl", rows)
    judgments, [counts] = read(path, skip_invalid=True)
    assert judgments == {"a": {"b": 1.0, "c": 0.0}}
    assert (counts.num_used, sum(counts.skipped.values())) == (1, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"columns": {"text": "q", "pair": "d", "label": "l"}}, "label and pair exclude"),
        ({"validation_columns": {"text": "q"}}, "validation_columns has no column of the docum"),
        ({"relevance_threshold": -1.0}, "greater than or equal to 0"),
        ({"max_documents": 1}, "greater than or equal to 2"),
    ],
)
def test_contradictory_settings_are_errors(values: dict[str, Any], message: str) -> None:
    """Settings that make no sense are rejected."""
    with pytest.raises(SettingsError, match=message):
        RerankingSettings.parse(values, "the settings")
