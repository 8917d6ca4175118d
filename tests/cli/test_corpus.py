"""The verb ``corpus``: what people see of their text, and what is written of it.

These tests never look inside the readers.
"""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run

LINES = (
    '{"text": "Anna has a cat. It sleeps."}\n{"text": ""}\n{"text": "Bert reads.\\nIt is good."}\n'
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write three documents, one of them empty."""
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    return path


def test_show_prints_sentences_by_document(run: Run, corpus: Path) -> None:
    """The first documents come as they are read, a sentence a line."""
    done = run("corpus", "show", corpus, "--documents", 1)
    assert done.status == 0
    assert done.out.split("\n") == [
        f"== {corpus}, document 0",
        "Anna has a cat.",
        "It sleeps.",
        "",
        "",
    ]


def test_stats_counts(run: Run, corpus: Path) -> None:
    """Counts stand on stdout, for people and as JSON."""
    done = run("corpus", "stats", corpus)
    assert "2 documents" in done.out
    assert "4 sentences, 11 words" in done.out
    assert "1 documents without text left out" in done.out
    facts = json.loads(run("corpus", "stats", corpus, "--json").out)
    assert (facts["documents"], facts["sentences"], facts["words"]) == (2, 4, 11)
    assert facts["formats"] == {"jsonl": 1}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".bz2", ".zst"])
def test_convert_there_and_back(run: Run, corpus: Path, tmp_path: Path, suffix: str) -> None:
    """JSON lines become a sentence a line, packed or not, and are read back as the same."""
    out = tmp_path / f"b.txt{suffix}"
    done = run("corpus", "convert", corpus, "--out", out)
    assert done.status == 0, done.err
    assert f"wrote {out}" in done.err
    assert "next: bertsmith vocab" in done.err
    assert done.out == ""
    found = run("corpus", "convert", out, "--format", "sentences").out.splitlines()
    assert [json.loads(line)["text"] for line in found] == [
        "Anna has a cat.\nIt sleeps.",
        "Bert reads.\nIt is good.",
    ]


def test_convert_reads_a_pipe(run: Run) -> None:
    """Packed text on standard input comes out as JSON lines on stdout."""
    done = run("corpus", "convert", "-", stdin=gzip.compress(LINES.encode()))
    assert len(done.out.splitlines()) == 2
    assert json.loads(done.out.splitlines()[0])["id"] == "-:0"


def test_an_existing_file_is_kept(run: Run, corpus: Path, tmp_path: Path) -> None:
    """A file is replaced only with --force, and a failed conversion leaves it as it was."""
    out = tmp_path / "b.jsonl"
    out.write_text("old")
    done = run("corpus", "convert", corpus, "--out", out)
    assert (done.status, out.read_text()) == (2, "old")
    assert "--force" in done.err
    corpus.write_text("{broken\n")
    assert run("corpus", "convert", corpus, "--out", out, "--force").status == 2
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "no such file or folder"),
        (["."], "no text file in this folder"),
        (["photo.txt"], "a binary file"),
        (["empty.txt"], "an empty file"),
        (["-", "--format", "word"], "'wikiextractor'"),
        (["-", "--on-error", "panic"], "'skip'"),
    ],
)
def test_mistakes_are_told_in_one_message(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    """A user's mistake exits with 2 and says what was found; there is no traceback."""
    monkeypatch.chdir(tmp_path)
    if arguments[0] != ".":
        (tmp_path / "photo.txt").write_bytes(b"\x89PNG\x00\x01")
        (tmp_path / "empty.txt").touch()
    done = run("corpus", "stats", *arguments)
    assert done.status == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_skips_are_reported(run: Run, corpus: Path, tmp_path: Path) -> None:
    """With --on-error skip the rest is read, and what was left out is counted and named."""
    corpus.write_text(LINES + "{broken\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").touch()
    done = run("corpus", "stats", tmp_path, "--on-error", "skip")
    assert done.status == 0
    assert "skipped 1: broken JSON" in done.out
    assert "skipped 1: an empty file" in done.out
    assert f"{corpus}, line 4, byte {len(LINES)}: broken JSON" in done.out
    assert f"passed over {tmp_path / 'picture.png'}" in done.err


def test_a_name_without_a_known_form_is_refused(run: Run, corpus: Path, tmp_path: Path) -> None:
    """The name of the file to write says the form, and must do so."""
    done = run("corpus", "convert", corpus, "--out", tmp_path / "b.csv")
    assert done.status == 2
    assert ".jsonl" in done.err


def test_interrupted_gathering_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in ``corpus docstrings`` exits with 130, without a traceback or half a file."""
    command = [sys.executable, "-m", "bertsmith", "corpus", "docstrings"]
    options = ["--out", str(tmp_path / "d.txt"), "--processes", "2"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
