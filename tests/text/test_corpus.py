"""Every form of text is read the same, and every fault is named or counted.

These tests never judge what is done with the documents.
"""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bertsmith.errors import CorpusError, SettingsError
from bertsmith.text.corpus import CorpusOptions, CorpusReport, find_sources, read_documents
from bertsmith.text.markdown import markdown_to_text

TEXTS = ["Anna has a cat. It sleeps.\nThe cat is grey.", "Bert reads a book.\nIt is good."]
JSON_LINES = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS)
SENTENCES = "Anna has a cat.\nIt sleeps.\nThe cat is grey.\n\nBert reads a book.\nIt is good.\n"
WIKI = "".join(
    f'<doc id="{n}" url="x" title="Title &amp; {n}">\nTitle &amp; {n}\n\n{text}\n\n</doc>\n'
    for n, text in enumerate(TEXTS)
)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def texts_of(
    *arguments: str | Path, report: CorpusReport | None = None, **options: Any
) -> list[str]:
    """Return the texts of a corpus."""
    found = find_sources([str(argument) for argument in arguments])
    return [document.text for document in read_documents(found, CorpusOptions(**options), report)]


def written(path: Path, content: str | bytes) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "wiki_00", "b.dat"])
def test_a_packed_file_reads_as_the_plain_one(tmp_path: Path, name: str, suffix: str) -> None:
    """JSON lines and WikiExtractor output give the same texts plain and packed, named or not."""
    content = WIKI if name == "wiki_00" else JSON_LINES
    path = written(tmp_path / (name + suffix), PACKERS[suffix](content.encode()))
    assert texts_of(path) == TEXTS


def test_packed_parts_one_after_another_are_one_text(tmp_path: Path) -> None:
    """Archives joined by ``cat`` give the texts of all of them."""
    for suffix, packer in PACKERS.items():
        path = written(tmp_path / f"a.jsonl{suffix}", packer(JSON_LINES.encode()) * 2)
        assert texts_of(path) == TEXTS * 2, suffix


def test_the_originals_form_is_told_by_its_content(tmp_path: Path) -> None:
    """A sentence a line with blank lines between documents is read as such, without being told."""
    report = CorpusReport()
    found = find_sources([str(written(tmp_path / "a.txt", SENTENCES))])
    documents = list(read_documents(found, CorpusOptions(), report))
    assert [document.text.split("\n")[0] for document in documents] == [
        "Anna has a cat.",
        "Bert reads a book.",
    ]
    assert all(document.presplit for document in documents)
    assert report.formats == {"sentences": 1}
    assert [document.number for document in documents] == [0, 1]


def test_prose_is_one_document_whose_paragraphs_are_unwrapped(tmp_path: Path) -> None:
    """Lines wrapped at a fixed width become a line a paragraph; a file is a document."""
    paragraph = (
        "It was the best of times and it was the worst of times, as the book\n"
        "begins which everybody has begun to read and which so few of them have\n"
        "finished, though it is by no means the longest one of its kind. Then\n"
        "the second sentence of this paragraph comes to its end here.\n"
    )
    path = written(tmp_path / "book.txt", f"CHAPTER ONE\n\n{paragraph}\n{paragraph}")
    (text,) = texts_of(path)
    line = " ".join(paragraph.split("\n")).strip()
    assert text == f"CHAPTER ONE\n{line}\n{line}"


def test_a_long_prose_file_is_cut_between_paragraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of prose larger than the bound becomes several documents; no paragraph is cut."""
    monkeypatch.setattr("bertsmith.text.readers.MAX_DOCUMENT_CHARACTERS", 1000)
    line = "One line holds one paragraph. It has two sentences."
    path = written(tmp_path / "a.txt", f"{line}\n\n" * 100)
    texts = texts_of(path, format="prose")
    assert len(texts) > 3
    assert [one for text in texts for one in text.split("\n") if one] == [line] * 100


def test_markdown_loses_its_marks(tmp_path: Path) -> None:
    """Marks, code, tables and link targets go; headings, items and prose stay, a line each."""
    content = (
        "---\ntitle: x\n---\n# The _Title_\n\n"
        "Some **bold** text _was _here with a [link](http://x.y) and\n"
        "`code` in a wrapped line, snake_case kept.\n\n```python\nx = 1\n```\n\n* one item\n"
        "* [ ] another item\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> A quote &amp; its end.\n"
        "<!-- not\nthis -->\n***\n    indented()\n![picture](p.png)\n\n1. first \\* thing\n"
    )
    (text,) = texts_of(written(tmp_path / "a.md", content))
    assert text.split("\n") == [
        "The Title",
        "Some bold text was here with a link and code in a wrapped line, snake_case kept.",
        "one item",
        "another item",
        "A quote & its end.",
        "first * thing",
    ]


@pytest.mark.parametrize("mark", ["[", "![", "[x](", "<http://", "\n<!--", "# a" + " " * 30])
def test_unclosed_marks_take_linear_time(mark: str) -> None:
    """Many marks that never close took minutes; the bound of CPU time is generous."""
    began = time.process_time()
    assert markdown_to_text(mark * 100_000)
    assert markdown_to_text("#" + " " * 100_000 + "x") == "x"
    assert time.process_time() - began < 30


def test_long_targets_and_titles() -> None:
    """Images as data are left out however long they are; headings lose their closing marks."""
    image = f"![a plot](data:image/png;base64,{'iVBOR' * 2000})"
    assert markdown_to_text(f"Before {image} and [after]({'u' * 5000}).") == "Before  and after."
    assert markdown_to_text("## Title ##\n# C #\n# a#b") == "Title\nC\na#b"
    assert markdown_to_text("a <!-- one --> b <!-- two\n--> c <!-- open") == "a  b  c <!-- open"


def test_text_after_many_blank_lines(tmp_path: Path) -> None:
    """A file that begins with blanks, more of them than are looked at first, is read."""
    path = written(tmp_path / "late.txt", "\n" * 200_000 + "The text begins late.\n")
    assert texts_of(path) == ["The text begins late."]


def test_the_layout_inside_json_lines_can_be_named(tmp_path: Path) -> None:
    """``markdown`` and ``sentences`` speak of the text in the field of a JSON-lines file."""
    path = written(tmp_path / "a.jsonl", json.dumps({"body": "## A **b**\n\nc d"}) + "\n")
    assert texts_of(path, format="markdown", field="body") == ["A b\nc d"]
    found = find_sources([str(path)])
    (document,) = read_documents(found, CorpusOptions(format="sentences", field="body"))
    assert document.presplit


def test_parquet_reads_as_json_lines_do(tmp_path: Path) -> None:
    """A Parquet column gives the same documents; an empty row is counted and left out."""
    arrow = pytest.importorskip("pyarrow", reason="the extra bertsmith[parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": [*TEXTS, None, ""], "n": [1, 2, 3, 4]}), path)
    report = CorpusReport()
    assert texts_of(path, report=report) == TEXTS
    assert report.empty_documents == 2
    with pytest.raises(CorpusError, match=r"no column 'body'; its columns are 'text', 'n'"):
        texts_of(path, field="body")
    with pytest.raises(CorpusError, match="column 'n' holds int64, not text"):
        texts_of(path, field="n")
    written(path, path.read_bytes()[:300])
    with pytest.raises(CorpusError, match="not a whole Parquet file"):
        texts_of(path)


def test_a_byte_order_mark_and_windows_line_ends_leave_no_trace(tmp_path: Path) -> None:
    """UTF-8 as some editors write it reads as any other."""
    path = written(tmp_path / "a.txt", b"\xef\xbb\xbf" + SENTENCES.replace("\n", "\r\n").encode())
    assert texts_of(path) == texts_of(written(tmp_path / "b.txt", SENTENCES))


def test_a_folder_is_walked_in_order_and_what_is_no_text_is_told(tmp_path: Path) -> None:
    """A folder gives its text files sorted, passes hidden ones over and names the others."""
    for name in ("b.jsonl", "AA/wiki_01", "AA/wiki_00", ".hidden.jsonl", "picture.png", "a.md.gz"):
        written(tmp_path / name, b"x")
    ignored: list[str] = []
    names = [source.name for source in find_sources([str(tmp_path)], ignored)]
    assert [str(Path(name).relative_to(tmp_path)) for name in names] == [
        "a.md.gz",
        "b.jsonl",
        "AA/wiki_00",
        "AA/wiki_01",
    ]
    assert ignored == [str(tmp_path / "picture.png")]
    assert [source.name for source in find_sources([str(tmp_path / "**" / "wiki_*")])] == names[2:]


@pytest.mark.parametrize("missing", ["nowhere.txt", "*.nothing", "empty"])
def test_arguments_that_give_nothing_are_errors(tmp_path: Path, missing: str) -> None:
    """A path, pattern or folder without text is an error that names it."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=missing.replace("*", r"\*")):
        find_sources([str(tmp_path / missing)])


def test_standard_input_is_read_whatever_packs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dash reads standard input, tells its packing, and cannot be named twice."""
    packed = io.BytesIO(gzip.compress(JSON_LINES.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(packed)))
    (source,) = find_sources(["-"])
    assert source.is_stream
    assert source.fingerprint() == ""
    assert [document.text for document in read_documents([source])] == TEXTS
    with pytest.raises(CorpusError, match="named twice"):
        find_sources(["-", "-"])


FAULTS: list[tuple[str, bytes, str]] = [
    ("a.txt", b"", "an empty file"),
    ("a.txt", b" \n\n", "blanks only"),
    ("a.txt", b"caf\xe9 here.\n", r"line 1, byte 3: not UTF-8 \(byte 0xe9\)"),
    ("a.txt", "a".encode("utf-16"), "UTF-16"),
    ("a.txt", b"ELF\x00\x01", "a binary file"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b\n', r"line 2, byte 14: broken JSON"),
    ("a.jsonl", b'{"body": "a"}\n', r"no field 'text'.*its fields are 'body'.*--field"),
    ("a.jsonl", b"[1, 2]\n", "a JSON list where an object was expected"),
    ("a.jsonl", b'{"text": 7}\n', "holds int, not text"),
    ("a.jsonl", b'{"text": "\xff"}\n', r"byte 10: not UTF-8"),
    ("wiki_00", b'<doc id="1" title="t">\nt\n\nx.\n', "no </doc>"),
    ("wiki_00", WIKI.encode() + b"loose\n", "outside of <doc"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(b"x", mtime=0), mtime=0), "packed twice"),
]


@pytest.mark.parametrize(("name", "content", "message"), FAULTS)
def test_a_fault_is_an_error_with_its_place_or_a_counted_skip(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Each fault stops with its file and place, or is counted and named; it is never silent."""
    path = written(tmp_path / name, content)
    with pytest.raises(CorpusError, match=message) as caught:
        texts_of(path)
    assert str(path) in str(caught.value)
    report = CorpusReport()
    texts_of(path, report=report, on_error="skip")
    assert sum(report.skipped.values()) == 1
    assert str(path) in report.examples[0]


@pytest.mark.parametrize("suffix", [suffix for suffix in PACKERS if suffix])
def test_a_cut_off_archive_is_told_and_its_beginning_kept(tmp_path: Path, suffix: str) -> None:
    """A cut-off archive of any kind stops with an error; skipped, it gives what came before."""
    lines = "".join(json.dumps({"text": f"Number {n} of all. " * 9}) + "\n" for n in range(20000))
    # bzip2 unpacks 900 kB at once, so the text must be larger for a part of it to be whole.
    content = PACKERS[suffix](lines.encode())
    path = written(tmp_path / f"a.jsonl{suffix}", content[: len(content) * 3 // 4])
    with pytest.raises(CorpusError, match="cut off or damaged"):
        texts_of(path)
    report = CorpusReport()
    texts = texts_of(path, report=report, on_error="skip")
    assert report.skipped == {"the archive is cut off or damaged": 1}
    assert 1000 < len(texts) < 20000
    assert texts[500].startswith("Number 500 ")


def test_a_bad_line_does_not_take_the_good_ones_with_it(tmp_path: Path) -> None:
    """Skipping leaves out the broken line alone."""
    path = written(tmp_path / "a.jsonl", JSON_LINES + "{broken\n" + JSON_LINES)
    assert texts_of(path, on_error="skip") == TEXTS * 2


def test_repeated_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    """An exact repetition in another file is left out when asked for, and only then."""
    one = written(tmp_path / "a.jsonl", JSON_LINES)
    two = written(tmp_path / "b.jsonl", JSON_LINES)
    report = CorpusReport()
    assert texts_of(one, two, report=report, deduplicate="documents") == TEXTS
    assert report.repeated_documents == 2
    assert texts_of(one, two) == TEXTS * 2


def test_repeated_paragraphs_are_left_out_and_counted(tmp_path: Path) -> None:
    """A paragraph that stood in an earlier document is left out; a document of such vanishes."""
    texts = ["Same.\nOne.", "Same.\nTwo.", "Two.\nSame."]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    report = CorpusReport()
    path = written(tmp_path / "a.jsonl", lines)
    assert texts_of(path, report=report, deduplicate="paragraphs") == ["Same.\nOne.", "Two."]
    assert report.repeated_paragraphs == 3
    assert report.documents == 2


def test_reports_of_workers_add_up() -> None:
    """Counts, reasons and examples of two reports are joined, the examples up to a bound."""
    one, two = (
        CorpusReport(documents=1, characters=5),
        CorpusReport(documents=2, formats={"jsonl": 1}),
    )
    for number in range(30):
        two.count_skipped("broken JSON", f"place {number}")
    one.add(two)
    one.add(two)
    assert (one.documents, one.characters, one.formats) == (5, 5, {"jsonl": 2})
    assert one.skipped == {"broken JSON": 60}
    assert len(one.examples) == 20


def test_a_corpus_without_documents_is_told(tmp_path: Path) -> None:
    """When nothing was read, the report says so and why."""
    report = CorpusReport()
    path = written(tmp_path / "a.jsonl", '{"text": ""}\n')
    assert texts_of(path, report=report) == []
    with pytest.raises(CorpusError, match="1 documents without text"):
        report.require_documents()


def test_sources_travel_to_other_processes_and_tell_a_change(tmp_path: Path) -> None:
    """A source can be pickled; its fingerprint changes with a single byte of equal length."""
    path = written(tmp_path / "a.txt", "abc")
    (source,) = find_sources([str(path)])
    assert pickle.loads(pickle.dumps(source)) == source
    before = source.fingerprint()
    written(path, "abd")
    assert find_sources([str(path)])[0].fingerprint() != before


def test_options_are_strict() -> None:
    """An unknown format is an error that lists the known ones."""
    with pytest.raises(SettingsError, match="'wikiextractor'"):
        CorpusOptions.parse({"format": "word"}, "options")


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Reading 30 MB in documents of half a megabyte never holds more than a few of them."""
    line = json.dumps({"text": "A line of text. " * 32_000}) + "\n"
    path = written(tmp_path / "a.jsonl.gz", gzip.compress(line.encode() * 60, 1))
    found = find_sources([str(path)])
    tracemalloc.start()
    count = sum(1 for _ in read_documents(found, CorpusOptions(deduplicate="both")))
    assert count == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000
