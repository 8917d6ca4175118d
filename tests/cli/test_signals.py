"""Signals: SIGTERM and SIGHUP remove temporary files, and Ctrl-C prints a message."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli.signals import Terminated, raise_terminated
from tests.cli.conftest import RunCli

OLD_RUNS = Path(__file__).parent.parent / "train" / "fixtures" / "v0.1"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP])
def test_temporary_model_of_an_unfinished_run_is_removed(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    """The model written from a checkpoint is removed; the exit status is that of the signal."""
    runs, temporary = tmp_path / "runs", tmp_path / "temporary"
    shutil.copytree(OLD_RUNS, runs)
    temporary.mkdir()
    settings = runs / "pretrain-stopped" / "settings.toml"
    settings.write_text(settings.read_text().replace("@ROOT@", str(runs)))
    # A child of `nohup` inherits an ignored SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    masked_texts = tmp_path / "masked.txt"
    masked_texts.write_text("[MASK]\n" * 5000)
    with masked_texts.open() as stdin:
        process = subprocess.Popen(
            [sys.executable, "-m", "bertsmith", "fill", str(runs / "pretrain-stopped"), "-"],
            env=os.environ | {"TMPDIR": str(temporary)},
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    # Only one line is read from standard output, so the process blocks when the pipe is full.
    assert process.stdout is not None
    process.stdout.readline()
    assert list(temporary.glob("bertsmith-*"))
    process.send_signal(signal_number)
    process.wait(timeout=60)
    err = process.stderr.read() if process.stderr else ""
    process.stdout.close()
    assert process.returncode == 128 + signal_number, err
    assert err.endswith(f"terminated by {signal_number.name}\n")
    assert "Traceback" not in err
    assert not list(temporary.glob("bertsmith-*"))


def test_second_signal_ends_the_process() -> None:
    """After the first signal and after the block, SIGTERM has its default effect again."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with raise_terminated():
        with pytest.raises(Terminated, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with raise_terminated():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_second_hangup_is_ignored() -> None:
    """A process can receive several SIGHUP when its terminal is closed, and still cleans up."""
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with raise_terminated():
        with pytest.raises(Terminated, match="SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    signal.signal(signal.SIGHUP, previous_handler)


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "function", "message"),
    [
        (
            ["prepare", "text.txt", "--tokenizer", "tokenizer", "--out", "store"],
            "bertsmith.text.wordpiece.Tokenizer.load",
            "stopped; run the same command again to continue",
        ),
        (
            ["vocab", "text.txt", "--size", "200", "--out", "vocab"],
            "bertsmith.cli.corpus_options.find_sources",
            "stopped; nothing was written",
        ),
        (
            ["corpus", "stats", "text.txt"],
            "bertsmith.cli.corpus_options.find_sources",
            "stopped",
        ),
        (["fill", "model", "a [MASK]"], "bertsmith.bundle.load", "stopped"),
    ],
)
def test_ctrl_c_prints_one_line(
    run_cli: RunCli,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    function: str,
    message: str,
) -> None:
    """The line says whether anything was written or how to continue; the exit status is 130."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text.\n")
    for name in ("model", "tokenizer"):
        (tmp_path / name).symlink_to(model)
    monkeypatch.setattr(function, _interrupt)
    result = run_cli(*arguments)
    assert (result.status, result.err) == (130, f"{message}\n")
