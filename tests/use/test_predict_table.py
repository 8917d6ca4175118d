"""Tables with predictions as added columns: formats, invalid rows, and errors."""

import csv
import gzip
import io
import json
import os
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.bundle import FineTunedBundle, HeadConfig, TaskKind, load_fine_tuned
from bertsmith.errors import BertsmithError, InputError, TaskError
from bertsmith.tasks.delimited import Dialect
from bertsmith.tasks.tables import TableSource, read_rows
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use import predict_table as predict_table_module
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from bertsmith.use.predict_table import predict_lines_to_table, predict_table
from bertsmith.use.table_output import TableLayout, open_row_writer
from tests.use.conftest import SENTENCES
from tests.use.test_predict import save_task_model

LABELS = ("good", "bad", "plain")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> FineTunedBundle:
    """A random classifier with three labels, fine-tuned on the column "review"."""
    folder = tmp_path_factory.mktemp("classifier")
    return load_task_model(folder, tokenizer, "single", text="review")


def load_task_model(
    folder: Path,
    tokenizer: Tokenizer,
    kind: TaskKind,
    labels: tuple[str, ...] = LABELS,
    **task: Any,
) -> FineTunedBundle:
    """Return a random model whose metadata contains the task settings of its fine-tuning."""
    directory = save_task_model(folder / "m", tokenizer, HeadConfig(kind, labels))
    info = json.loads((directory / "bertsmith.json").read_text())
    (directory / "bertsmith.json").write_text(json.dumps({**info, "provenance": {"task": task}}))
    return load_fine_tuned(directory)


def predict_labels(bundle: FineTunedBundle, texts: list[str]) -> list[tuple[str, float]]:
    """Return the most probable label of each text and its probability."""
    return [prediction.labels[0] for prediction in predict(bundle, texts)]


def test_csv_output_has_added_columns(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """The output has the rows of the input in order, and columns for label and probability."""
    texts = [f"{SENTENCES[number % 5]}, {number}" for number in range(40)]
    table = [
        {"id": f"0{number}", "review": text, "note": 'a "b"\nc'}
        for number, text in enumerate(texts)
    ]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    counts = predict_table(bundle, TableSource(tmp_path / "in.csv"), tmp_path / "out.csv")
    rows = [dict(row.cells) for row in read_rows(tmp_path / "out.csv")]
    assert (counts.num_rows, counts.added_columns) == (40, ["label", "probability"])
    predictions = predict_labels(bundle, texts)
    for row, input_row, (label, probability) in zip(rows, table, predictions, strict=True):
        assert float(row.pop("probability")) == pytest.approx(probability, abs=1e-5)
        assert row == {**input_row, "label": label}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_all_formats_have_the_same_contents(
    bundle: FineTunedBundle, tmp_path: Path, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All output formats have the same rows; JSON and Parquet preserve types and nulls."""
    monkeypatch.setattr(predict_table_module, "_CHUNK_SIZE", chunk_size)
    table = [
        {"review": text, "n": number, "maybe": None if number < 4 else [number]}
        for number, text in enumerate(SENTENCES)
    ]
    (tmp_path / "in.json").write_text(json.dumps(table))
    names = ["o.csv.gz", "o.tsv.xz", "o.jsonl.zst", "o.json.bz2", "o.parquet"]
    for name in names:
        predict_table(bundle, TableSource(tmp_path / "in.json"), tmp_path / name)
    csv_rows, tsv_rows, jsonl_rows, json_rows, parquet_rows = [
        [dict(row.cells) for row in read_rows(tmp_path / name)] for name in names
    ]
    assert jsonl_rows == json_rows == parquet_rows
    assert [{key: row[key] for key in ("review", "n", "maybe")} for row in jsonl_rows] == table
    assert csv_rows == tsv_rows
    assert csv_rows[4]["maybe"] == "[4]"
    for csv_row, jsonl_row in zip(csv_rows, jsonl_rows, strict=True):
        assert (csv_row["label"], float(csv_row["probability"])) == (
            jsonl_row["label"],
            jsonl_row["probability"],
        )


def test_added_columns_do_not_collide(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """If a column name exists already, the added column gets another name, with a note."""
    (tmp_path / "in.csv").write_text("review,label,predicted_label\niron,x,y\n")
    counts = predict_table(bundle, TableSource(tmp_path / "in.csv"), tmp_path / "out.csv")
    assert counts.added_columns == ["predicted_label_2", "probability"]
    assert "the column 'label' exists already; adding 'predicted_label_2'" in counts.notes[0]
    # The existing key "label" is found although only the last row has it.
    (tmp_path / "in.jsonl").write_text('{"review": "a"}\n{"review": "b", "label": 1}\n')
    counts = predict_table(bundle, TableSource(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    assert counts.added_columns == ["predicted_label", "probability"]


def test_output_keeps_the_format_details(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """CSV keeps the input's delimiter, line endings, encoding and BOM; Parquet keeps its types."""
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes("글;review\r\n좋다;iron\r\n".encode("cp949"))
    predict_table(bundle, TableSource(source, encoding="cp949"), out)
    lines = out.read_bytes().decode("cp949").split("\r\n")
    assert lines[0] == "글;review;label;probability"
    assert lines[1].startswith("좋다;iron;")
    source.write_bytes(b"\xef\xbb\xbfreview\niron\n")
    predict_table(bundle, TableSource(source), tmp_path / "bom.csv")
    assert (tmp_path / "bom.csv").read_bytes().startswith(b"\xef\xbb\xbfreview,label")
    columns = {
        "review": ["iron"],
        "small": pa.array([7], pa.int8()),
        "day": pa.array([3], pa.date32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    predict_table(bundle, TableSource(tmp_path / "in.parquet"), tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.names == ["review", "small", "day", "label", "probability"]
    assert (schema.field("small").type, schema.field("day").type) == (pa.int8(), pa.date32())
    predict_table(bundle, TableSource(tmp_path / "in.parquet"), tmp_path / "day.jsonl")
    assert json.loads((tmp_path / "day.jsonl").read_text())["day"] == "1970-01-04"


def test_parquet_values_are_written_to_csv(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """Dates, times and decimals have no quotation marks; null and NaN are empty cells."""
    values = {
        "time": datetime(2020, 1, 1, 12, 30),  # noqa: DTZ001 - a column without a time zone
        "date": date(2020, 1, 2),
        "price": Decimal("1.10"),
        "nan": float("nan"),
        "null": None,
        "float": 0.1,
        "flag": True,
        "list": [1, 2],
        "dates": [date(2020, 1, 2)],
    }
    pq.write_table(
        pa.table({"review": ["iron"], **{k: [v] for k, v in values.items()}}),
        tmp_path / "in.parquet",
    )
    predict_table(bundle, TableSource(tmp_path / "in.parquet"), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert {name: row[name] for name in values} == {
        "time": "2020-01-01T12:30:00",
        "date": "2020-01-02",
        "price": "1.10",
        "nan": "",
        "null": "",
        "float": "0.1",
        "flag": "true",
        "list": "[1, 2]",
        "dates": '["2020-01-02"]',
    }


@pytest.mark.parametrize(
    ("kind", "line", "cells"),
    [
        ("single", "iron\tcold", {"text": "iron", "pair": "cold"}),
        ("regression", "iron\tcold", {"text": "iron", "pair": "cold"}),
        ("multi", "iron\tcold", {"text": "iron", "pair": "cold"}),
        ("entities", "the smith", {"text": "the smith"}),
        ("span", "who?\tthe smith", {"question": "who?", "context": "the smith"}),
        ("choice", "iron\tcold\thot", {"prompt": "iron", "endings": ["cold", "hot"]}),
    ],
)
def test_lines_become_a_table(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind, line: str, cells: dict[str, Any]
) -> None:
    """A table of lines has the parts of each line, and the cells that a table would get."""
    labels = {"regression": (), "span": (), "choice": (), "entities": ("O", "B-X")}
    bundle = load_task_model(
        tmp_path, tokenizer, kind, labels.get(kind, LABELS), pair_column="b", ending_columns=["c"]
    )
    counts = predict_lines_to_table(bundle, [line, line], tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (len(rows), counts.num_rows) == (2, 2)
    assert {name: rows[0][name] for name in cells} == cells
    assert list(rows[0]) == [*cells, *counts.added_columns]
    # The same number of lines, because the last digit of a score depends on the shape of the batch.
    predict_lines_to_table(bundle, [line, line], tmp_path / "out.jsonl")
    json_lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(json_line) for json_line in json_lines] == rows


def test_table_without_header_stays_without_header(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """Columns are given by number, and the output has no header either."""
    (tmp_path / "in.tsv").write_text('1\tiron "\n2\twater\n')
    source = TableSource(tmp_path / "in.tsv", has_header=False)
    predict_table(bundle, source, tmp_path / "out.tsv", columns={"text_column": "1"})
    lines = (tmp_path / "out.tsv").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith('1\tiron "\t')
    assert len(lines[0].split("\t")) == 4


def test_invalid_rows_can_be_skipped(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """With ``skip_invalid``, a row without text gets no prediction; a malformed row is dropped."""
    (tmp_path / "in.csv").write_text("id,review\n1,iron\n2, \n3,a,b\n4,water\n")
    source, out = TableSource(tmp_path / "in.csv"), tmp_path / "out.csv"
    with pytest.raises(TaskError, match=r"in\.csv, line 3: .*--skip-invalid"):
        predict_table(bundle, source, out)
    assert not out.exists()
    counts = predict_table(bundle, source, out, skip_invalid=True)
    assert (counts.num_rows, counts.num_without_prediction, counts.num_unreadable) == (3, 1, 1)
    assert "line 3: " in counts.first_error
    assert counts.first_error.endswith("in column 'review'")
    rows = [dict(row.cells) for row in read_rows(out)]
    assert [row["id"] for row in rows] == ["1", "2", "4"]
    assert (rows[1]["label"], rows[1]["probability"]) == ("", "")
    expected = [label for label, _ in predict_labels(bundle, ["iron", "water"])]
    assert [row["label"] for row in (rows[0], rows[2])] == expected


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_csv_is_an_error(
    bundle: FineTunedBundle, tmp_path: Path, has_header: bool, content: str
) -> None:
    """The error for a CSV file without a row is not about the name of a column."""
    (tmp_path / "in.csv").write_text(content)
    source = TableSource(tmp_path / "in.csv", has_header=has_header)
    with pytest.raises(TaskError, match=r"in\.csv: this table is empty; expected at least one row"):
        predict_table(bundle, source, tmp_path / "out.csv")


def test_first_json_row_without_the_column_is_invalid(
    bundle: FineTunedBundle, tmp_path: Path
) -> None:
    """The columns are those of all rows. A row without the column can be skipped, also the first.

    The error for a table without the column lists its columns.
    """
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n{"id": 2, "review": "iron"}\n')
    source, out = TableSource(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with pytest.raises(TaskError, match=r"line 1: there is no column 'review'; .*--skip-invalid"):
        predict_table(bundle, source, out)
    stream = io.BytesIO((tmp_path / "in.jsonl").read_bytes())
    for name, some_source in (("a", source), ("b", replace(source, stream=stream, format="jsonl"))):
        out = tmp_path / f"{name}.jsonl"
        counts = predict_table(bundle, some_source, out, skip_invalid=True)
        assert (counts.num_rows, counts.num_without_prediction) == (2, 1)
        labels = [json.loads(line)["label"] for line in out.read_text().splitlines()]
        assert labels == [None, predict_labels(bundle, ["iron"])[0][0]]
    message = r"reads the column 'x', but the columns are 'id', 'review'; name .* --text"
    with pytest.raises(TaskError, match=message):
        predict_table(bundle, source, tmp_path / "c.jsonl", columns={"text_column": "x"})


def test_invalid_arguments_are_errors(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """Invalid columns and output files are errors, and no file is written.

    The evaluation rejects pairs for a model of single texts too.
    """
    (tmp_path / "in.csv").write_text("id,words\n1,iron\n")
    source = TableSource(tmp_path / "in.csv")
    cases: list[tuple[str, dict[str, str], str]] = [
        (
            "out.csv",
            {},
            r"reads the column 'review' \(as in .*'id', 'words'; name the column with --text",
        ),
        ("in.csv", {"text_column": "words"}, "exists already"),
        ("out.txt", {"text_column": "words"}, r"out\.txt: expected a name that ends in \.csv"),
        ("no/out.csv", {"text_column": "words"}, "no"),
        (
            "out.csv",
            {"text_column": "words", "pair_column": "id"},
            "was fine-tuned on single texts",
        ),
        ("out.csv", {"text_column": "words", "ending_columns": "id"}, r"task\.ending_columns"),
    ]
    for name, columns, message in cases:
        with pytest.raises(BertsmithError, match=message):
            predict_table(bundle, source, tmp_path / name, columns=columns)
    changes = {"text_column": "words", "pair_column": "id", "label_column": "id"}
    with pytest.raises(InputError, match=r"--pair id: .* was fine-tuned on single texts; omit"):
        evaluate(bundle, source.path, changes=changes)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_values_that_a_format_cannot_hold_are_errors(
    bundle: FineTunedBundle, tmp_path: Path
) -> None:
    """A tab in a TSV cell, a label outside the encoding, and mixed types in Parquet are errors."""
    (tmp_path / "a.csv").write_text('review,x\niron,"a\tb"\n')
    with pytest.raises(InputError, match="TSV cannot hold a tab"):
        predict_table(bundle, TableSource(tmp_path / "a.csv"), tmp_path / "out.tsv")
    (tmp_path / "b.jsonl").write_text('{"review": "iron", "x": "é"}\n{"review": "a", "x": [1]}\n')
    source = TableSource(tmp_path / "b.jsonl", encoding="utf-8")
    with pytest.raises(InputError, match=r"Parquet cannot hold the column 'x'.*\.jsonl"):
        predict_table(bundle, source, tmp_path / "out.parquet")
    (tmp_path / "c.csv").write_bytes("review\ncafé\n".encode("latin-1"))
    korean_labels = ("좋다", "나쁘다")
    folder = tmp_path / "korean"
    korean_bundle = load_task_model(
        folder, bundle.tokenizer, "single", korean_labels, text="review"
    )
    source = TableSource(tmp_path / "c.csv", encoding="latin-1")
    with pytest.raises(InputError, match=r"latin-1 has no character '.'; write a table"):
        predict_table(korean_bundle, source, tmp_path / "o.csv")
    assert not list(tmp_path.glob("o*"))
    assert not list(tmp_path.glob(".o*"))


@pytest.mark.parametrize("table_format", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("row", [{"y\ud800": "a"}, {"y": "a\ud800"}, {"y": [{"a\ud800": 1}]}])
def test_lone_surrogates_are_only_written_to_json(
    tmp_path: Path, table_format: str, row: dict[str, Any]
) -> None:
    """CSV, TSV and Parquet name the column. JSON has an escape, in which NaN is null."""
    row = {**row, "x": "\U0001f600", "score": float("nan")}
    [name, *_] = row

    def write(out: Path) -> None:
        with open_row_writer(out, TableLayout(out.suffix[1:], ["x", name])) as writer:
            writer.append([{"x": "first row"}, row])

    out = tmp_path / f"out.{table_format}"
    if "y\ud800" in row or table_format == "parquet" or isinstance(row["y"], str):
        message = r"cannot hold a lone surrogate .* column 'y.*'.*\\ud800.*; .* write \.jsonl"
        with pytest.raises(InputError, match=message):
            write(out)
        assert not out.exists()
    else:
        # JSON in a cell of CSV has the escape too.
        write(out)
        assert "a\\ud800" in out.read_text()
    write(tmp_path / "out.jsonl")
    _, line = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line) == row | {"score": None}
    assert "NaN" not in line


def test_conflicting_types_are_an_error_at_once(tmp_path: Path) -> None:
    """Parquet columns may become wider; a type that does not fit is an error before the end."""
    out = tmp_path / "out.parquet"
    layout = TableLayout("parquet", ["x"])
    with open_row_writer(out, layout) as writer:
        for value in (None, 1, 1.5):
            writer.append([{"x": value}])
    assert pq.read_table(out).to_pylist() == [{"x": None}, {"x": 1.0}, {"x": 1.5}]
    with open_row_writer(tmp_path / "b.parquet", layout) as writer:
        writer.append([{"x": 1}])
        with pytest.raises(InputError, match=r"must have one type: .*write \.jsonl instead"):
            writer.append([{"x": "a"}])


def test_parts_of_a_killed_process_are_replaced(tmp_path: Path) -> None:
    """A folder of Parquet parts that a process with the same id left is removed, not an error."""
    out = tmp_path / "out.parquet"
    folder = tmp_path / f".out.parquet.{os.getpid()}.tmp.parts"
    folder.mkdir()
    (folder / "000000.parquet").write_text("incomplete")
    with open_row_writer(out, TableLayout("parquet", ["x"])) as writer:
        assert list(folder.iterdir()) == []
        writer.append([{"x": 1}])
    assert pq.read_table(out).to_pylist() == [{"x": 1}]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_breaks_within_a_cell_are_read_back(tmp_path: Path, newline: str) -> None:
    """CSV has quotes around cells with a line feed, a carriage return or both."""
    out = tmp_path / "out.csv"
    texts = ["a\rb", "a\nb", "a\r\nb", "plain"]
    layout = TableLayout("csv", ["x", "y"], Dialect(",", has_quotes=True, newline=newline))
    with open_row_writer(out, layout) as writer:
        writer.append([{"x": text, "y": "1"} for text in texts])
    assert [row.cells["x"] for row in read_rows(out)] == texts
    assert out.read_bytes().endswith(f"plain,1{newline}".encode())


def test_empty_objects_are_null_in_parquet(tmp_path: Path) -> None:
    """Parquet has no type for objects without keys; nested ones are an error at once."""
    out = tmp_path / "out.parquet"
    layout = TableLayout("parquet", ["x"])
    with open_row_writer(out, layout) as writer:
        for value in ({}, {"a": 1}):
            writer.append([{"x": value}])
    assert pq.read_table(out).to_pylist() == [{"x": None}, {"x": {"a": 1}}]
    with open_row_writer(tmp_path / "b.parquet", layout) as writer:
        writer.append([{"x": None}])
        with pytest.raises(InputError, match=r"cannot hold the table: .*; write \.jsonl instead"):
            writer.append([{"x": [{}]}])


def test_large_integers_are_not_rounded(tmp_path: Path) -> None:
    """A column of 64-bit ids and decimal numbers has no Parquet type."""

    def write() -> None:
        layout = TableLayout("parquet", ["x"])
        with open_row_writer(tmp_path / "out.parquet", layout) as writer:
            writer.append([{"x": 2**60 + 1}])
            writer.append([{"x": 1.5}])

    with pytest.raises(InputError, match=r"not in range.*; write \.jsonl instead"):
        write()


def test_stream_is_written_to_a_function(bundle: FineTunedBundle) -> None:
    """A compressed stream can be read; a new key after 1,024 rows is an error."""
    output: list[str] = []
    stream = io.BytesIO(gzip.compress(b'{"review": "iron"}\n{"review": "water"}\n'))
    source = TableSource(Path("standard input"), "jsonl", stream=stream)
    predict_table(bundle, source, output.append)
    rows = [json.loads(line) for line in "".join(output).splitlines()]
    expected = [label for label, _ in predict_labels(bundle, ["iron", "water"])]
    assert [row["label"] for row in rows] == expected
    many_rows = b'{"review": "a"}\n' * 1024 + b'{"review": "a", "late": 1}\n'
    source = TableSource(Path("standard input"), "jsonl", stream=io.BytesIO(many_rows))
    with pytest.raises(TaskError, match="line 1,025: the key 'late' does not occur in the first"):
        predict_table(bundle, source, output.append)


@pytest.mark.parametrize(
    ("kind", "task", "table", "columns"),
    [
        ("multi", {"text_column": "a"}, {"a": "iron"}, {"labels": str, "probabilities": str}),
        ("regression", {"text_column": "a", "pair_column": "b"}, {"a": "iron", "b": "c"},
         {"score": float}),
        ("span", {}, {"question": "Who?", "context": SENTENCES[0]},
         {"answer": str, "answer_start": int, "probability": float}),
        ("choice", {"text_column": "a", "ending_columns": ["b", "c"]},
         {"a": "x", "b": "iron", "c": "water"},
         {"choice": int, "ending": str, "probability": float}),
        ("entities", {"text_column": "a"}, {"a": SENTENCES[1]}, {"entities": json.loads}),
        ("tags", {"text_column": "a"}, {"a": SENTENCES[1]}, {"tags": json.loads}),
    ],
)  # fmt: skip
def test_each_kind_of_model_adds_its_columns(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind, task: Any, table: Any, columns: Any
) -> None:
    """Each kind of model adds its columns; in CSV, lists are joined or JSON in one cell."""
    labels: dict[str, tuple[str, ...]] = {
        "multi": LABELS,
        "entities": ("O", "B-X", "I-X"),
        "tags": ("N", "V"),
    }
    bundle = load_task_model(tmp_path, tokenizer, kind, labels.get(kind, ()), **task)
    (tmp_path / "in.jsonl").write_text(json.dumps(table) + "\n")
    source = TableSource(tmp_path / "in.jsonl")
    counts = predict_table(bundle, source, tmp_path / "out.csv")
    assert counts.added_columns == list(columns)
    (csv_row,) = read_rows(tmp_path / "out.csv")
    values = {name: parse(csv_row.cells[name]) for name, parse in columns.items()}
    if kind == "choice":
        assert values["ending"] == ("iron", "water")[values["choice"]]
    if kind == "span":
        assert SENTENCES[0].startswith(values["answer"], values["answer_start"])
    if kind == "tags":
        assert " ".join(span["text"] for span in values["tags"]).startswith("Every hammer")
    predict_table(bundle, source, tmp_path / "out.jsonl")
    (jsonl_row,) = read_rows(tmp_path / "out.jsonl")
    if kind == "multi":
        assert values["labels"].split("|") == (jsonl_row.cells["labels"] or [""])


def test_squad_file_is_a_table_of_questions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The output for a SQuAD file has a row with the answer for each question.

    The same applies to SQuAD's JSON on standard input, and to an array of questions there.
    """
    bundle = load_task_model(tmp_path, tokenizer, "span", ())
    questions: list[dict[str, Any]]
    questions = [{"id": name, "question": "Who?", "answers": []} for name in ("q1", "q2")]
    squad = {"data": [{"title": "t", "paragraphs": [{"context": SENTENCES[0], "qas": questions}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    predict_table(bundle, TableSource(tmp_path / "squad.json"), tmp_path / "out.jsonl")
    rows = [dict(row.cells) for row in read_rows(tmp_path / "out.jsonl")]
    content = (tmp_path / "squad.json").read_bytes()
    (tmp_path / "squad.txt").write_bytes(content)
    array = json.dumps([{"id": "q1", "question": "Who?", "context": SENTENCES[0]}]).encode()
    sources = (
        TableSource(tmp_path / "squad.txt", "json"),
        TableSource(Path("standard input"), "json", stream=io.BytesIO(content)),
        TableSource(Path("standard input"), "json", stream=io.BytesIO(gzip.compress(content))),
        TableSource(Path("standard input"), "json", stream=io.BytesIO(array)),
    )
    for number, source in enumerate(sources):
        out = tmp_path / f"out{number}.jsonl"
        predict_table(bundle, source, out)
        same_rows = [dict(row.cells) for row in read_rows(out)]
        assert same_rows == (rows if number < 3 else rows[:1])
    assert [row["id"] for row in rows] == ["q1", "q2"]
    assert list(rows[0]) == ["id", "question", "context", "answer", "answer_start", "probability"]
