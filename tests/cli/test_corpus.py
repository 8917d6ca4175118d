"""The command ``corpus``: show, stats, convert and docstrings."""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import RunCli

JSON_LINES = (
    '{"text": "Anna has a cat. It sleeps."}\n{"text": ""}\n{"text": "Bert reads.\\nIt is good."}\n'
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A JSON lines file with three documents, one of them empty."""
    path = tmp_path / "a.jsonl"
    path.write_text(JSON_LINES)
    return path


def test_show_prints_sentences_by_document(run_cli: RunCli, corpus: Path) -> None:
    """``show`` prints the first documents, one sentence per line."""
    completed = run_cli("corpus", "show", corpus, "--documents", 1)
    assert completed.status == 0
    assert completed.out.split("\n") == [
        f"== {corpus}, document 0",
        "Anna has a cat.",
        "It sleeps.",
        "",
        "",
    ]


def test_show_counts_what_it_skips(run_cli: RunCli, tmp_path: Path) -> None:
    """``show --on-error skip`` reports skipped errors; it is an error if nothing can be shown."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"txet": "x"}\n{"text": "One."}\n')
    completed = run_cli("corpus", "show", path, "--on-error", "skip")
    assert completed.status == 0
    assert "One." in completed.out
    assert "skipped 1" in completed.err
    path.write_bytes(b"caf\xe9\n")
    completed = run_cli("corpus", "show", path, "--on-error", "skip")
    assert completed.status == 2
    assert "no document was found" in completed.err


def test_stats_prints_counts(run_cli: RunCli, corpus: Path) -> None:
    """``stats`` prints the counts as text or as JSON."""
    completed = run_cli("corpus", "stats", corpus)
    assert "2 documents" in completed.out
    assert "4 sentences, 11 whitespace-separated words" in completed.out
    assert "1 document without text" in completed.out
    counts = json.loads(run_cli("corpus", "stats", corpus, "--json").out)
    assert (counts["documents"], counts["sentences"], counts["words"]) == (2, 4, 11)
    assert counts["formats"] == {"jsonl": 1}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".bz2", ".zst"])
def test_converted_text_can_be_converted_back(
    run_cli: RunCli, corpus: Path, tmp_path: Path, suffix: str
) -> None:
    """JSON lines converted to sentences and back are unchanged, for every compression."""
    out = tmp_path / f"b.txt{suffix}"
    completed = run_cli("corpus", "convert", corpus, "--out", out)
    assert completed.status == 0, completed.err
    assert f"wrote {out}" in completed.err
    assert f"next: bertsmith vocab {out} --format sentences --out TOKENIZER" in completed.err
    assert completed.out == ""
    lines = run_cli("corpus", "convert", out, "--format", "sentences").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [
        "Anna has a cat.\nIt sleeps.",
        "Bert reads.\nIt is good.",
    ]


def test_json_lines_need_no_format(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """The next command for JSON lines has no --format."""
    completed = run_cli("corpus", "convert", corpus, "--out", tmp_path / "b.jsonl")
    assert f"next: bertsmith vocab {tmp_path / 'b.jsonl'} --out TOKENIZER" in completed.err


def test_convert_reads_compressed_standard_input(run_cli: RunCli) -> None:
    """Compressed text on standard input is converted to JSON lines on stdout."""
    completed = run_cli("corpus", "convert", "-", stdin=gzip.compress(JSON_LINES.encode()))
    assert len(completed.out.splitlines()) == 2
    assert json.loads(completed.out.splitlines()[0])["id"] == "-:0"


def test_existing_file_is_overwritten_only_with_force(
    run_cli: RunCli, corpus: Path, tmp_path: Path
) -> None:
    """Without --force, or if the conversion fails, an existing file is unchanged."""
    out = tmp_path / "b.jsonl"
    out.write_text("old")
    completed = run_cli("corpus", "convert", corpus, "--out", out)
    assert (completed.status, out.read_text()) == (2, "old")
    assert "--force" in completed.err
    corpus.write_text("{broken\n")
    assert run_cli("corpus", "convert", corpus, "--out", out, "--force").status == 2
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "no such file or folder"),
        (["."], "no text file in this folder"),
        (["photo.txt"], "binary file"),
        (["empty.txt"], "empty file"),
        (["-", "--format", "word"], "'wikiextractor'"),
        (["-", "--on-error", "panic"], "'skip'"),
    ],
)
def test_invalid_input_is_an_error(
    run_cli: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    """Invalid sources and options exit with 2 and a message without a traceback."""
    monkeypatch.chdir(tmp_path)
    # For ".", the folder stays empty.
    if arguments[0] != ".":
        (tmp_path / "photo.txt").write_bytes(b"\x89PNG\x00\x01")
        (tmp_path / "empty.txt").touch()
    completed = run_cli("corpus", "stats", *arguments)
    assert completed.status == 2
    assert message in completed.err
    assert "Traceback" not in completed.err
    assert completed.out == ""


def test_number_of_processes_is_positive(run_cli: RunCli, tmp_path: Path) -> None:
    """``--processes -1`` is an error, not the default."""
    out = tmp_path / "text.jsonl"
    completed = run_cli("corpus", "docstrings", "--out", out, "--processes", "-1")
    assert (completed.status, out.exists()) == (2, False)
    assert "'--processes': Input should be greater than or equal to 1" in completed.err


def test_skipped_text_is_reported(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """With --on-error skip, unreadable text is counted and its location printed."""
    corpus.write_text(JSON_LINES + "{broken\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").touch()
    completed = run_cli("corpus", "stats", tmp_path, "--on-error", "skip")
    assert completed.status == 0
    assert "broken JSON" in completed.out
    assert "empty file" in completed.out
    assert f"{corpus}, line 4, byte {len(JSON_LINES)}" in completed.out
    assert f"ignored {tmp_path / 'picture.png'}" in completed.err


def test_broken_link_is_reported(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """A text file in a folder that is a broken link is ignored, with a note that names it."""
    link = tmp_path / "moved.txt"
    link.symlink_to(tmp_path / "nowhere.txt")
    completed = run_cli("corpus", "stats", tmp_path)
    assert completed.status == 0
    assert f"note: ignored {link}: unknown file name suffix, broken link, or " in completed.err


def test_output_with_unknown_suffix_is_an_error(
    run_cli: RunCli, corpus: Path, tmp_path: Path
) -> None:
    """The output format is chosen by the suffix, so an unknown suffix is rejected."""
    completed = run_cli("corpus", "convert", corpus, "--out", tmp_path / "b.csv")
    assert completed.status == 2
    assert ".jsonl" in completed.err


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_command_leaves_no_file(
    tmp_path: Path, signal_number: signal.Signals, status: int
) -> None:
    """Ctrl-C and SIGTERM in ``corpus docstrings`` exit with 130 and 143, and write nothing."""
    command = [sys.executable, "-m", "bertsmith", "corpus", "docstrings"]
    options = ["--out", str(tmp_path / "d.txt"), "--processes", "2"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    # Wait until the command has created its temporary file.
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal_number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
