"""Tables with predictions added: columns, names, formats, bad rows, memory and order."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.bundle import FineTunedBundle, HeadConfig, TaskKind, load_fine_tuned
from bertsmith.errors import BertsmithError, InputError, TaskError
from bertsmith.tasks.tables import TableSource, read_rows
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use import predict_table as module
from bertsmith.use.predict import predict
from bertsmith.use.predict_table import predict_table
from tests.use.conftest import TEXT
from tests.use.test_predict import made

LABELS = ("good", "bad", "plain")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> FineTunedBundle:
    """A random classifier of three labels that was fine-tuned on the column "review"."""
    folder = tmp_path_factory.mktemp("classifier")
    return trained(folder, tokenizer, "single", text="review")


def trained(
    folder: Path,
    tokenizer: Tokenizer,
    kind: TaskKind,
    labels: tuple[str, ...] = LABELS,
    **task: Any,
) -> FineTunedBundle:
    """Return a random model whose directory names the columns of its training table."""
    directory = made(folder / "m", tokenizer, HeadConfig(kind, labels))
    info = json.loads((directory / "bertsmith.json").read_text())
    (directory / "bertsmith.json").write_text(json.dumps({**info, "provenance": {"task": task}}))
    return load_fine_tuned(directory)


def labels_of(bundle: FineTunedBundle, texts: list[str]) -> list[tuple[str, float]]:
    """Return the likeliest label of each text and its probability."""
    return [answer.labels[0] for answer in predict(bundle, texts)]


def test_a_table_gets_columns(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """The rows stay as they are, in their order, with label and probability; none is lost."""
    texts = [f"{TEXT[n % 5]}, {n}" for n in range(40)]
    table = [{"id": f"0{n}", "review": text, "note": 'a "b"\nc'} for n, text in enumerate(texts)]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    counts = predict_table(bundle, TableSource(tmp_path / "in.csv"), tmp_path / "out.csv")
    found = [dict(row.cells) for row in read_rows(tmp_path / "out.csv")]
    assert (counts.rows, counts.columns) == (40, ["label", "probability"])
    expected = labels_of(bundle, texts)
    for row, before, (label, probability) in zip(found, table, expected, strict=True):
        assert float(row.pop("probability")) == pytest.approx(probability, abs=1e-5)
        assert row == {**before, "label": label}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


@pytest.mark.parametrize("window", [3, 1024])
def test_each_format_holds_the_same(
    bundle: FineTunedBundle, tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written packed or not, and read again; JSON and Parquet keep numbers and missing values."""
    monkeypatch.setattr(module, "_WINDOW", window)
    table = [
        {"review": text, "n": n, "maybe": None if n < 4 else [n]} for n, text in enumerate(TEXT)
    ]
    (tmp_path / "in.json").write_text(json.dumps(table))
    names = ["o.csv.gz", "o.tsv.xz", "o.jsonl.zst", "o.json.bz2", "o.parquet"]
    for name in names:
        predict_table(bundle, TableSource(tmp_path / "in.json"), tmp_path / name)
    tables = [[dict(row.cells) for row in read_rows(tmp_path / name)] for name in names]
    assert tables[2] == tables[3] == tables[4]
    assert [{key: row[key] for key in ("review", "n", "maybe")} for row in tables[2]] == table
    assert tables[0] == tables[1]
    assert tables[0][4]["maybe"] == "[4]"
    for text_row, row in zip(tables[0], tables[2], strict=True):
        assert (text_row["label"], float(text_row["probability"])) == (
            row["label"],
            row["probability"],
        )


def test_names_never_collide(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """A column of that name stays, and the new one is called otherwise, which is noted."""
    (tmp_path / "in.csv").write_text("review,label,predicted_label\niron,x,y\n")
    counts = predict_table(bundle, TableSource(tmp_path / "in.csv"), tmp_path / "out.csv")
    assert counts.columns == ["predicted_label_2", "probability"]
    assert "the column 'label' exists already; adding 'predicted_label_2'" in counts.notes[0]
    # A key that only the last row has.
    (tmp_path / "in.jsonl").write_text('{"review": "a"}\n{"review": "b", "label": 1}\n')
    counts = predict_table(bundle, TableSource(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    assert counts.columns == ["predicted_label", "probability"]


def test_the_form_of_a_table_is_kept(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """Delimiter, line ends, encoding and mark of CSV; the types of Parquet."""
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes("글;review\r\n좋다;iron\r\n".encode("cp949"))
    predict_table(bundle, TableSource(source, encoding="cp949"), out)
    lines = out.read_bytes().decode("cp949").split("\r\n")
    assert lines[0] == "글;review;label;probability"
    assert lines[1].startswith("좋다;iron;")
    source.write_bytes(b"\xef\xbb\xbfreview\niron\n")
    predict_table(bundle, TableSource(source), tmp_path / "mark.csv")
    assert (tmp_path / "mark.csv").read_bytes().startswith(b"\xef\xbb\xbfreview,label")
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


def test_without_a_header_columns_are_numbers(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """And the output has none, either."""
    (tmp_path / "in.tsv").write_text('1\tiron "\n2\twater\n')
    source = TableSource(tmp_path / "in.tsv", header=False)
    predict_table(bundle, source, tmp_path / "out.tsv", columns={"text": "1"})
    lines = (tmp_path / "out.tsv").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith('1\tiron "\t')
    assert len(lines[0].split("\t")) == 4


def test_bad_rows_stay_without_a_prediction(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """With skip_bad; a row that cannot be read is left out. Without it nothing is written."""
    (tmp_path / "in.csv").write_text("id,review\n1,iron\n2, \n3,a,b\n4,water\n")
    source, out = TableSource(tmp_path / "in.csv"), tmp_path / "out.csv"
    with pytest.raises(TaskError, match=r"in\.csv, line 3: an empty text .*--skip-bad"):
        predict_table(bundle, source, out)
    assert not out.exists()
    counts = predict_table(bundle, source, out, skip_bad=True)
    assert (counts.rows, counts.without_prediction, counts.unreadable) == (3, 1, 1)
    assert counts.first_problem.endswith("line 3: an empty text in column 'review'")
    found = [dict(row.cells) for row in read_rows(out)]
    assert [row["id"] for row in found] == ["1", "2", "4"]
    assert (found[1]["label"], found[1]["probability"]) == ("", "")
    alone = labels_of(bundle, ["iron", "water"])
    assert [row["label"] for row in (found[0], found[2])] == [label for label, _ in alone]


def test_what_cannot_be_meant_is_refused(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """A column that is not there, a file that is, a name of no format, a pair for single texts."""
    (tmp_path / "in.csv").write_text("id,words\n1,iron\n")
    source = TableSource(tmp_path / "in.csv")
    mistakes: list[tuple[str, dict[str, str], str]] = [
        ("out.csv", {}, r"reads the column 'review' \(as in .*'id', 'words'; name it with --text"),
        ("in.csv", {"text": "words"}, "this file exists already"),
        ("out.txt", {"text": "words"}, r"out\.txt: expected a name that ends in \.csv"),
        ("no/out.csv", {"text": "words"}, "there is no folder"),
        ("out.csv", {"text": "words", "pair": "id"}, "was fine-tuned on single texts"),
        ("out.csv", {"text": "words", "endings": "id"}, "task.endings: not used by classify"),
    ]
    for name, columns, message in mistakes:
        with pytest.raises(BertsmithError, match=message):
            predict_table(bundle, source, tmp_path / name, columns=columns)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_cells_that_a_format_cannot_hold(bundle: FineTunedBundle, tmp_path: Path) -> None:
    """A tab in TSV, a character that an encoding lacks, two types in a column of Parquet."""
    (tmp_path / "a.csv").write_text('review,x\niron,"a\tb"\n')
    with pytest.raises(InputError, match="TSV cannot hold a tab"):
        predict_table(bundle, TableSource(tmp_path / "a.csv"), tmp_path / "out.tsv")
    (tmp_path / "b.jsonl").write_text('{"review": "iron", "x": "é"}\n{"review": "a", "x": [1]}\n')
    source = TableSource(tmp_path / "b.jsonl", encoding="utf-8")
    with pytest.raises(InputError, match=r"Parquet cannot hold the column 'x'.*\.jsonl"):
        predict_table(bundle, source, tmp_path / "out.parquet")
    (tmp_path / "c.csv").write_bytes("review\ncafé\n".encode("latin-1"))
    labels = ("좋다", "나쁘다")
    folder = tmp_path / "korean"
    korean = trained(folder, bundle.tokenizer, "single", labels, text="review")
    with pytest.raises(InputError, match=r"latin-1 has no character '.'; write a table"):
        predict_table(
            korean, TableSource(tmp_path / "c.csv", encoding="latin-1"), tmp_path / "o.csv"
        )
    assert not list(tmp_path.glob("o*"))
    assert not list(tmp_path.glob(".o*"))


def test_a_stream_is_a_table(bundle: FineTunedBundle) -> None:
    """Text goes to a function; keys that come only later are refused."""
    written: list[str] = []
    stream = io.BytesIO(gzip.compress(b'{"review": "iron"}\n{"review": "water"}\n'))
    source = TableSource(Path("standard input"), "jsonl", stream=stream)
    predict_table(bundle, source, written.append)
    found = [json.loads(line) for line in "".join(written).splitlines()]
    assert [row["label"] for row in found] == [
        one for one, _ in labels_of(bundle, ["iron", "water"])
    ]
    many = b'{"review": "a"}\n' * 1024 + b'{"review": "a", "late": 1}\n'
    source = TableSource(Path("standard input"), "jsonl", stream=io.BytesIO(many))
    with pytest.raises(TaskError, match="line 1,025: the key 'late' does not occur in the first"):
        predict_table(bundle, source, written.append)


@pytest.mark.parametrize(
    ("kind", "task", "table", "columns"),
    [
        ("multi", {"text": "a"}, {"a": "iron"}, {"labels": str, "probabilities": str}),
        ("regression", {"text": "a", "pair": "b"}, {"a": "iron", "b": "c"}, {"score": float}),
        ("span", {}, {"question": "Who?", "context": TEXT[0]}, {"answer": str, "answer_start": int,
                                                                "probability": float}),
        ("choice", {"text": "a", "endings": ["b", "c"]}, {"a": "x", "b": "iron", "c": "water"},
         {"choice": int, "ending": str, "probability": float}),
        ("entities", {"text": "a"}, {"a": TEXT[1]}, {"entities": json.loads}),
        ("tags", {"text": "a"}, {"a": TEXT[1]}, {"tags": json.loads}),
    ],
)  # fmt: skip
def test_every_kind_of_model_has_its_columns(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind, task: Any, table: Any, columns: Any
) -> None:
    """In CSV several labels share a cell, and entities are JSON; JSON lines hold lists."""
    labels: dict[str, tuple[str, ...]] = {
        "multi": LABELS, "entities": ("O", "B-X", "I-X"), "tags": ("N", "V"),
    }  # fmt: skip
    bundle = trained(tmp_path, tokenizer, kind, labels.get(kind, ()), **task)
    (tmp_path / "in.jsonl").write_text(json.dumps(table) + "\n")
    source = TableSource(tmp_path / "in.jsonl")
    counts = predict_table(bundle, source, tmp_path / "out.csv")
    assert counts.columns == list(columns)
    (row,) = read_rows(tmp_path / "out.csv")
    values = {name: read(row.cells[name]) for name, read in columns.items()}
    if kind == "choice":
        assert values["ending"] == ("iron", "water")[values["choice"]]
    if kind == "span":
        assert TEXT[0].startswith(values["answer"], values["answer_start"])
    if kind == "tags":
        assert " ".join(span["text"] for span in values["tags"]).startswith("Every hammer")
    predict_table(bundle, source, tmp_path / "out.jsonl")
    (written,) = read_rows(tmp_path / "out.jsonl")
    if kind == "multi":
        assert values["labels"].split("|") == (written.cells["labels"] or [""])


def test_questions_come_from_squad(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its JSON is a table of id, question and context."""
    bundle = trained(tmp_path, tokenizer, "span", ())
    asked: list[dict[str, Any]]
    asked = [{"id": name, "question": "Who?", "answers": []} for name in ("q1", "q2")]
    data = {"data": [{"title": "t", "paragraphs": [{"context": TEXT[0], "qas": asked}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(data))
    predict_table(bundle, TableSource(tmp_path / "squad.json"), tmp_path / "out.jsonl")
    found = [dict(row.cells) for row in read_rows(tmp_path / "out.jsonl")]
    assert [row["id"] for row in found] == ["q1", "q2"]
    assert list(found[0]) == ["id", "question", "context", "answer", "answer_start", "probability"]
