"""Tables of every kind, and what is said of broken ones."""

import json
from pathlib import Path

import pytest

from bertsmith.errors import TaskError
from bertsmith.tasks.tables import rows


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
        found = list(rows(tmp_path / f"a.{kind}"))
        assert [dict(row.cells) for row in found] == wanted, kind
    assert [row.where for row in rows(tmp_path / "a.tsv")] == [
        f"{tmp_path / 'a.tsv'}, line 2",
        f"{tmp_path / 'a.tsv'}, line 4",
    ]


def test_a_quotation_mark_in_tsv_is_a_character(tmp_path: Path) -> None:
    """As in GLUE's files, where quotation marks do not come in pairs."""
    (tmp_path / "a.tsv").write_text('x\ty\n" one\ttwo\n')
    assert [dict(row.cells) for row in rows(tmp_path / "a.tsv")] == [{"x": '" one', "y": "two"}]


def test_without_header_columns_are_numbers(tmp_path: Path) -> None:
    """The first line is a row like any other."""
    (tmp_path / "a.tsv").write_text("p\tq\nr\ts\n")
    found = [dict(row.cells) for row in rows(tmp_path / "a.tsv", header=False)]
    assert found == [{"0": "p", "1": "q"}, {"0": "r", "1": "s"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,x\n1,2\n", r"line 1: the column 'x' stands there twice"),
        ("a.csv", b"x\n\xff\n", r"a\.csv, line 2: not UTF-8, but the byte 0xff; expected UTF-8"),
        # Beyond the first chunk that is read, after characters of several bytes.
        (
            "a.jsonl",
            '{"x": "ä"}\n'.encode() * 5000 + b'{"x": "caf\xe9"}\n{}\n',
            r"a\.jsonl, line 5,001: not UTF-8, but the byte 0xe9",
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
        list(rows(tmp_path / name))


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
    first, second = rows(tmp_path / name)
    assert not first.fault
    assert (second.where, second.fault) == (f"{tmp_path / name}, line {place}", fault)


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
        list(rows(tmp_path / "a.csv"))


@pytest.mark.parametrize("last", [False, True])
def test_a_quotation_mark_amid_a_line_costs_that_row(tmp_path: Path, *, last: bool) -> None:
    """The rows around it are read; one that is never closed costs a row only in the last line."""
    lines = ["a,one", 'b,"two' if last else 'b,"two" more', "c,three"]
    lines = lines[:2] if last else lines
    (tmp_path / "a.csv").write_text("\n".join(["label,text", *lines, ""]))
    found = list(rows(tmp_path / "a.csv"))
    assert [row.where for row in found if row.fault] == [f"{tmp_path / 'a.csv'}, line 3"]
    assert "a quotation mark that does not end its cell" in found[1].fault
    assert [row.cells["label"] for row in found if not row.fault] == (["a"] if last else ["a", "c"])


def test_parquet_that_would_lose_something_is_told(tmp_path: Path) -> None:
    """Two columns of one name; a time that Python cannot hold."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table([["a"], ["b"]], names=["label", "label"]), file)
    with pytest.raises(TaskError, match=r"the column 'label' stands there twice"):
        list(rows(file))
    far = pa.array([0, 10**15], pa.timestamp("s"))
    parquet.write_table(pa.table([["a", "b"], far], names=["text", "when"]), file)
    with pytest.raises(TaskError, match=r"rows 1 to 2: a value in the column 'when' cannot be"):
        list(rows(file))
