"""Reading a corpus: all formats and compressions, errors, deduplication and memory."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bertsmith.errors import CorpusError, SettingsError
from bertsmith.text.corpus import (
    MAX_EXAMPLES,
    CorpusOptions,
    CorpusReport,
    find_sources,
    read_documents,
)

TEXTS = ["Anna has a cat. It sleeps.\nThe cat is grey.", "Bert reads a book.\nIt is good."]
JSON_LINES = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS)
SENTENCES = "Anna has a cat.\nIt sleeps.\nThe cat is grey.\n\nBert reads a book.\nIt is good.\n"
WIKI = "".join(
    f'<doc id="{index}" url="x" title="Title &amp; {index}">\n'
    f"Title &amp; {index}\n\n{text}\n\n</doc>\n"
    for index, text in enumerate(TEXTS)
)
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read_texts(
    *arguments: str | Path, report: CorpusReport | None = None, **options: Any
) -> list[str]:
    """Return the texts of a corpus."""
    sources = find_sources([str(argument) for argument in arguments])
    documents = read_documents(sources, CorpusOptions(**options), report)
    return [document.text for document in documents]


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("name", ["a.jsonl", "wiki_00", "b.dat"])
def test_compressed_files_are_read(tmp_path: Path, name: str, suffix: str) -> None:
    """The format and compression of JSON Lines and WikiExtractor output are detected."""
    content = WIKI if name == "wiki_00" else JSON_LINES
    path = write_file(tmp_path / (name + suffix), COMPRESSORS[suffix](content.encode()))
    assert read_texts(path) == TEXTS


def test_concatenated_compressed_files_are_read_to_the_end(tmp_path: Path) -> None:
    """Compressed files joined by ``cat`` give the texts of all of them."""
    for suffix, compress in COMPRESSORS.items():
        path = write_file(tmp_path / f"a.jsonl{suffix}", compress(JSON_LINES.encode()) * 2)
        assert read_texts(path) == TEXTS * 2, suffix


def test_presplit_format_is_detected(tmp_path: Path) -> None:
    """Text with one sentence per line and blank lines between documents is detected."""
    report = CorpusReport()
    sources = find_sources([str(write_file(tmp_path / "a.txt", SENTENCES))])
    documents = list(read_documents(sources, CorpusOptions(), report))
    assert [document.text.split("\n")[0] for document in documents] == [
        "Anna has a cat.",
        "Bert reads a book.",
    ]
    assert all(document.presplit for document in documents)
    assert report.formats == {"sentences": 1}
    assert [document.number for document in documents] == [0, 1]


def test_prose_file_is_one_document(tmp_path: Path) -> None:
    """A file of prose is one document, and its hard-wrapped paragraphs become one line each."""
    paragraph = (
        "It was the best of times and it was the worst of times, as the book\n"
        "begins which everybody has begun to read and which so few of them have\n"
        "finished, though it is by no means the longest one of its kind. Then\n"
        "the second sentence of this paragraph comes to its end here.\n"
    )
    path = write_file(tmp_path / "book.txt", f"CHAPTER ONE\n\n{paragraph}\n{paragraph}")
    (text,) = read_texts(path)
    joined = " ".join(paragraph.split("\n")).strip()
    assert text == f"CHAPTER ONE\n{joined}\n{joined}"


def test_long_prose_file_is_divided_between_paragraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file longer than the limit becomes several documents, without dividing a paragraph."""
    monkeypatch.setattr("bertsmith.text.readers.MAX_DOCUMENT_CHARACTERS", 1000)
    paragraph = "One line holds one paragraph. It has two sentences."
    path = write_file(tmp_path / "a.txt", f"{paragraph}\n\n" * 100)
    texts = read_texts(path, format="prose")
    assert len(texts) > 3
    assert [line for text in texts for line in text.split("\n") if line] == [paragraph] * 100


def test_line_without_an_end_is_divided_between_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line longer than the limit, such as a whole file, becomes several documents."""
    monkeypatch.setattr("bertsmith.text.readers.MAX_DOCUMENT_CHARACTERS", 20)
    words = [f"word{number}" for number in range(20)]
    texts = read_texts(write_file(tmp_path / "a.txt", " ".join(words)), format="prose")
    assert max(map(len, texts)) <= 20
    assert " ".join(texts).split() == words
    assert read_texts(write_file(tmp_path / "b.txt", "x" * 50), format="prose") == [
        "x" * 20, "x" * 20, "x" * 10,
    ]  # fmt: skip


def test_markdown_becomes_plain_text(tmp_path: Path) -> None:
    """Markup, code, tables and link targets are removed; each heading or list item is a line."""
    content = (
        "---\ntitle: x\n---\n# The _Title_\n\n"
        "Some **bold** text _was _here with a [link](http://x.y) and\n"
        "`code` in a wrapped line, snake_case kept.\n\n```python\nx = 1\n```\n\n* one item\n"
        "* [ ] another item\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> A quote &amp; its end.\n"
        "<!-- not\nthis -->\n***\n    indented()\n![picture](p.png)\n\n1. first \\* thing\n"
    )
    (text,) = read_texts(write_file(tmp_path / "a.md", content))
    assert text.split("\n") == [
        "The Title",
        "Some bold text was here with a link and code in a wrapped line, snake_case kept.",
        "one item",
        "another item",
        "A quote & its end.",
        "first * thing",
    ]


def test_text_after_many_blank_lines_is_read(tmp_path: Path) -> None:
    """Text is found after more blank lines than are examined to detect the format."""
    path = write_file(tmp_path / "late.txt", "\n" * 200_000 + "The text begins late.\n")
    assert read_texts(path) == ["The text begins late."]


def test_layout_applies_to_text_in_json_lines(tmp_path: Path) -> None:
    """``markdown`` and ``sentences`` also apply to the text field of JSON Lines."""
    path = write_file(tmp_path / "a.jsonl", json.dumps({"body": "## A **b**\n\nc d"}) + "\n")
    assert read_texts(path, format="markdown", field="body") == ["A b\nc d"]
    sources = find_sources([str(path)])
    (document,) = read_documents(sources, CorpusOptions(format="sentences", field="body"))
    assert document.presplit


def test_text_that_looks_like_json_is_read_as_prose(tmp_path: Path) -> None:
    """A .txt file whose first line is JSON without the field is plain text with ``prose``."""
    text = '{"a": 1}\nis a JSON object.\n'
    path = write_file(tmp_path / "a.txt", text)
    assert read_texts(path, format="prose") == ['{"a": 1}\nis a JSON object.']
    with pytest.raises(CorpusError, match="no field 'text'"):
        read_texts(path)
    assert read_texts(write_file(path, '{"text": "A text."}\n'), format="prose") == ["A text."]


def test_parquet_column_is_read(tmp_path: Path) -> None:
    """A column of text is read; empty rows are counted; a wrong column or file is an error."""
    arrow = pytest.importorskip("pyarrow", reason="the extra bertsmith[parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = {"text": [*TEXTS, None, ""], "n": [1, 2, 3, 4], "list": [["a"]] * 4}
    table = arrow.table(columns)
    table = table.append_column("categories", table["text"].dictionary_encode())
    parquet.write_table(table, path)
    report = CorpusReport()
    assert read_texts(path, report=report) == TEXTS
    assert report.empty_documents == 2
    assert read_texts(path, field="categories") == TEXTS
    with pytest.raises(CorpusError, match=r"no column 'body'; its columns are 'text', 'n'"):
        read_texts(path, field="body")
    for name, kind in (("n", "int64"), ("list", r"list<\w+: string>")):
        with pytest.raises(CorpusError, match=f"column '{name}' holds {kind}, not text"):
            read_texts(path, field=name)
    compressed = write_file(tmp_path / "a.parquet.gz", gzip.compress(path.read_bytes()))
    assert read_texts(compressed) == TEXTS
    write_file(path, path.read_bytes()[:300])
    with pytest.raises(CorpusError, match="not a complete Parquet file"):
        read_texts(path)
    names = ["text", "text"]
    parquet.write_table(arrow.Table.from_arrays([arrow.array(TEXTS)] * 2, names), path)
    with pytest.raises(CorpusError, match="several columns are named 'text'"):
        read_texts(path)


def test_byte_order_mark_and_windows_line_ends_are_removed(tmp_path: Path) -> None:
    """A byte order mark and CRLF line endings are removed."""
    windows_text = b"\xef\xbb\xbf" + SENTENCES.replace("\n", "\r\n").encode()
    path = write_file(tmp_path / "a.txt", windows_text)
    assert read_texts(path) == read_texts(write_file(tmp_path / "b.txt", SENTENCES))


@pytest.mark.parametrize("content", [SENTENCES, "A heading\n\nThe text. It is long.\n\nIts end."])
def test_lines_may_end_at_carriage_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Text with CR or CRLF line ends gives the same documents as with LF."""
    expected = read_texts(write_file(tmp_path / "lf.txt", content))
    assert read_texts(write_file(tmp_path / "cr.txt", content.replace("\n", "\r"))) == expected
    path = write_file(tmp_path / "crlf.txt", content.replace("\n", "\r\n"))
    assert read_texts(path) == expected
    # The first bytes, from which the line ends are detected, may end in the middle of CRLF.
    monkeypatch.setattr("bertsmith.text.archives.HEAD_BYTES", content.index("\n") + 1)
    assert "\n\n".join(read_texts(path, format="prose")) == content.strip()


def test_line_ends_in_json_lines_are_normalized(tmp_path: Path) -> None:
    """Texts that differ only in their line ends are duplicates."""
    texts = ["One.\nTwo.", "One.\r\nTwo.", "One.\rTwo."]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path = write_file(tmp_path / "a.jsonl", lines)
    assert read_texts(path) == texts[:1] * 3
    assert read_texts(path, deduplicate="documents") == texts[:1]


def test_zstd_files_may_start_with_a_skippable_frame(tmp_path: Path) -> None:
    """The program pzstd writes a skippable frame with the compressed size before each frame."""
    for first in (b"\x50", b"\x5f"):
        frame = first + b"\x2a\x4d\x18\x04\x00\x00\x00size"
        content = (frame + COMPRESSORS[".zst"](JSON_LINES.encode())) * 2
        assert read_texts(write_file(tmp_path / "a.jsonl.zst", content)) == TEXTS * 2


def test_zstd_files_may_have_a_large_window(tmp_path: Path) -> None:
    """Large public corpora are compressed with --long, which the library rejects by default."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=28, chain_log=10, hash_log=10, strategy=zstandard.STRATEGY_FAST
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = compressor.compress(JSON_LINES.encode()) + compressor.flush()
    assert zstandard.get_frame_parameters(content).window_size == 1 << 28
    assert read_texts(write_file(tmp_path / "a.jsonl.zst", content)) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", '[\n {"text": "a"}]', "a JSON array, not plain text"),
        ("a.txt", '[{"text": "a"}, {"text": "b"}]', "a JSON array, not plain text"),
        ("a.json", '{\n  "text": "a"\n}', "JSON, not plain text"),
        ("a.csv", "text,label\na,b\n", "a table, not plain text"),
        ("a.tsv.gz", "a\tb\n", "a table, not plain text"),
        ("a.HTML", "<p>a</p>", "HTML, not plain text"),
    ],
)
def test_files_in_other_formats_are_rejected(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    """Their markup would become text. ``format="prose"`` reads them as they are."""
    data = gzip.compress(content.encode()) if name.endswith(".gz") else content
    path = write_file(tmp_path / name, data)
    with pytest.raises(CorpusError, match=rf"{reason}; convert it .*--format prose"):
        read_texts(path)
    assert "".join(read_texts(path, format="prose")).split() == content.split()
    json_lines = write_file(tmp_path / "lines.json", JSON_LINES)
    report = CorpusReport()
    assert read_texts(path, json_lines, report=report, on_error="skip") == TEXTS
    assert report.skipped == {reason: 1}


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name "-" is standard input, which may be compressed and can be given only once."""
    compressed = io.BytesIO(gzip.compress(JSON_LINES.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(compressed)))
    (source,) = find_sources(["-"])
    assert source.is_stream
    assert source.fingerprint() == ""
    assert [document.text for document in read_documents([source])] == TEXTS
    with pytest.raises(CorpusError, match="given more than once"):
        find_sources(["-", "-"])


#: Files with an error: name, content, and pattern of the message.
INVALID_FILES: list[tuple[str, bytes, str]] = [
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
    ("wiki_00", b'<doc id="1" title="t">\nt\n\nx.\n' + WIKI.encode(), "before the </doc> of the"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(b"x", mtime=0), mtime=0), "compressed twice"),
]


@pytest.mark.parametrize(("name", "content", "message"), INVALID_FILES)
def test_errors_stop_or_are_counted(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Each error stops with its file and location, or is skipped, counted and listed."""
    path = write_file(tmp_path / name, content)
    with pytest.raises(CorpusError, match=message) as error:
        read_texts(path)
    assert str(path) in str(error.value)
    report = CorpusReport()
    read_texts(path, report=report, on_error="skip")
    assert sum(report.skipped.values()) == 1
    assert str(path) in report.examples[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "an empty file"),
        (b" \n\n", "a file with only whitespace"),
        (b"\xef\xbb\xbf", "whitespace"),
    ],
)
def test_empty_files_are_counted(tmp_path: Path, content: bytes, reason: str) -> None:
    """A file without text is skipped and counted, but it is an error if no file has text."""
    empty = write_file(tmp_path / "texts" / "a.txt", content)
    write_file(tmp_path / "texts" / "b.txt", b"Some text.\n")
    report = CorpusReport()
    assert read_texts(tmp_path / "texts", report=report) == ["Some text."]
    ((counted, number),) = report.skipped.items()
    assert reason in counted
    assert number == 1
    assert report.examples == [f"{empty}: {counted}"]
    report.require_documents()
    report = CorpusReport()
    assert read_texts(empty, report=report) == []
    with pytest.raises(CorpusError, match=rf"no document was found: skipped 1: .*{reason}"):
        report.require_documents()


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESSORS if suffix])
def test_truncated_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    """A truncated file is an error; if errors are skipped, the documents before it are read."""
    lines = "".join(
        json.dumps({"text": f"Number {number} of all. " * 9}) + "\n" for number in range(20000)
    )
    # bzip2 has blocks of 900 kB, so the text must be larger to contain a complete block.
    content = COMPRESSORS[suffix](lines.encode())
    path = write_file(tmp_path / f"a.jsonl{suffix}", content[: len(content) * 3 // 4])
    with pytest.raises(CorpusError, match="truncated or damaged"):
        read_texts(path)
    report = CorpusReport()
    texts = read_texts(path, report=report, on_error="skip")
    assert report.skipped == {"the compressed file is truncated or damaged": 1}
    assert 1000 < len(texts) < 20000
    assert texts[500].startswith("Number 500 ")


def test_only_the_invalid_line_is_skipped(tmp_path: Path) -> None:
    """Skipping an invalid line keeps the lines before and after it."""
    path = write_file(tmp_path / "a.jsonl", JSON_LINES + "{broken\n" + JSON_LINES)
    assert read_texts(path, on_error="skip") == TEXTS * 2


@pytest.mark.parametrize("length", [200, 500, 2000])
def test_very_long_line_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A line of the maximum length or more is an error that can be skipped."""
    monkeypatch.setattr("bertsmith.text.raw_text.MAX_LINE_BYTES", 200)
    long_line = json.dumps({"text": "x" * length}) + "\n"
    path = write_file(tmp_path / "a.jsonl", JSON_LINES + long_line + JSON_LINES + "{broken\n")
    with pytest.raises(CorpusError, match=r"line 3, byte \d+: a line of .* or more"):
        read_texts(path)
    report = CorpusReport()
    assert read_texts(path, report=report, on_error="skip") == TEXTS * 2
    assert sum(report.skipped.values()) == 2
    # The locations after the line are not affected by it.
    offset = path.stat().st_size - len("{broken\n")
    assert report.examples[1].startswith(f"{path}, line 6, byte {offset:,}: broken JSON")


def test_repeated_documents_are_left_out_on_request(tmp_path: Path) -> None:
    """Exact repetitions in another file are removed and counted, but only on request."""
    paths = [write_file(tmp_path / name, JSON_LINES) for name in ("a.jsonl", "b.jsonl")]
    report = CorpusReport()
    assert read_texts(*paths, report=report, deduplicate="documents") == TEXTS
    assert report.repeated_documents == 2
    assert read_texts(*paths) == TEXTS * 2


def test_repeated_paragraphs_are_left_out(tmp_path: Path) -> None:
    """Repeated paragraphs are removed, and documents that have no other paragraph are left out."""
    texts = ["Same.\nOne.", "Same.\nTwo.", "Two.\nSame."]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    report = CorpusReport()
    path = write_file(tmp_path / "a.jsonl", lines)
    assert read_texts(path, report=report, deduplicate="paragraphs") == ["Same.\nOne.", "Two."]
    # Two repetitions of "Same." and one of "Two."
    assert report.repeated_paragraphs == 3
    assert report.documents == 2


def test_repeated_sentences_of_presplit_text_are_kept(tmp_path: Path) -> None:
    """A line of presplit text is a sentence and no paragraph; repeated documents are removed."""
    documents = ["Do you see it?\nYes.\nSo do I.", "Do you hear it?\nYes.\nSo do I."]
    path = write_file(tmp_path / "a.txt", "\n\n".join([*documents, documents[0]]) + "\n")
    report = CorpusReport()
    assert read_texts(path, report=report, deduplicate="both") == documents
    assert (report.repeated_documents, report.repeated_paragraphs) == (1, 0)
    assert read_texts(path, deduplicate="paragraphs") == [*documents, documents[0]]


def test_counts_of_reports_are_added() -> None:
    """Counts and reasons are added; examples are concatenated up to the limit."""
    report = CorpusReport(documents=1, characters=5)
    other = CorpusReport(documents=2, formats={"jsonl": 1})
    for number in range(MAX_EXAMPLES + 10):
        other.count_skipped("broken JSON", f"place {number}")
    report.add(other)
    report.add(other)
    assert (report.documents, report.characters, report.formats) == (5, 5, {"jsonl": 2})
    assert report.skipped == {"broken JSON": 2 * (MAX_EXAMPLES + 10)}
    assert len(report.examples) == MAX_EXAMPLES


def test_corpus_without_documents_is_an_error(tmp_path: Path) -> None:
    """``require_documents`` raises an error that says what was left out."""
    report = CorpusReport()
    path = write_file(tmp_path / "a.jsonl", '{"text": ""}\n')
    assert read_texts(path, report=report) == []
    with pytest.raises(CorpusError, match="1 document without text"):
        report.require_documents()


def test_unknown_format_is_rejected() -> None:
    """The error lists the valid formats."""
    with pytest.raises(SettingsError, match="'wikiextractor'"):
        CorpusOptions.parse({"format": "word"}, "options")


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Reading 60 documents of 0.5 MB takes only the memory of a few documents."""
    line = json.dumps({"text": "A line of text. " * 32_000}) + "\n"
    path = write_file(tmp_path / "a.jsonl.gz", gzip.compress(line.encode() * 60, 1))
    sources = find_sources([str(path)])
    tracemalloc.start()
    # All documents are read, but only the first is not a repetition.
    documents = read_documents(sources, CorpusOptions(deduplicate="both"))
    assert sum(1 for _ in documents) == 1
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 12_000_000
