"""The command ``vocab learn``: files, report, options and errors."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertsmith.text import vocabulary
from bertsmith.text.wordpiece import Tokenizer
from tests.cli.conftest import RunCli

TOKENIZER_FILES = {"bertsmith.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of 400 short documents."""
    path = tmp_path / "a.jsonl"
    # Hexadecimal numbers serve as 50 different words.
    texts = [f"The café of {n % 50 * 7919:x} opens at {n}. It sells the tea." for n in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_vocabulary_is_written_and_reported(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """The folder contains the four files; stderr contains the report and a next command."""
    out = tmp_path / "out"
    completed = run_cli("vocab", corpus, "--size", 170, "--out", out)
    assert completed.status == 0, completed.err
    assert {path.name for path in out.iterdir()} == TOKENIZER_FILES
    assert Tokenizer.load(out).vocab_size == 170
    assert completed.out == ""
    for part in ("held-out", "pieces", "[UNK]", "longest words", f"wrote {out}", "next:"):
        assert part in completed.err


def test_json_option_prints_the_report(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """--json prints one object with the report."""
    completed = run_cli("vocab", corpus, "--size", 170, "--out", tmp_path / "out", "--json")
    report = json.loads(completed.out)
    assert report["words"] == 170
    assert report["held_out"] is True
    assert report["corpus"]["documents"] == 400
    assert 1 <= report["quality"]["pieces_per_word"] < 4


def test_options_apply_to_the_tokenizer(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """Casing, accents and Chinese characters are handled as the options say."""
    options = ["--cased", "--strip-accents", "--no-split-chinese"]
    run_cli("vocab", corpus, "--size", 170, "--out", tmp_path / "out", *options)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert not tokenizer.lowercase
    assert tokenizer.strip_accents
    assert not tokenizer.split_chinese
    assert tokenizer.token_to_id("é") is None
    assert tokenizer.token_to_id("T") is not None


def test_small_corpus_gives_a_smaller_vocabulary(
    run_cli: RunCli, corpus: Path, tmp_path: Path
) -> None:
    """If the text is too short for the requested size, a note says so."""
    completed = run_cli("vocab", corpus, "--out", tmp_path / "out")
    assert completed.status == 0
    assert "note: the text is too short for 30,522 entries" in completed.err


def test_standard_input_equals_a_file(run_cli: RunCli, corpus: Path, tmp_path: Path) -> None:
    """The same text gives the same vocabulary from a file and from standard input."""
    options = ("--size", 170, "--out")
    run_cli("vocab", corpus, *options, tmp_path / "file")
    completed = run_cli("vocab", "-", *options, tmp_path / "stdin", stdin=corpus.read_bytes())
    assert completed.status == 0, completed.err
    assert Tokenizer.load(tmp_path / "file").hash == Tokenizer.load(tmp_path / "stdin").hash


def test_existing_tokenizer_is_replaced_only_with_force(
    run_cli: RunCli, corpus: Path, tmp_path: Path
) -> None:
    """--force replaces a tokenizer, but never other files; a failed command changes nothing."""
    out = tmp_path / "out"
    run_cli("vocab", corpus, "--size", 170, "--out", out)
    original_hash = Tokenizer.load(out).hash
    repeated = run_cli("vocab", corpus, "--size", 165, "--out", out)
    assert repeated.status == 2
    assert "--force" in repeated.err
    assert run_cli("vocab", tmp_path / "nowhere", "--out", out, "--force").status == 2
    assert Tokenizer.load(out).hash == original_hash
    assert run_cli("vocab", corpus, "--size", 165, "--out", out, "--force").status == 0
    assert Tokenizer.load(out).vocab_size == 165
    rejected = run_cli("vocab", corpus, "--size", 165, "--out", tmp_path, "--force")
    assert rejected.status == 2
    assert "contains other files" in rejected.err
    assert corpus.exists()
    rejected = run_cli("vocab", corpus, "--size", 165, "--out", corpus)
    assert "expected the name of a folder" in rejected.err
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        rejected = run_cli("vocab", corpus, "--size", 165, "--out", ".")
    assert (rejected.status, "not the name of a new folder" in rejected.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", 5], "too small"),
        (["--coverage", 2], "coverage"),
        (["--segment", "mecab"], "'mecab'"),
        (["--field", "body"], "no field 'body'"),
    ],
)
def test_invalid_options_are_errors(
    run_cli: RunCli, corpus: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    """An invalid option exits with 2, prints a message and creates no folder."""
    completed = run_cli("vocab", corpus, "--out", tmp_path / "out", *options)
    assert completed.status == 2
    assert message in completed.err
    assert not (tmp_path / "out").exists()


def test_interrupted_command_leaves_no_folder(tmp_path: Path) -> None:
    """Ctrl-C while words are counted exits with 130 and writes nothing."""
    line = b"The cat of the house sleeps on the mat again. " * 200 + b"\n"
    out = tmp_path / "folder" / "out"
    command = [sys.executable, "-m", "bertsmith", "vocab", "-", "--out", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        # More than a pipe buffers, so the process is counting words when all lines are written.
        for _ in range(200):
            process.stdin.write(line)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        err = process.stderr.read().decode() if process.stderr else ""
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not out.parent.exists()


def test_output_is_checked_before_and_after_the_work(
    run_cli: RunCli, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be made is an error at once; another process's vocabulary is kept."""
    learn = vocabulary.learn_vocabulary

    def learn_while_another_process_writes(*arguments: Any) -> Any:
        out = tmp_path / "out"
        out.mkdir()
        (out / "vocab.txt").write_text("mine")
        return learn(*arguments)

    monkeypatch.setattr(vocabulary, "learn_vocabulary", learn_while_another_process_writes)
    completed = run_cli("vocab", corpus, "--size", 170, "--out", corpus / "out")
    assert completed.status == 2
    assert not (tmp_path / "out").exists()
    completed = run_cli("vocab", corpus, "--size", 170, "--out", tmp_path / "out")
    assert completed.status == 2
    assert "contains a tokenizer" in completed.err
    assert (tmp_path / "out" / "vocab.txt").read_text() == "mine"
