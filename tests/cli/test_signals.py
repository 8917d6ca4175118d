"""SIGTERM and SIGHUP end a command after its temporary files are removed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.cli.signals import Terminated, raise_terminated

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
