"""The verb ``vocab``: a tokenizer in a folder, a report, and nothing lost by mistake.

These tests never judge the words.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.text.wordpiece import Tokenizer
from tests.cli.conftest import Run

FILES = {"bertsmith.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write 400 little documents."""
    path = tmp_path / "a.jsonl"
    texts = [f"The café of {n % 50 * 7919:x} opens at {n}. It sells the tea." for n in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_vocabulary_is_written_and_reported(run: Run, corpus: Path, tmp_path: Path) -> None:
    """The folder holds the four files; the report and the next command stand on stderr."""
    out = tmp_path / "out"
    done = run("vocab", corpus, "--size", 170, "--out", out)
    assert done.status == 0, done.err
    assert {path.name for path in out.iterdir()} == FILES
    assert Tokenizer.load(out).vocab_size == 170
    assert done.out == ""
    for part in ("held-out", "pieces per word", "[UNK]", "longest words", f"wrote {out}", "next:"):
        assert part in done.err


def test_the_report_as_json(run: Run, corpus: Path, tmp_path: Path) -> None:
    """--json puts one object on stdout with the facts of the report."""
    done = run("vocab", corpus, "--size", 170, "--out", tmp_path / "out", "--json")
    facts = json.loads(done.out)
    assert facts["words"] == 170
    assert facts["held_out"] is True
    assert facts["corpus"]["documents"] == 400
    assert 1 <= facts["quality"]["pieces_a_word"] < 4


def test_options_reach_the_tokenizer(run: Run, corpus: Path, tmp_path: Path) -> None:
    """Case, accents and Chinese characters are as asked, in the files too."""
    options = ["--cased", "--strip-accents", "--no-split-chinese"]
    run("vocab", corpus, "--size", 170, "--out", tmp_path / "out", *options)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert not tokenizer.lowercase
    assert tokenizer.strip_accents
    assert not tokenizer.split_chinese
    assert tokenizer.token_to_id("é") is None
    assert tokenizer.token_to_id("T") is not None


def test_a_small_corpus_gives_fewer_words_and_says_so(
    run: Run, corpus: Path, tmp_path: Path
) -> None:
    """The default size is more than a little text can fill; that is no error, but told."""
    done = run("vocab", corpus, "--out", tmp_path / "out")
    assert done.status == 0
    assert "not the 30,522 asked for" in done.err


def test_standard_input_is_enough(run: Run, corpus: Path, tmp_path: Path) -> None:
    """A pipe gives the vocabulary that the file gives."""
    run("vocab", corpus, "--size", 170, "--out", tmp_path / "one")
    piped = run("vocab", "-", "--size", 170, "--out", tmp_path / "two", stdin=corpus.read_bytes())
    assert piped.status == 0, piped.err
    assert Tokenizer.load(tmp_path / "one").hash == Tokenizer.load(tmp_path / "two").hash


def test_nothing_is_replaced_by_mistake(run: Run, corpus: Path, tmp_path: Path) -> None:
    """A tokenizer is replaced with --force only, other files never, and a failure keeps the old."""
    out = tmp_path / "out"
    run("vocab", corpus, "--size", 170, "--out", out)
    before = Tokenizer.load(out).hash
    again = run("vocab", corpus, "--size", 165, "--out", out)
    assert again.status == 2
    assert "--force" in again.err
    assert run("vocab", tmp_path / "nowhere", "--out", out, "--force").status == 2
    assert Tokenizer.load(out).hash == before
    assert run("vocab", corpus, "--size", 165, "--out", out, "--force").status == 0
    assert Tokenizer.load(out).vocab_size == 165
    other = run("vocab", corpus, "--size", 165, "--out", tmp_path, "--force")
    assert other.status == 2
    assert "holds other files" in other.err
    assert corpus.exists()
    named = run("vocab", corpus, "--size", 165, "--out", corpus)
    assert "expected the name of a folder" in named.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", 5], "vocabulary size is too small: 5"),
        (["--coverage", 2], "a coverage of 2.0"),
        (["--segment", "mecab"], "no segmenter is named 'mecab'"),
        (["--field", "body"], "no field 'body'"),
    ],
)
def test_mistakes_are_told(
    run: Run, corpus: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    """A wrong option exits with 2, says why, and leaves no folder."""
    done = run("vocab", corpus, "--out", tmp_path / "out", *options)
    assert done.status == 2
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_interrupted_learning_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while words are counted exits with 130, without a traceback or half a folder."""
    line = b"The cat of the house sleeps on the mat again. " * 200 + b"\n"
    out = tmp_path / "folder" / "out"
    command = [sys.executable, "-m", "bertsmith", "vocab", "-", "--out", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        # Far more than a pipe holds: once all is written, the process is reading and counting.
        for _ in range(200):
            process.stdin.write(line)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        err = process.stderr.read().decode() if process.stderr else ""
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not out.parent.exists()
