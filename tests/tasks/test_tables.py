"""Tables of every kind, and what is said of broken ones."""

import gzip
import io
import json
import lzma
from pathlib import Path

import pytest

from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import json_rows
from bertsmith.tasks.json_rows import read_json
from bertsmith.tasks.tables import Row, TableSource, get_cell, open_table, read_rows


def test_every_kind_gives_the_same_cells(tmp_path: Path) -> None:
    """CSV with quotes and a line break, TSV, JSON lines and Parquet hold the same two rows."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = [{"text": "a, b", "label": "1"}, {"text": "c 'd'", "label": "0"}]
    (tmp_path / "a.csv").write_text("text,label\n\"a, b\",1\nc 'd',0\n")
    (tmp_path / "a.tsv").write_text("﻿text\tlabel\na, b\t1\n\nc 'd'\t0\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in wanted))
    parquet.write_table(pa.Table.from_pylist(wanted), tmp_path / "a.parquet")
    for kind in ("csv", "tsv", "jsonl", "parquet"):
        found = list(read_rows(tmp_path / f"a.{kind}"))
        assert [dict(row.cells) for row in found] == wanted, kind
    assert [row.location for row in read_rows(tmp_path / "a.tsv")] == [
        f"{tmp_path / 'a.tsv'}, line 2",
        f"{tmp_path / 'a.tsv'}, line 4",
    ]


def test_a_quotation_mark_in_tsv_is_a_character(tmp_path: Path) -> None:
    """As in GLUE's files, where quotation marks do not come in pairs."""
    (tmp_path / "a.tsv").write_text('x\ty\n" one\ttwo\n')
    assert [dict(row.cells) for row in read_rows(tmp_path / "a.tsv")] == [
        {"x": '" one', "y": "two"}
    ]


def test_without_header_columns_are_numbers(tmp_path: Path) -> None:
    """The first line is a row like any other."""
    (tmp_path / "a.tsv").write_text("p\tq\nr\ts\n")
    found = [dict(row.cells) for row in read_rows(tmp_path / "a.tsv", header=False)]
    assert found == [{"0": "p", "1": "q"}, {"0": "r", "1": "s"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,x\n1,2\n", r"line 1: the column 'x' stands there twice"),
        ("a.csv", b"x\n\xff\n", r"a\.csv, line 2: not UTF-8: byte 0xff; .*cp949 .*latin-1"),
        # Beyond the first chunk that is read, after characters of several bytes.
        (
            "a.jsonl",
            '{"x": "ä"}\n'.encode() * 5000 + b'{"x": "caf\xe9"}\n{}\n',
            r"a\.jsonl, line 5,001: not UTF-8: byte 0xe9",
        ),
        ("a.xml", b"<x/>", r"unknown kind of table"),
        ("missing.csv", None, r"missing\.csv: no such file"),
    ],
)
def test_broken_tables_say_where(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    """File and line stand in the message."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
    [
        ("a.tsv", "x\ty\n1\t2\n3\n", 3, "1 columns where 2 are expected"),
        ("a.jsonl", '{"x": 1}\n{oops\n', 2, "a line that is not JSON"),
        ("a.jsonl", '{"x": 1}\n[1]\n', 2, "a line that is no JSON object"),
        ("a.jsonl", '{"x": 1}\n{"y": 1, "y": 2}\n', 2, "a key that stands twice in its object"),
        ("a.jsonl", '{"x": 1}\n' + "[" * 10**5 + "\n", 2, "a line that is not JSON"),
    ],
)
def test_a_broken_row_is_one_row(
    tmp_path: Path, name: str, content: str, place: int, fault: str
) -> None:
    """It has its place and its fault, and the rows before it are read."""
    (tmp_path / name).write_text(content)
    first, second = read_rows(tmp_path / name)
    assert not first.error
    assert (second.location, second.error) == (f"{tmp_path / name}, line {place}", fault)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('a,"one\nb,two', r"line 4: unexpected end of data"),
        ('a,"one\n"b" more,two', r"line 3: ',' expected"),
    ],
)
def test_a_quotation_mark_that_swallows_lines_is_told(tmp_path: Path, row: str, why: str) -> None:
    """How many rows are lost to it nobody knows; the one that it stands in is named."""
    (tmp_path / "a.csv").write_text(f"label,text\n{row}\nc,three\n")
    with pytest.raises(TaskError, match=rf"a\.csv, line 2: the row that begins .* \({why}"):
        list(read_rows(tmp_path / "a.csv"))


@pytest.mark.parametrize("last", [False, True])
def test_a_quotation_mark_amid_a_line_costs_that_row(tmp_path: Path, *, last: bool) -> None:
    """The rows around it are read; one that is never closed costs a row only in the last line."""
    lines = ["a,one", 'b,"two' if last else 'b,"two" more', "c,three"]
    lines = lines[:2] if last else lines
    (tmp_path / "a.csv").write_text("\n".join(["label,text", *lines, ""]))
    found = list(read_rows(tmp_path / "a.csv"))
    assert [row.location for row in found if row.error] == [f"{tmp_path / 'a.csv'}, line 3"]
    assert "a quotation mark that does not end its cell" in found[1].error
    assert [row.cells["label"] for row in found if not row.error] == (["a"] if last else ["a", "c"])


def test_parquet_that_would_lose_something_is_told(tmp_path: Path) -> None:
    """Two columns of one name; a time that Python cannot hold."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table([["a"], ["b"]], names=["label", "label"]), file)
    with pytest.raises(TaskError, match=r"the column 'label' stands there twice"):
        list(read_rows(file))
    far = pa.array([0, 10**15], pa.timestamp("s"))
    parquet.write_table(pa.table([["a", "b"], far], names=["text", "when"]), file)
    with pytest.raises(TaskError, match=r"rows 1 to 2: a value in the column 'when' cannot be"):
        list(read_rows(file))


ROWS = [{"text": "a, b", "label": "1"}, {"text": "c; d", "label": "0"}]


def test_packed_tables_are_read(tmp_path: Path) -> None:
    """The suffix before .gz or .xz tells the format; a cut-off archive is an error."""
    text = b'text,label\n"a, b",1\nc; d,0\n'
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(text))
    for name in ("a.csv.gz", "a.csv.xz"):
        assert [dict(row.cells) for row in read_rows(tmp_path / name)] == ROWS
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text * 900)[:-9])
    with pytest.raises(TaskError, match=r"a\.csv\.gz: a damaged or cut-off archive"):
        list(read_rows(tmp_path / "a.csv.gz"))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_json_array_is_read_in_pieces(indent: int | None, size: int) -> None:
    """Wherever the pieces end, the objects and their lines are the same."""
    values = [{"text": "x" * n, "n": n, "inner": [{"k": [1.5, None]}]} for n in range(20)]
    text = "\n " + json.dumps(values, indent=indent) + "\n"
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    found = list(read_json(pieces, Path("a.json")))
    assert [value for _, value, _ in found] == values
    assert [line for line, _, _ in found][:2] == ([2, 2] if indent is None else [3, 15])


def test_json_files_hold_an_array_or_lines(tmp_path: Path) -> None:
    """An empty array has no row; values that are no objects are bad rows; no end is an error."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    assert [dict(row.cells) for row in read_rows(path)] == ROWS
    path.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    assert [dict(row.cells) for row in read_rows(path)] == ROWS
    path.write_text("[ ]")
    assert list(read_rows(path)) == []
    path.write_text('[{"a": 1, "a": 2},\n 7]')
    assert [row.error for row in read_rows(path)] == [
        json_rows.DUPLICATE_KEY,
        "a value that is no JSON object",
    ]
    for text, message in (
        ('[{"a": 1}', "line 1: not JSON: the array has no end"),
        ('[{"a": 1}\n {"b": 2}]', "line 2: not JSON: '{' instead of a comma"),
        ('[{"a": 1}] x', "line 1: not JSON: text after the end"),
        ('{\n"data": []}', "line 1: expected an array of objects, or an object on each line"),
    ):
        path.write_text(text)
        with pytest.raises(TaskError, match=message):
            list(read_rows(path))


def test_a_key_of_an_object_is_a_column() -> None:
    """As in KLUE's files: labels.label; a column whose name has a dot is found first."""
    row = Row("f, line 1", {"labels": {"label": 3.5, "deep": {"x": "y"}}, "a.b": "c"})
    assert [get_cell(row, name) for name in ("labels.label", "labels.deep.x", "a.b")] == [
        3.5,
        "y",
        "c",
    ]
    with pytest.raises(TaskError, match=r"no column 'labels\.score'; the columns are 'labels'"):
        get_cell(row, "labels.score")


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("text;label\nHello, you;1\nall, of, us;0\n", ";"),
        ("text\tlabel\na, b\t1\n", "\t"),
        ("text|label\na, b|1\n", "|"),
        ("text,label\na; b,1\n", ","),
        ("text\na; b\nc\n", ","),
        ("text\nc\nd\n", ","),
    ],
)
def test_the_delimiter_is_detected(tmp_path: Path, content: str, delimiter: str) -> None:
    """Another one than a comma is noted, and only taken if it splits the rows evenly."""
    path, notes = tmp_path / "a.csv", list[str]()
    path.write_text(content)
    found = list(read_rows(path, notes=notes))
    assert list(found[0].cells) == content.split("\n", maxsplit=1)[0].split(delimiter)
    assert len(notes) == (delimiter != ",")
    with open_table(TableSource(path, delimiter="tab")) as table:
        assert table.dialect is not None
        assert table.dialect.delimiter == "\t"
    with pytest.raises(SettingsError, match="delimiter: expected one character, or tab, got ';;'"):
        list(read_rows(path, delimiter=";;"))


def test_a_damaged_first_line_does_not_decide_the_columns(tmp_path: Path) -> None:
    """Without a header the commonest number of cells does, and the damaged row is a bad one."""
    for name, lines in (
        ("a.tsv", "damaged\nred\t1\nblue\t0\n"),
        ("a.csv", '"x"y\nred,1\nblue,0\n'),
    ):
        (tmp_path / name).write_text(lines)
        first, *others = read_rows(tmp_path / name, header=False)
        assert first.error
        assert [dict(row.cells) for row in others] == [
            {"0": "red", "1": "1"},
            {"0": "blue", "1": "0"},
        ]


def test_other_encodings_are_read_if_they_are_named(tmp_path: Path) -> None:
    """The error for text that is not UTF-8 suggests Korean and Western European ones."""
    path = tmp_path / "a.csv"
    path.write_bytes("글,값\n좋다,1\n".encode("cp949"))
    with pytest.raises(TaskError, match=r"line 1: not UTF-8: .*cp949 \(Korean\) or latin-1"):
        list(read_rows(path))
    assert [dict(row.cells) for row in read_rows(path, encoding="cp949")] == [
        {"글": "좋다", "값": "1"}
    ]
    path.write_bytes("글\n좋다\n".encode("utf-16"))
    with pytest.raises(TaskError, match="not UTF-8 but UTF-16; give --encoding utf-16"):
        list(read_rows(path))
    assert [dict(row.cells) for row in read_rows(path, encoding="utf-16")] == [{"글": "좋다"}]
    with pytest.raises(TaskError, match=r"line 1: not ascii: byte 0x..; ascii is not its"):
        list(read_rows(path, encoding="ascii"))
    for name in ("utf-88", "base64"):
        with pytest.raises(SettingsError, match=f"encoding: '{name}' is unknown"):
            list(read_rows(path, encoding=name))


def test_a_table_comes_from_a_stream(tmp_path: Path) -> None:
    """Its format is named, since it has no suffix; Parquet, too."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    written = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), written)
    contents = {
        "csv": b'text,label\r\n"a, b",1\r\nc; d,0\r\n',
        "jsonl": b"".join(json.dumps(one).encode() + b"\n" for one in ROWS),
        "parquet": written.getvalue(),
    }
    for form, content in contents.items():
        source = TableSource(Path("standard input"), format=form, stream=io.BytesIO(content))
        with open_table(source) as table:
            assert [dict(row.cells) for row in table.rows] == ROWS, form
    source = TableSource(Path("standard input"), format="csv", stream=io.BytesIO(b"a\n\xff\n"))
    with (
        pytest.raises(TaskError, match="standard input, line 2: not UTF-8"),
        open_table(source) as table,
    ):
        list(table.rows)
