"""Signals: SIGTERM, Ctrl-C and SIGHUP save a checkpoint and stop the run, which can be resumed."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertsmith.cli.console import TerminalProgress
from bertsmith.cli.main import main
from bertsmith.progress import NullProgress
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.loop import LoopOptions, train
from bertsmith.train.engine.metrics_log import MetricsLog, read_metrics
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.signals import DeferredSignals
from tests.train.conftest import make_assignments
from tests.train.engine.toy_run import MACHINE, OPTIONS, ToyObjective


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """SIGHUP has its default effect during the test, even if pytest runs under nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize(
    ("signal_number", "exit_status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
def test_signal_saves_a_checkpoint_and_exits(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signal_number: signal.Signals,
    exit_status: int,
) -> None:
    """SIGTERM, Ctrl-C and SIGHUP save the last step and exit with status 143, 130 and 129.

    The message names the step and how to resume; no model directory is written.
    """
    run = tmp_path / "run"
    command = ["bertsmith", "pretrain", "--data", str(store), "--out", str(run), "--steps", "100"]
    for assignment in make_assignments(checkpoint__steps=50, run__eval_every=50):
        command += ["--set", assignment]
    advance = TerminalProgress.advance

    def advance_and_interrupt(self: TerminalProgress, amount: float, **fields: str) -> None:
        advance(self, amount, **fields)
        if "loss" in fields and len(read_metrics(run)) == 3:
            signal.raise_signal(signal_number)

    monkeypatch.setattr(TerminalProgress, "advance", advance_and_interrupt)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == exit_status, err
    assert "stopped after step 3 of 100" in err
    assert "to continue" in err
    assert [step for step, _ in list_checkpoints(run)] == [3]
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    assert not (run / "model").exists()
    assert out == ""


def test_run_without_a_step_has_no_checkpoint(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If Ctrl-C stops a run before its first step, the message mentions no checkpoint."""
    options = [part for option in make_assignments() for part in ("--set", option)]
    command = ["pretrain", "--data", str(store), "--out", str(tmp_path / "run"), "--steps", "9"]
    monkeypatch.setattr(sys, "argv", ["bertsmith", *command, *options])
    enter = DeferredSignals.__enter__

    def enter_and_interrupt(self: DeferredSignals) -> DeferredSignals:
        enter(self)
        signal.raise_signal(signal.SIGINT)
        return self

    monkeypatch.setattr(DeferredSignals, "__enter__", enter_and_interrupt)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    err = capsys.readouterr().err
    assert "stopped before the first step; run the same command to continue\n" in err
    assert list_checkpoints(tmp_path / "run") == []


class _InterruptingProgress(NullProgress):
    """Progress that sends SIGTERM to its own process at the end of a step."""

    def __init__(self, steps_before_signal: int) -> None:
        self.remaining_steps = steps_before_signal

    def advance(self, amount: float, **fields: str) -> None:
        if amount == 1:
            self.remaining_steps -= 1
            if self.remaining_steps == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def test_signal_at_the_end_of_a_step_loses_no_step(tmp_path: Path) -> None:
    """If a signal arrives after the update of the weights, the checkpoint has that step."""
    objective = ToyObjective()
    model = objective.model
    optimizer = build_optimizer(model, OptimSettings())
    progress = _InterruptingProgress(4)
    outcome = train(objective, model, optimizer, MACHINE, OPTIONS, tmp_path, progress)
    assert (outcome.signal, outcome.state.step) == (signal.SIGTERM, 4)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]
    outcome = train(objective, model, optimizer, MACHINE, OPTIONS, tmp_path, NullProgress())
    assert (outcome.signal, outcome.state.step) == (None, 9)
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [*range(1, 10)]


def test_run_is_finished_despite_a_signal_in_the_last_step(tmp_path: Path) -> None:
    """A run that receives a signal in its last step is finished, not interrupted."""
    objective = ToyObjective()
    model = objective.model
    optimizer = build_optimizer(model, OptimSettings())
    progress = _InterruptingProgress(9)
    outcome = train(objective, model, optimizer, MACHINE, OPTIONS, tmp_path, progress)
    assert (outcome.signal, outcome.state.step) == (None, 9)


def test_memory_is_trimmed_once_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory is returned to the OS once, when a run is finished or interrupted."""
    objective = ToyObjective()
    num_logged_lines = []
    model = objective.model
    monkeypatch.setattr(
        "bertsmith.train.engine.loop.trim_memory",
        lambda: num_logged_lines.append(len(read_metrics(tmp_path))),
    )
    optimizer = build_optimizer(model, OptimSettings())
    train(objective, model, optimizer, MACHINE, OPTIONS, tmp_path, _InterruptingProgress(4))
    assert num_logged_lines == [len(read_metrics(tmp_path))]
    train(objective, model, optimizer, MACHINE, OPTIONS, tmp_path, NullProgress())
    assert num_logged_lines[1:] == [len(read_metrics(tmp_path))]


def test_memory_is_trimmed_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory is returned to the OS when the interval has passed, and at the end."""
    objective = ToyObjective()
    num_trims = 0

    def trim() -> None:
        nonlocal num_trims
        num_trims += 1

    monkeypatch.setattr("bertsmith.train.engine.loop.trim_memory", trim)
    monkeypatch.setattr("bertsmith.train.engine.loop.TRIM_INTERVAL_SECONDS", 0.0)
    optimizer = build_optimizer(objective.model, OptimSettings())
    train(objective, objective.model, optimizer, MACHINE, OPTIONS, tmp_path, NullProgress())
    assert num_trims == 9 + 1


def test_second_signal_has_its_usual_effect() -> None:
    """The first Ctrl-C is recorded, the second interrupts, and the old handler is restored."""
    previous_handler = signal.getsignal(signal.SIGINT)
    with DeferredSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous_handler


def test_repeated_signals_can_be_ignored() -> None:
    """A process of torchrun can receive a signal twice, and must still save its checkpoint."""
    previous_handler = signal.getsignal(signal.SIGTERM)
    with DeferredSignals(ignore_repeated=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is previous_handler


class _ClosedTerminal(NullProgress):
    """Progress on a terminal that is closed at the end of the fourth step."""

    def __init__(self, *, sends_signal: bool) -> None:
        self.num_steps = 0
        self.sends_signal = sends_signal

    def advance(self, amount: float, **fields: str) -> None:
        self.num_steps += 1
        if self.num_steps == 4:
            if self.sends_signal:
                # The terminal and the shell each send a signal.
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGHUP)
            raise OSError(errno.EIO, "Input/output error")


@pytest.mark.usefixtures("default_hangup")
def test_closed_terminal_saves_a_checkpoint(tmp_path: Path) -> None:
    """Neither the second SIGHUP nor output that cannot be written prevents the checkpoint."""
    objective = ToyObjective()
    optimizer = build_optimizer(objective.model, OptimSettings())
    arguments = (objective, objective.model, optimizer, MACHINE, OPTIONS, tmp_path)
    outcome = train(*arguments, _ClosedTerminal(sends_signal=True))
    assert (outcome.signal, outcome.state.step) == (signal.SIGHUP, 4)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]
    with pytest.raises(OSError, match="Input/output error"):
        train(*arguments, _ClosedTerminal(sends_signal=False))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signals_remain_ignored(number: signal.Signals) -> None:
    """SIGHUP under nohup and SIGINT of a background job do not stop a run."""
    previous_handler = signal.signal(number, signal.SIG_IGN)
    with DeferredSignals() as signals:
        signal.raise_signal(number)
        assert signals.received is None
    assert signal.getsignal(number) is signal.SIG_IGN
    signal.signal(number, previous_handler)


def test_metrics_log_is_synced_before_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics log is written to disk before each checkpoint, so it has all steps up to it."""
    calls: list[str] = []
    monkeypatch.setattr(MetricsLog, "sync", lambda _: calls.append("sync"))
    monkeypatch.setattr(
        "bertsmith.train.engine.checkpoint.write", lambda *_: calls.append("checkpoint")
    )
    objective = ToyObjective()
    model = objective.model
    options = LoopOptions(**{**OPTIONS.__dict__, "checkpoint_every": 3})
    optimizer = build_optimizer(model, OptimSettings())
    train(objective, model, optimizer, MACHINE, options, tmp_path, NullProgress())
    # Nine steps have three checkpoints.
    assert calls == ["sync", "checkpoint"] * 3
