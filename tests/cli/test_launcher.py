"""Commands in processes started by torchrun: one of them prints, and only some commands run."""

import json
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bertsmith.errors import PeerError, SettingsError
from bertsmith.train.pretraining import resolve
from tests.cli.conftest import CompletedCommand, RunCli


def _run_as_process(
    rank: int, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> CompletedCommand:
    """Run a command as process ``rank`` of 2 on one machine."""
    # The program replaces the streams of all processes but the first; monkeypatch restores them.
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return run_cli(*arguments)


def test_embed_in_several_processes_needs_files(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """Several processes cannot write to standard output."""
    (tmp_path / "texts.txt").write_text("a text\n")
    completed = _run_as_process(0, run_cli, monkeypatch, "embed", model, tmp_path / "texts.txt")
    assert completed.status == 2
    assert "several processes (torchrun) need an input file and --out" in completed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pretrain", "--data", "nowhere", "--out", "run"), "nowhere"),
        (("pretrain", "--unknown"), "No such option: --unknown"),
        (("fill", "model", "[MASK]"), "`fill` runs in one process, but torchrun has started 2"),
    ],
)
def test_error_of_all_processes_is_printed_by_the_first(
    run_cli: RunCli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    """Invalid arguments end all processes with status 2, and only process 0 prints a message."""
    monkeypatch.chdir(tmp_path)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    first = _run_as_process(0, run_cli, monkeypatch, *arguments)
    assert not waits
    second = _run_as_process(1, run_cli, monkeypatch, *arguments)
    # Otherwise torchrun could end the first process before it has printed the error.
    assert len(waits) == 1
    assert first.status == second.status == 2
    assert message in first.err
    assert second.out + second.err == ""


@pytest.mark.parametrize(
    ("error", "output"),
    [(SettingsError("broken"), "error: broken\n"), (PeerError("broken"), "")],
)
def test_process_that_fails_alone_reports_its_error(
    run_cli: RunCli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    output: str,
) -> None:
    """Process 1 prints an error that only it has, and no error that another process reports."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(resolve, "check_pretrain_arguments", lambda *_: None)
    monkeypatch.setattr("bertsmith.train.pretraining.pretrain.pretrain", lambda *_, **__: fail())
    out = tmp_path / "run"
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    result = _run_as_process(1, run_cli, monkeypatch, "pretrain", "--data", "s", "--out", out)
    assert (result.status, result.out, result.err) == (2, "", output)
    assert error_file.exists() == bool(output)


def test_report_of_torchrun_has_the_error(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failed process writes its error for torchrun, whose report shows it as the root cause.

    Without such a file, the report only links to PyTorch's documentation.
    """
    monkeypatch.chdir(tmp_path)
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    arguments = ("pretrain", "--data", "nowhere", "--out", "run")
    message = _run_as_process(0, run_cli, monkeypatch, *arguments).err.strip()
    assert "nowhere" in message
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(error_file))
    assert f"traceback : {message}" in str(ChildFailedError("bertsmith", {0: failure}))
    # The module of torchrun adds the exit status to this object.
    assert json.loads(error_file.read_text())["message"]["message"] == message
