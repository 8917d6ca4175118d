"""Reading tables of all formats, and errors for damaged ones."""

import codecs
import gzip
import io
import json
import lzma
import time
from pathlib import Path

import pytest

from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import json_rows
from bertsmith.tasks.json_rows import read_json
from bertsmith.tasks.tables import Row, TableSource, get_cell, open_table, read_rows
from bertsmith.tasks.text_files import split_lines

ROWS = [{"text": "a, b", "label": "1"}, {"text": "c; d", "label": "0"}]


def test_all_formats_give_the_same_cells(tmp_path: Path) -> None:
    """CSV with quotes, TSV with a byte order mark, JSON lines and Parquet hold the same rows."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    expected = [{"text": "a, b", "label": "1"}, {"text": "c 'd'", "label": "0"}]
    (tmp_path / "a.csv").write_text("text,label\n\"a, b\",1\nc 'd',0\n")
    (tmp_path / "a.tsv").write_text("\ufefftext\tlabel\na, b\t1\n\nc 'd'\t0\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in expected))
    parquet.write_table(pyarrow.Table.from_pylist(expected), tmp_path / "a.parquet")
    for suffix in ("csv", "tsv", "jsonl", "parquet"):
        rows = list(read_rows(tmp_path / f"a.{suffix}"))
        assert [dict(row.cells) for row in rows] == expected, suffix
    assert [row.location for row in read_rows(tmp_path / "a.tsv")] == [
        f"{tmp_path / 'a.tsv'}, line 2",
        f"{tmp_path / 'a.tsv'}, line 4",
    ]


def test_empty_rows_at_the_end_are_not_part_of_the_table(tmp_path: Path) -> None:
    """Spreadsheets write lines without content below a table; empty rows within it are kept."""
    path = tmp_path / "table.csv"
    path.write_text("text;label\na;x\n;\nb;y\n;\n\n;\n")
    rows = [(row.location, list(row.cells.values())) for row in read_rows(path)]
    cells = [["a", "x"], ["", ""], ["b", "y"]]
    assert rows == [(f"{path}, line {number}", row) for number, row in enumerate(cells, 2)]
    path.write_text('text\n""\n')
    assert [row.cells for row in read_rows(path)] == [{"text": ""}]


def test_quotation_mark_in_tsv_is_an_ordinary_character(tmp_path: Path) -> None:
    """GLUE's files contain unpaired quotation marks."""
    (tmp_path / "a.tsv").write_text('x\ty\n" one\ttwo\n')
    rows = [dict(row.cells) for row in read_rows(tmp_path / "a.tsv")]
    assert rows == [{"x": '" one', "y": "two"}]


def test_columns_are_numbered_without_a_header(tmp_path: Path) -> None:
    """Without a header, the first line is an ordinary row."""
    (tmp_path / "a.tsv").write_text("p\tq\nr\ts\n")
    rows = [dict(row.cells) for row in read_rows(tmp_path / "a.tsv", has_header=False)]
    assert rows == [{"0": "p", "1": "q"}, {"0": "r", "1": "s"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,x\n1,2\n", r"line 1: duplicate column 'x'"),
        ("a.csv", b"x\n\xff\n", r"a\.csv, line 2: not UTF-8: byte 0xff; .*cp949 .*cp1252"),
        # The invalid byte is not in the first block that is read, and follows multibyte characters.
        (
            "a.jsonl",
            '{"x": "ä"}\n'.encode() * 5000 + b'{"x": "caf\xe9"}\n{}\n',
            r"a\.jsonl, line 5,001: not UTF-8: byte 0xe9",
        ),
        ("a.xml", b"<x/>", r"unknown table format"),
        ("missing.csv", None, r"missing\.csv: no such file"),
    ],
)
def test_unreadable_table_is_an_error_with_location(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    """The message names the file and, where possible, the line."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "line", "error"),
    [
        ("a.tsv", "x\ty\n1\t2\n3\n", 3, "1 column where 2 are expected"),
        ("a.jsonl", '{"x": 1}\n{oops\n', 2, "a line that is not JSON"),
        ("a.jsonl", '{"x": 1}\n[1]\n', 2, "a line that is not a JSON object"),
        ("a.jsonl", '{"x": 1}\n{"y": 1, "y": 2}\n', 2, "a duplicate key in an object"),
        ("a.jsonl", '{"x": 1}\n' + "[" * 10**5 + "\n", 2, "a line that is not JSON"),
    ],
)
def test_invalid_row_does_not_affect_other_rows(
    tmp_path: Path, name: str, content: str, line: int, error: str
) -> None:
    """An invalid row has a location and an error; the row before it is valid."""
    (tmp_path / name).write_text(content)
    first, second = read_rows(tmp_path / name)
    assert not first.error
    assert (second.location, second.error) == (f"{tmp_path / name}, line {line}", error)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('a,"one\nb,two', r"line 4: unexpected end of data"),
        ('a,"one\n"b" more,two', r"line 3: ',' expected"),
    ],
)
def test_quotation_mark_that_spans_lines_is_an_error(tmp_path: Path, row: str, reason: str) -> None:
    """The quoted text may contain any number of rows, so it is an error instead of skipped."""
    (tmp_path / "a.csv").write_text(f"label,text\n{row}\nc,three\n")
    with pytest.raises(TaskError, match=rf"a\.csv, line 2: the row that begins .* \({reason}"):
        list(read_rows(tmp_path / "a.csv"))


@pytest.mark.parametrize("is_last_line", [False, True])
def test_quotation_mark_within_a_line_invalidates_one_row(
    tmp_path: Path, *, is_last_line: bool
) -> None:
    """Other rows are read; an unclosed quotation mark is tolerated only in the last line."""
    lines = ["a,one", 'b,"two" more', "c,three"]
    if is_last_line:
        lines = ["a,one", 'b,"two']
    (tmp_path / "a.csv").write_text("\n".join(["label,text", *lines, ""]))
    rows = list(read_rows(tmp_path / "a.csv"))
    assert [row.location for row in rows if row.error] == [f"{tmp_path / 'a.csv'}, line 3"]
    assert "a quotation mark that does not end its cell" in rows[1].error
    labels = [row.cells["label"] for row in rows if not row.error]
    assert labels == (["a"] if is_last_line else ["a", "c"])


def test_parquet_that_python_cannot_represent_is_an_error(tmp_path: Path) -> None:
    """Duplicate columns, and timestamps outside the range of datetime, are rejected."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["label", "label"]), file)
    with pytest.raises(TaskError, match=r"duplicate column 'label'"):
        list(read_rows(file))
    timestamps = pyarrow.array([0, 10**15], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table([["a", "b"], timestamps], names=["text", "when"]), file)
    with pytest.raises(TaskError, match=r"rows 1 to 2: a value in the column 'when' cannot be"):
        list(read_rows(file))


def test_compressed_tables_are_read(tmp_path: Path) -> None:
    """The suffix before .gz or .xz determines the format; a truncated archive is an error."""
    text = b'text,label\n"a, b",1\nc; d,0\n'
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(text))
    for name in ("a.csv.gz", "a.csv.xz"):
        assert [dict(row.cells) for row in read_rows(tmp_path / name)] == ROWS
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text * 900)[:-9])
    with pytest.raises(TaskError, match=r"a\.csv\.gz: a damaged or truncated archive"):
        list(read_rows(tmp_path / "a.csv.gz"))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
def test_json_array_is_read_in_chunks(indent: int | None, chunk_size: int) -> None:
    """Objects and line numbers do not depend on where the text is split into chunks."""
    values = [
        {"text": "x" * length, "length": length, "nested": [{"key": [1.5, None]}]}
        for length in range(20)
    ]
    text = "\n " + json.dumps(values, indent=indent) + "\n"
    chunks = (text[start : start + chunk_size] for start in range(0, len(text), chunk_size))
    rows = list(read_json(chunks, Path("a.json")))
    assert [value for _, value, _ in rows] == values
    # With indentation, "[" is on line 2, and each object has 12 lines.
    assert [line for line, _, _ in rows][:2] == ([2, 2] if indent is None else [3, 15])


def test_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    """Values that are not objects are invalid rows; an array with a syntax error is an error."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    assert [dict(row.cells) for row in read_rows(path)] == ROWS
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [dict(row.cells) for row in read_rows(path)] == ROWS
    path.write_text("[ ]")
    assert list(read_rows(path)) == []
    path.write_text('[{"a": 1, "a": 2},\n 7]')
    errors = [row.error for row in read_rows(path)]
    assert errors == [json_rows.DUPLICATE_KEY, "a value that is not a JSON object"]
    for text, message in (
        ('[{"a": 1}', "line 1: not JSON: the array has no end"),
        ('[{"a": 1}\n {"b": 2}]', "line 2: not JSON: '{' instead of a comma"),
        ('[{"a": 1}] x', "line 1: not JSON: text after the end"),
        ('{\n"data": []}', "line 1: expected an array of objects, or an object on each line"),
    ):
        path.write_text(text)
        with pytest.raises(TaskError, match=message):
            list(read_rows(path))


def test_dot_selects_a_key_of_an_object(tmp_path: Path) -> None:
    """KLUE's files use "labels.label"; a column with a dot in its name takes precedence."""
    cells = {"labels": {"label": 3.5, "deep": {"x": "y"}}, "a.b": "c"}
    row = Row(f"{tmp_path}, line 1", cells)
    names = ("labels.label", "labels.deep.x", "a.b")
    assert [get_cell(row, name) for name in names] == [3.5, "y", "c"]
    with pytest.raises(TaskError, match=r"no column 'labels\.score'; the columns are 'labels'"):
        get_cell(row, "labels.score")


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("text;label\nHello, you;1\nall, of, us;0\n", ";"),
        ("text, or title;label\nHello, you;1\nhere;0\n", ";"),
        ("text,label;or\na,1\nb,c,0\n", ","),
        ("text\tlabel\na, b\t1\n", "\t"),
        ("text|label\na, b|1\n", "|"),
        ("text,label\na; b,1\n", ","),
        ("text\na; b\nc\n", ","),
        ("text\nc\nd\n", ","),
    ],
)
def test_delimiter_is_detected(tmp_path: Path, content: str, delimiter: str) -> None:
    """A delimiter that gives all rows the same number of cells is detected and reported."""
    path = tmp_path / "a.csv"
    path.write_text(content)
    notes: list[str] = []
    rows = list(read_rows(path, notes=notes))
    header = content.splitlines()[0]
    assert list(rows[0].cells) == header.split(delimiter)
    assert bool(notes) == (delimiter != ",")
    with open_table(TableSource(path, delimiter="tab")) as table:
        assert table.dialect is not None
        assert table.dialect.delimiter == "\t"
    with pytest.raises(SettingsError, match="delimiter: expected one character, or tab, got ';;'"):
        list(read_rows(path, delimiter=";;"))


def test_damaged_first_line_does_not_determine_the_columns(tmp_path: Path) -> None:
    """Without a header, most lines determine the number of columns; others are invalid."""
    for name, lines in (
        ("a.tsv", "damaged\nred\t1\nblue\t0\n"),
        ("a.csv", '"x"y\nred,1\nblue,0\n'),
    ):
        (tmp_path / name).write_text(lines)
        first, *others = read_rows(tmp_path / name, has_header=False)
        assert first.error
        assert [dict(row.cells) for row in others] == [
            {"0": "red", "1": "1"},
            {"0": "blue", "1": "0"},
        ]


def test_encoding_can_be_set(tmp_path: Path) -> None:
    """The error for text that is not UTF-8 suggests encodings; unknown encodings are rejected."""
    path = tmp_path / "a.csv"
    path.write_bytes("글,값\n좋다,1\n".encode("cp949"))
    with pytest.raises(TaskError, match=r"line 1: not UTF-8: .*cp949 \(Korean\) or cp1252"):
        list(read_rows(path))
    rows = [dict(row.cells) for row in read_rows(path, encoding="cp949")]
    assert rows == [{"글": "좋다", "값": "1"}]
    path.write_bytes("글\n좋다\n".encode("utf-16"))
    with pytest.raises(TaskError, match="not UTF-8 but UTF-16; give --encoding utf-16"):
        list(read_rows(path))
    rows = [dict(row.cells) for row in read_rows(path, encoding="utf-16")]
    assert rows == [{"글": "좋다"}]
    path.write_bytes(b"a,b\n1,2\n")
    with pytest.raises(TaskError, match="not utf-16: UTF-16 stream does not start with BOM; give"):
        list(read_rows(path, encoding="utf-16"))
    path.write_bytes(codecs.BOM_UTF16_LE + "글\n좋다\n".encode("utf-16-le"))
    rows = [dict(row.cells) for row in read_rows(path, encoding="utf-16-le")]
    assert rows == [{"글": "좋다"}]
    with pytest.raises(TaskError, match=r"line 1: not ascii: byte 0x..; ascii is not its"):
        list(read_rows(path, encoding="ascii"))
    for name in ("utf-88", "base64"):
        with pytest.raises(SettingsError, match=f"encoding: '{name}' is unknown"):
            list(read_rows(path, encoding=name))


def test_lines_do_not_depend_on_the_chunks() -> None:
    """Lines end with a line feed, a carriage return or both, also at the end of a chunk."""
    text = "a\rb\r\nc\n\n\r\r\nd\r"
    lines = ["a\r", "b\r\n", "c\n", "\n", "\r", "\r\n", "d\r"]
    for size in range(1, len(text) + 1):
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(split_lines(["", *chunks, ""])) == lines
    assert list(split_lines([text, "e"])) == [*lines, "e"]


def test_long_line_is_split_in_linear_time() -> None:
    """A line of 32 million characters in 32 chunks takes seconds, not hours."""
    start = time.perf_counter()
    assert list(split_lines(["x" * 2**20] * 32)) == ["x" * 2**25]
    assert time.perf_counter() - start < 30


def test_table_is_read_from_a_stream() -> None:
    """A stream has no suffix, so its format is set; CSV, JSON lines and Parquet are supported."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), buffer)
    contents = {
        "csv": b'text,label\r\n"a, b",1\r\nc; d,0\r\n',
        "jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
        "parquet": buffer.getvalue(),
    }
    path = Path("standard input")
    for table_format, content in contents.items():
        source = TableSource(path, format=table_format, stream=io.BytesIO(content))
        with open_table(source) as table:
            assert [dict(row.cells) for row in table.rows] == ROWS, table_format
    source = TableSource(path, format="csv", stream=io.BytesIO(b"a\n\xff\n"))
    with (
        pytest.raises(TaskError, match="standard input, line 2: not UTF-8"),
        open_table(source) as table,
    ):
        list(table.rows)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_errors_of_the_caller_are_not_read_errors(tmp_path: Path, suffix: str) -> None:
    """An OSError that is raised while a table is open, such as EPIPE, is not changed."""
    path = tmp_path / f"a.{suffix}"
    path.write_text({"csv": "a\n1\n", "jsonl": '{"a": 1}\n', "json": '[{"a": 1}]'}[suffix])
    with pytest.raises(BrokenPipeError), open_table(TableSource(path)):
        raise BrokenPipeError


def test_error_while_reading_names_the_file(tmp_path: Path) -> None:
    """A read that fails after the file was opened is reported with the name of the file."""

    class _FailingStream(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, _buffer: object) -> int:
            raise OSError(5, "Input/output error")

    source = TableSource(tmp_path / "a.csv", stream=io.BufferedReader(_FailingStream()))
    message = r"a\.csv: cannot be read: Input/output error"
    with pytest.raises(TaskError, match=message), open_table(source) as table:
        list(table.rows)
