"""Failed commands print one line, exit with the right status and lose no data."""

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

from bertsmith.cli import error_messages, streams
from bertsmith.data.store import Store
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.version import __version__
from tests.cli.conftest import SENTENCES, RunCli


@contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Limit the files of this process and its children to ``num_bytes``."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def _make_os_error(code: int, filename: str | None = None) -> OSError:
    """Return an OSError with an error number, and the name of a file if there is one."""
    return OSError(code, "reason", filename) if filename else OSError(code, "reason")


def _make_surrogate_error() -> UnicodeEncodeError:
    """Return the error of encoding a lone surrogate."""
    return UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed")


@pytest.mark.parametrize(
    ("error", "parts", "status"),
    [
        (
            _make_os_error(errno.ENOSPC, "run/x"),
            ("disk full", "while writing run/x", "continue"),
            2,
        ),
        (_make_os_error(errno.EDQUOT), ("disk quota exceeded", "free space"), 2),
        (_make_os_error(errno.EFBIG), ("file size limit", "ulimit -f"), 2),
        (_make_os_error(errno.EBADF), ("standard input or output is closed",), 2),
        (_make_os_error(errno.EACCES, "x"), ("error: x: reason",), 2),
        (MemoryError(), ("out of memory",), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ("out of memory",), 2),
        (_make_surrogate_error(), ("not valid Unicode", "a\\\\udcff"), 2),
        (KeyError("x"), ("KeyError: 'x': this is a bug in bertsmith", "--debug"), 1),
        (RuntimeError("two\nlines"), ("RuntimeError: two lines: this is a bug",), 1),
    ],
)
def test_explain_error_returns_one_line_and_a_status(
    error: Exception, parts: tuple[str, ...], status: int
) -> None:
    """Every exception is explained on one line; only a bug has status 1."""
    message, actual_status = error_messages.explain_error(error)
    assert actual_status == status
    assert message.startswith("error: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_bug_is_one_line_without_debug(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unexpected exception prints one line, and a traceback only with --debug."""

    def fail(*_: object) -> None:
        raise KeyError("seqlen")

    (tmp_path / "a.txt").write_text("Text.\n")
    monkeypatch.setattr("bertsmith.text.corpus.read_documents", fail)
    completed = run_cli("corpus", "stats", tmp_path / "a.txt")
    assert completed.status == 1
    assert completed.err.count("\n") == 1
    assert "KeyError: 'seqlen': this is a bug in bertsmith; rerun with --debug" in completed.err
    monkeypatch.setenv("BERTSMITH_DEBUG", "1")
    with pytest.raises(KeyError):
        run_cli("corpus", "stats", tmp_path / "a.txt")


def test_prepare_continues_after_a_full_disk(
    run_cli: RunCli, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """After a failed write, the same command completes the store with the same bytes."""
    tokenizer.save(tmp_path / "tokenizer")
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n\n".join(f"{SENTENCES[n % 3]} {n}" for n in range(400)))
    command = ("prepare", corpus, "--tokenizer", tmp_path / "tokenizer", "--workers", 1, "--out")
    assert run_cli(*command, tmp_path / "uninterrupted").status == 0
    # Smaller than the token ids of the store.
    with limit_file_size(6000):
        completed = run_cli(*command, tmp_path / "store")
    assert completed.status == 2, completed.err
    assert "file size limit reached" in completed.err
    assert f"while writing {tmp_path / 'store'}" in completed.err
    assert run_cli(*command, tmp_path / "store").status == 0
    for name in ("train.ids", "heldout.ids"):
        expected = (tmp_path / "uninterrupted" / name).read_bytes()
        assert (tmp_path / "store" / name).read_bytes() == expected


def test_pretrain_continues_after_a_full_disk(
    run_cli: RunCli, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """After a failed checkpoint, the same command ends with the weights of an uninterrupted run."""
    tokenizer.save(tmp_path / "tokenizer")
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n\n".join("\n".join(SENTENCES) + f"\nNumber {n}." for n in range(60)))
    run_cli("prepare", corpus, "--tokenizer", tmp_path / "tokenizer", "--workers", 1, "--out",
        tmp_path / "store")  # fmt: skip
    assert Store.open(tmp_path / "store").manifest.splits["heldout"].documents
    command = ("pretrain", "--data", tmp_path / "store", "--steps", 2, "--set", "model.width=16",
               "--set", "model.heads=2", "--set", "model.layers=1", "--set", "data.max_seqlen=32",
               "--set", "data.batch_size=4", "--out")  # fmt: skip
    assert run_cli(*command, tmp_path / "uninterrupted").status == 0
    # Smaller than a checkpoint.
    with limit_file_size(8000):
        completed = run_cli(*command, tmp_path / "run")
    assert completed.status == 2, completed.err
    assert f"while writing {tmp_path / 'run' / 'checkpoints'}" in completed.err
    assert run_cli(*command, tmp_path / "run").status == 0
    expected = load_file(tmp_path / "uninterrupted" / "model" / "model.safetensors")
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(weight.equal(expected[name]) for name, weight in weights.items())


def test_failed_export_names_the_folder(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """A full disk during export is an error that names the folder; no file is left."""
    # Smaller than the weights.
    with limit_file_size(8000):
        completed = run_cli("export", model, "--to", "hf", "--out", tmp_path / "out")
    assert completed.status == 2
    assert f"while writing {tmp_path / 'out'};" in completed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("fill", "MODEL", "a\udcff"), ("corpus", "stats", "\udcff")])
def test_argument_that_is_not_utf8_is_an_error(run_cli: RunCli, arguments: tuple[str, ...]) -> None:
    """The error contains the number of the argument."""
    completed = run_cli(*arguments)
    assert completed.status == 2
    assert f"argument {len(arguments)} is not valid in the locale's encoding" in completed.err


def test_file_name_that_is_not_utf8_is_an_error(run_cli: RunCli, tmp_path: Path) -> None:
    """The error asks the user to rename the file."""
    (tmp_path / "n\udcff.txt").write_text("Text.\n")
    completed = run_cli("corpus", "stats", tmp_path)
    assert completed.status == 2
    assert "not valid UTF-8; rename it" in completed.err


def test_deeply_nested_json_line_is_an_error_or_skipped(run_cli: RunCli, tmp_path: Path) -> None:
    """Too deeply nested JSON is an error, or one skipped line with --on-error skip."""
    nested = "[" * 100_000 + "]" * 100_000
    corpus = tmp_path / "a.jsonl"
    corpus.write_text(f'{{"text": "One.", "x": {nested}}}\n{{"text": "Two."}}\n')
    completed = run_cli("corpus", "stats", corpus)
    assert completed.status == 2
    assert "nested too deeply" in completed.err
    completed = run_cli("corpus", "stats", corpus, "--on-error", "skip")
    assert completed.status == 0
    assert "broken JSON" in completed.out


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deeply_nested_bertsmith_json_is_an_error(
    run_cli: RunCli, model: Path, tmp_path: Path, depth: int
) -> None:
    """A too deeply nested bertsmith.json is rejected when the model is read."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "bertsmith.json").write_text(f'{{"x": {"[" * depth}{"]" * depth}}}')
    completed = run_cli("export", copy, "--to", "hf", "--out", tmp_path / "out")
    assert completed.status == 2
    assert "bertsmith.json: " in completed.err
    assert "nested" in completed.err


def test_output_encoding_is_utf8_or_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets UTF-8 in every locale; PYTHONIOENCODING is kept and other characters escaped."""
    for encoding, expected in ((None, "…\\udcff".encode()), ("ascii", b"\\u2026\\udcff")):
        monkeypatch.delenv("PYTHONIOENCODING", raising=False)
        if encoding:
            monkeypatch.setenv("PYTHONIOENCODING", encoding)
        buffer = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
        streams.configure_streams()
        sys.stdout.write("…\udcff")
        sys.stdout.flush()
        assert buffer.getvalue() == expected


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&- <&-"])
def test_closed_stdin_or_stdout_is_an_error(redirection: str, tmp_path: Path) -> None:
    """A closed stdin or stdout that is needed is an error; a closed stderr is not."""
    corpus = tmp_path / "a.txt"
    corpus.write_text("One line.\n")
    source = "-" if redirection == "<&-" else str(corpus)
    command = f'"{sys.executable}" -m bertsmith corpus stats {source} {redirection}'
    completed = subprocess.run(command, shell=True, capture_output=True, check=False, timeout=300)
    assert b"Traceback" not in completed.stderr
    # The last case closes stderr, and a stdin that is not needed.
    if redirection.startswith("2"):
        assert completed.returncode == 0
        assert b"1 document," in completed.stdout
    else:
        assert completed.returncode == 2
        assert completed.stderr.startswith(b"error: ")
        assert b"closed" in completed.stderr or b"Bad file descriptor" in completed.stderr


def test_inspect_shows_a_store_too_small_for_examples(
    run_cli: RunCli, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """``inspect STORE --examples 0`` works for a store that is too small for examples."""
    tokenizer.save(tmp_path / "tokenizer")
    corpus = tmp_path / "a.txt"
    corpus.write_text("\n\n".join(f"{sentence}\n{sentence}" for sentence in SENTENCES))
    run_cli("prepare", corpus, "--tokenizer", tmp_path / "tokenizer", "--workers", 1, "--out",
        tmp_path / "store")  # fmt: skip
    completed = run_cli("inspect", tmp_path / "store", "--examples", 0)
    assert completed.status == 0, completed.err
    assert "token store" in completed.out
    assert "examples per epoch at length " in completed.out


def test_version_option_prints_name_and_version(run_cli: RunCli) -> None:
    """``bertsmith --version`` prints name and version."""
    completed = run_cli("--version")
    assert (completed.status, completed.out) == (0, f"bertsmith {__version__}\n")
