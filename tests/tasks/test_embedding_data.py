"""Tables of texts for embedding models: columns, kinds of examples, duplicates and errors."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.errors import SettingsError, TaskError
from bertsmith.settings import Settings
from bertsmith.tasks import embedding_data
from bertsmith.tasks.embedding_data import EmbeddingExamples, TextPrompts, read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.inputs import ExampleCounts

PAIRS = [{"anchor": "a b", "positive": "c"}, {"anchor": "d", "positive": "a b"}]


def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
    """Return the code points of each text as its token ids."""
    return [[ord(character) for character in text] for text in texts]


def get_texts(examples: EmbeddingExamples) -> list[str]:
    """Return all distinct texts."""
    return ["".join(map(chr, examples.texts.get(i))) for i in range(len(examples.texts))]


def read(*paths: Path, columns: dict[str, Any] | None = None, **values: Any) -> EmbeddingExamples:
    """Read the examples of tables; keywords are settings."""
    text_columns = TextColumns.parse(columns or {}, "the columns")
    return read_examples(paths, EmbeddingSettings(**values), tokenize, text_columns)[0]


def write_json_lines(path: Path, rows: Sequence[object]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_table_format_gives_the_same_examples(tmp_path: Path) -> None:
    """CSV, TSV, JSON lines, JSON, Parquet and compressed files give the same pairs."""
    jsonl = write_json_lines(tmp_path / "a.jsonl", PAIRS)
    (tmp_path / "a.json").write_text(json.dumps(PAIRS))
    (tmp_path / "a.csv").write_text("anchor,positive\na b,c\nd,a b\n")
    (tmp_path / "a.tsv").write_text("positive\tanchor\nc\ta b\na b\td\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    pq.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "a.parquet")
    names = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.parquet"]
    for name in names:
        examples = read(tmp_path / name)
        assert examples.kind == "pairs"
        assert get_texts(examples) == ["a b", "c", "d"], name
        assert examples.anchors.tolist() == [0, 2]
        assert examples.positives.tolist() == [1, 0]


def test_standard_columns_determine_the_kind(tmp_path: Path) -> None:
    """Columns with standard names are found, also those of negatives, and lines of a text file."""
    triplets = [
        {"id": 1, "anchor": "a", "positive": "b", "negative_1": "c", "negatives": ["d", "e"]}
    ]
    examples = read(write_json_lines(tmp_path / "triplets.jsonl", triplets))
    assert (examples.kind, len(examples.negatives)) == ("pairs", 3)
    scored = [{"sentence1": "a", "sentence2": "b", "score": 2.5}]
    examples = read(write_json_lines(tmp_path / "scored.jsonl", scored))
    assert (examples.kind, examples.scores.tolist()) == ("scored_pairs", [2.5])
    labeled = [{"text": "a", "label": 7}, {"text": "b", "label": "x"}, {"text": "c", "label": 7}]
    examples = read(write_json_lines(tmp_path / "labeled.jsonl", labeled))
    assert (examples.kind, examples.labels.tolist()) == ("labeled_texts", [0, 1, 0])
    lines = "one text\n\n  another, text\n"
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("lines.txt", "lines.txt.gz"):
        examples = read(tmp_path / name)
        assert (examples.kind, get_texts(examples)) == ("texts", ["one text", "another, text"])


def test_several_files_have_one_table_of_texts(tmp_path: Path) -> None:
    """A text that occurs in two files has one number, and an example of both is used once."""
    first = write_json_lines(tmp_path / "a.jsonl", PAIRS)
    second = write_json_lines(tmp_path / "b.jsonl", [PAIRS[1], {"anchor": "c", "positive": "e"}])
    examples, counts = read_examples([first, second], EmbeddingSettings(), tokenize, TextColumns())
    assert get_texts(examples) == ["a b", "c", "d", "e"]
    assert examples.file_indices.tolist() == [0, 0, 1]
    assert dict(counts[1].skipped) == {"a duplicate of an earlier example": 1}
    assert (counts[1].num_read, counts[1].num_used) == (2, 1)


def test_duplicates_of_scored_pairs_can_be_kept(tmp_path: Path) -> None:
    """Published correlations include them; duplicates of other pairs are dropped in any case."""
    scored = [{"sentence1": "a", "sentence2": "b", "score": 2.5}] * 2
    path = write_json_lines(tmp_path / "scored.jsonl", scored)
    pairs = write_json_lines(tmp_path / "pairs.jsonl", [*PAIRS, *PAIRS])
    for keep, expected in ((False, [2.5]), (True, [2.5, 2.5])):
        examples, _ = read_examples(
            [path], EmbeddingSettings(), tokenize, TextColumns(), keep_duplicate_scores=keep
        )
        assert examples.scores.tolist() == expected
        assert get_texts(examples) == ["a", "b"]
        others, _ = read_examples(
            [pairs], EmbeddingSettings(), tokenize, TextColumns(), keep_duplicate_scores=keep
        )
        assert len(others) == len(PAIRS)


def test_pairs_with_different_scores_are_no_duplicates(tmp_path: Path) -> None:
    """The scores -1 and -2 have the same hash in Python."""
    rows = [{"sentence1": "a", "sentence2": "b", "score": score} for score in (-1, -2, -1)]
    assert read(write_json_lines(tmp_path / "scored.jsonl", rows)).scores.tolist() == [-1, -2]


def test_texts_are_tokenized_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct text is tokenized once, at most a batch of texts at a time."""
    sizes: list[int] = []

    def record(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        sizes.append(len(texts))
        return tokenize(texts, counts)

    monkeypatch.setattr(embedding_data, "_TEXTS_PER_BATCH", 4)
    rows = [{"anchor": str(n), "positive": str(n + 1)} for n in range(9)]
    path = write_json_lines(tmp_path / "a.jsonl", rows)
    examples, _ = read_examples([path], EmbeddingSettings(), record, TextColumns())
    assert sizes == [4, 4, 2]
    assert get_texts(examples) == [str(n) for n in range(10)]


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([{"question": "a", "answer": "b"}], {}, "no column has a standard name; the columns are"),
        ([{"question": "a"}], {"text": "question", "pair": "answer"},
         "there is no column 'answer'; the columns are 'question'; name the column with --pair"),
        ([{"anchor": "a", "positive": " "}], {}, "an empty text in column 'positive'"),
        ([{"anchor": "a", "positive": 3}], {}, "a value that is not text in column 'positive'"),
        ([{"anchor": "a", "positive": "a"}], {}, "an anchor and a positive that are the same text"),
        ([{"anchor": "a", "positive": "b", "negative": "a"}], {},
         "a negative that is also the anchor or the positive"),
        ([{"anchor": "a", "positive": "b", "negatives": []}], {}, "an empty list of texts"),
        ([{"sentence1": "a", "sentence2": "b", "score": "high"}], {},
         "a score that is not a number: 'high'"),
        ([{"text": "a", "label": ""}], {}, "an empty label"),
        ([{"text": "a", "label": 1}, {"text": "a", "label": 2}], {},
         "line 2: a text that has another label in an earlier row: '2'"),
    ],
)  # fmt: skip
def test_invalid_rows_are_errors_with_a_location(
    tmp_path: Path, rows: list[Any], columns: dict[str, Any], message: str
) -> None:
    """An error names the file, the line and what is wrong."""
    path = write_json_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(TaskError, match=r"a\.jsonl") as error:
        read(path, columns=columns)
    assert message in str(error.value)


def test_invalid_rows_can_be_skipped(tmp_path: Path) -> None:
    """With skip_invalid, invalid rows are counted; a file without valid rows is an error."""
    rows = [*PAIRS, {"anchor": "a", "positive": ""}, {"anchor": "b", "positive": "b"}]
    settings = EmbeddingSettings(skip_invalid=True)
    path = write_json_lines(tmp_path / "a.jsonl", rows)
    examples, counts = read_examples([path], settings, tokenize, TextColumns())
    assert len(examples) == 2
    assert sorted(counts[0].skipped.values()) == [1, 1]
    with pytest.raises(TaskError, match="all 2 are duplicates or invalid"):
        read(write_json_lines(tmp_path / "b.jsonl", rows[2:]), skip_invalid=True)


def test_files_of_different_kinds_are_an_error(tmp_path: Path) -> None:
    """All training files have the same kind of examples."""
    pairs = write_json_lines(tmp_path / "a.jsonl", PAIRS)
    texts = write_json_lines(tmp_path / "b.jsonl", [{"text": "a"}])
    with pytest.raises(TaskError, match=r"are texts, but those of .*a\.jsonl are pairs"):
        read(pairs, texts)


@pytest.mark.parametrize(
    ("settings_class", "values", "message"),
    [
        (TextColumns, {"pair": "b"}, "the column of the text is missing"),
        (TextColumns, {"text": "a", "pair": "a"}, "the column 'a' is given twice"),
        (TextColumns, {"text": "a", "score": "s"}, "score needs the column of a second text"),
        (TextColumns, {"text": "a", "negatives": ["n"]}, "negatives need the column of the pos"),
        (TextColumns, {"text": "a", "pair": "b", "label": "c"}, "label and pair exclude each"),
        (TextColumns, {"text": "a", "pair": "b", "score": "s", "negatives": ["n"]},
         "negatives and score exclude each other"),
        (EmbeddingSettings, {"train_files": ["a"], "file_weights": [1.0, 2.0]},
         "file_weights has 2 values and train_files has 1"),
        (EmbeddingSettings, {"matryoshka_dims": [8, 8]}, "matryoshka_dims has a duplicate"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_errors(
    settings_class: type[Settings], values: dict[str, Any], message: str
) -> None:
    """Columns and lists that contradict each other are rejected."""
    with pytest.raises(SettingsError, match=message):
        settings_class.parse(values, "the settings")


def test_queries_and_documents_have_different_prompts(tmp_path: Path) -> None:
    """A text that is both has two numbers and one identity; scored pairs have another prompt."""
    prompts = TextPrompts("every ", "query ", "document ")
    path = write_json_lines(tmp_path / "a.jsonl", [{**row, "negative": "e"} for row in PAIRS])
    examples, _ = read_examples(
        [path], EmbeddingSettings(), tokenize, TextColumns(), prompts=prompts
    )
    texts = get_texts(examples)
    assert [texts[number] for number in examples.anchors] == ["query a b", "query d"]
    assert [texts[number] for number in examples.positives] == ["document c", "document a b"]
    assert [texts[number] for number in examples.negatives] == ["document e"] * 2
    identities = examples.texts.identities
    assert identities[examples.anchors[0]] == identities[examples.positives[1]]
    assert len(set(identities.tolist())) == 4
    scored = write_json_lines(
        tmp_path / "b.jsonl", [{"sentence1": "a", "sentence2": "b", "score": 1}]
    )
    examples, _ = read_examples(
        [scored], EmbeddingSettings(), tokenize, TextColumns(), prompts=prompts
    )
    assert get_texts(examples) == ["every a", "every b"]
    assert examples.texts.identities.tolist() == [0, 1]


def test_lengths_and_negatives_of_some_examples(tmp_path: Path) -> None:
    """The lengths of texts and the numbers of negatives are those of the selected examples."""
    rows = [
        {"anchor": "a", "positive": "bc", "negatives": ["def", "g"]},
        {"anchor": "hijk", "positive": "l", "negatives": ["mn"]},
    ]
    examples = read(write_json_lines(tmp_path / "triplets.jsonl", rows))
    assert examples.texts.get_lengths(np.array([4, 1])).tolist() == [4, 2]
    assert examples.count_negatives(np.array([1, 0])).tolist() == [1, 2]
