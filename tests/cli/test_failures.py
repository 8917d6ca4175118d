"""A failed command: one line on stderr, the right exit status, and nothing lost."""

import errno
import io
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bertsmith.cli import error_messages as failures
from bertsmith.cli import streams
from bertsmith.data.store import Store
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.version import __version__
from tests.cli.conftest import SENTENCES, Run


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process or its children grow beyond ``num_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _os_error(code: int, filename: str | None = None) -> OSError:
    return OSError(code, "reason", filename) if filename else OSError(code, "reason")


def _surrogate_error() -> UnicodeEncodeError:
    return UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed")


@pytest.mark.parametrize(
    ("error", "parts", "status"),
    [
        (_os_error(errno.ENOSPC, "run/x"), ("disk full", "while writing run/x", "continue"), 2),
        (_os_error(errno.EDQUOT), ("disk quota exceeded", "free space"), 2),
        (_os_error(errno.EFBIG), ("file size limit", "ulimit -f"), 2),
        (_os_error(errno.EBADF), ("standard input or output is closed",), 2),
        (_os_error(errno.EACCES, "x"), ("error: x: reason",), 2),
        (MemoryError(), ("out of memory",), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ("out of memory",), 2),
        (_surrogate_error(), ("not valid Unicode", "a\\\\udcff"), 2),
        (KeyError("x"), ("KeyError: 'x': this is a bug in bertsmith", "--debug"), 1),
        (RuntimeError("two\nlines"), ("RuntimeError: two lines: this is a bug",), 1),
    ],
)
def test_each_failure_has_one_line_and_a_status(
    error: Exception, parts: tuple[str, ...], status: int
) -> None:
    """Whatever goes wrong is explained on one line; only a bug exits with 1."""
    message, code = failures.explain_error(error)
    assert code == status
    assert message.startswith("error: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_bug_is_one_line_without_debug(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An exception that nobody expected is one line with a way to report it, not a traceback."""

    def fail(*_: object) -> None:
        raise KeyError("seqlen")

    (tmp_path / "a.txt").write_text("Text.\n")
    monkeypatch.setattr("bertsmith.text.corpus.read_documents", fail)
    done = run("corpus", "stats", tmp_path / "a.txt")
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert "KeyError: 'seqlen': this is a bug in bertsmith; rerun with --debug" in done.err
    monkeypatch.setenv("BERTSMITH_DEBUG", "1")
    with pytest.raises(KeyError):
        run("corpus", "stats", tmp_path / "a.txt")


def test_prepare_continues_after_a_full_disk(run: Run, words: Tokenizer, tmp_path: Path) -> None:
    """Where a shard cannot be written, prepare says so; run again, it makes the same store."""
    words.save(tmp_path / "words", 43)
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n\n".join(f"{SENTENCES[n % 3]} {n}" for n in range(400)))
    command = ("prepare", corpus, "--tokenizer", tmp_path / "words", "--workers", 1, "--out")
    assert run(*command, tmp_path / "whole").status == 0
    with file_size_limit(6000):
        done = run(*command, tmp_path / "store")
    assert done.status == 2, done.err
    assert "file size limit reached" in done.err
    assert f"while writing {tmp_path / 'store'}" in done.err
    assert run(*command, tmp_path / "store").status == 0
    for name in ("train.ids", "heldout.ids"):
        expected = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "store" / name).read_bytes() == expected


def test_pretrain_continues_after_a_full_disk(run: Run, words: Tokenizer, tmp_path: Path) -> None:
    """A checkpoint that cannot be written stops the run; run again, it ends as if uninterrupted."""
    words.save(tmp_path / "words", 43)
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n\n".join("\n".join(SENTENCES) + f"\nNumber {n}." for n in range(60)))
    run("prepare", corpus, "--tokenizer", tmp_path / "words", "--workers", 1, "--out",
        tmp_path / "store")  # fmt: skip
    assert Store.open(tmp_path / "store").manifest.splits["heldout"].documents
    command = ("pretrain", "--data", tmp_path / "store", "--steps", 2, "--set", "model.width=16",
               "--set", "model.heads=2", "--set", "model.layers=1", "--set", "data.length=32",
               "--set", "data.batch=4", "--out")  # fmt: skip
    assert run(*command, tmp_path / "whole").status == 0
    with file_size_limit(8000):
        done = run(*command, tmp_path / "run")
    assert done.status == 2, done.err
    assert f"while writing {tmp_path / 'run' / 'checkpoints'}" in done.err
    assert run(*command, tmp_path / "run").status == 0
    whole = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(value.equal(whole[name]) for name, value in weights.items())


def test_export_names_what_could_not_be_written(run: Run, model: Path, tmp_path: Path) -> None:
    """A full disk while exporting is an error that names the folder, and leaves nothing there."""
    with file_size_limit(8000):
        done = run("export", model, "--to", "hf", "--out", tmp_path / "out")
    assert done.status == 2
    assert f"while writing {tmp_path / 'out'};" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("fill", "MODEL", "a\udcff"), ("corpus", "stats", "\udcff")])
def test_argument_that_is_not_text(run: Run, arguments: tuple[str, ...]) -> None:
    """An argument with bytes that are not UTF-8 is refused by its number."""
    done = run(*arguments)
    assert done.status == 2
    assert f"argument {len(arguments)} is not valid in the locale's encoding" in done.err


def test_file_whose_name_is_not_utf8(run: Run, tmp_path: Path) -> None:
    """A corpus folder with a file whose name is not UTF-8 is an error that says to rename it."""
    (tmp_path / "n\udcff.txt").write_text("Text.\n")
    done = run("corpus", "stats", tmp_path)
    assert done.status == 2
    assert "not valid UTF-8; rename it" in done.err


def test_deeply_nested_json_is_a_fault_of_its_line(run: Run, tmp_path: Path) -> None:
    """JSON that is nested too deeply is an error, or one skipped line."""
    deep = "[" * 100_000 + "]" * 100_000
    corpus = tmp_path / "a.jsonl"
    corpus.write_text(f'{{"text": "One.", "x": {deep}}}\n{{"text": "Two."}}\n')
    done = run("corpus", "stats", corpus)
    assert done.status == 2
    assert "nested too deeply" in done.err
    done = run("corpus", "stats", corpus, "--on-error", "skip")
    assert done.status == 0
    assert "skipped 1: broken JSON" in done.out


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deeply_nested_bertsmith_json(run: Run, model: Path, tmp_path: Path, depth: int) -> None:
    """A bertsmith.json that is nested too deeply is refused when it is read."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "bertsmith.json").write_text(f'{{"x": {"[" * depth}{"]" * depth}}}')
    done = run("export", copy, "--to", "hf", "--out", tmp_path / "out")
    assert done.status == 2
    assert "bertsmith.json: " in done.err
    assert "nested" in done.err


def test_output_has_an_encoding_that_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets UTF-8 whatever the locale; an encoding that the user chose gets escapes."""
    for choice, expected in ((None, "…\\udcff".encode()), ("ascii", b"\\u2026\\udcff")):
        monkeypatch.delenv("PYTHONIOENCODING", raising=False)
        if choice:
            monkeypatch.setenv("PYTHONIOENCODING", choice)
        target = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(target, encoding="ascii"))
        streams.configure_streams()
        sys.stdout.write("…\udcff")
        sys.stdout.flush()
        assert target.getvalue() == expected


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&- <&-"])
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    """A command whose stream is closed fails with 2; without stderr alone it succeeds."""
    corpus = tmp_path / "a.txt"
    corpus.write_text("One line.\n")
    place = "-" if closed == "<&-" else str(corpus)
    command = f'"{sys.executable}" -m bertsmith corpus stats {place} {closed}'
    done = subprocess.run(command, shell=True, capture_output=True, check=False, timeout=300)
    assert b"Traceback" not in done.stderr
    if closed.startswith("2"):
        assert done.returncode == 0
        assert b"1 documents" in done.stdout
    else:
        assert done.returncode == 2
        assert done.stderr.startswith(b"error: ")
        assert b"closed" in done.stderr or b"Bad file descriptor" in done.stderr


def test_inspect_without_examples(run: Run, words: Tokenizer, tmp_path: Path) -> None:
    """``inspect STORE --examples 0`` shows the facts alone."""
    words.save(tmp_path / "words", 43)
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n\n".join(f"{sentence}\n{sentence}" for sentence in SENTENCES))
    run("prepare", corpus, "--tokenizer", tmp_path / "words", "--workers", 1, "--out",
        tmp_path / "store")  # fmt: skip
    done = run("inspect", tmp_path / "store", "--examples", 0)
    assert done.status == 0, done.err
    assert "token store" in done.out
    assert "examples per epoch" in done.out


def test_version_is_shown(run: Run) -> None:
    """``bertsmith --version`` prints name and version."""
    done = run("--version")
    assert (done.status, done.out) == (0, f"bertsmith {__version__}\n")
