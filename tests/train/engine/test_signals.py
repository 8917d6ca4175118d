"""Signals: a run that is asked to stop saves and leaves, and goes on as if nothing had been."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.cli.console import TerminalProgress
from bertsmith.cli.main import main
from bertsmith.progress import NullProgress
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.loop import LoopOptions, train
from bertsmith.train.engine.metrics_log import MetricsLog, read_metrics
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.signals import DeferredSignals
from tests.train.conftest import assignments

MACHINE = Machine(torch.device("cpu"), "fp32", "padded")
PLAN = LoopOptions(
    steps=9, seed=0, max_grad_norm=1.0, lr_at_step=lambda _: 0.1, log_every=1, eval_every=100,
    checkpoint_every=100, keep_checkpoints=2, selection_metric="loss", measure_peak_macs=lambda: 1.0,
)  # fmt: skip


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: signal.Signals,
    status: int,
) -> None:
    """SIGTERM and Ctrl-C end the program with 143 and 130, after a checkpoint of every step done.

    The message tells the step and that the same command goes on; no model is written yet.
    """
    run = tmp_path / "run"
    command = ["bertsmith", "pretrain", "--data", str(store), "--out", str(run), "--steps", "100"]
    for assignment in assignments(checkpoint__every=50, run__eval_every=50):
        command += ["--set", assignment]
    advance = TerminalProgress.advance

    def interrupted(self: TerminalProgress, amount: float, **fields: str) -> None:
        advance(self, amount, **fields)
        if "loss" in fields and len(read_metrics(run)) == 3:
            signal.raise_signal(stop)

    monkeypatch.setattr(TerminalProgress, "advance", interrupted)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert left.value.code == status, err
    assert "stopped after step 3 of 100, all saved" in err
    assert "the same command goes on from there" in err
    assert [step for step, _ in list_checkpoints(run)] == [3]
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    assert not (run / "model").exists()
    assert out == ""


class _Toy:
    """Work of one number, that can send a signal in a step or while evaluating."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def iter_batches(self, first_step: int) -> Any:
        yield from ([step] for step in range(first_step, 9))

    def compute_losses(self, piece: int, whole: Any, noise: Any) -> dict[str, Tensor]:
        return {"loss": self.model(torch.tensor([float(piece)])).square().sum()}

    def describe_batch(self, step: int) -> str:
        return str(step)

    def count_tokens(self, whole: Any) -> int:
        return 1

    def count_macs(self, whole: Any) -> float:
        return 1.0

    def evaluate(self) -> dict[str, float]:
        return {"loss": 1.0}


class _Signals(NullProgress):
    """Progress that sends a signal to its own process after some steps: the end of a step."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, amount: float, **fields: str) -> None:
        if amount == 1:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_at_the_end_of_a_step_is_saved_too(tmp_path: Path) -> None:
    """A signal that comes after the moment of saving loses no step either."""
    toy = _Toy()
    optimizer = build_optimizer(toy.model, OptimSettings())
    outcome = train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, _Signals(4))
    assert (outcome.signal, outcome.state.step) == (signal.SIGTERM, 4)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]
    outcome = train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, NullProgress())
    assert (outcome.signal, outcome.state.step) == (None, 9)
    assert [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == [
        *range(1, 10)
    ]


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path) -> None:
    """A run that came to its end is finished, whatever signal came with its last step."""
    toy = _Toy()
    optimizer = build_optimizer(toy.model, OptimSettings())
    outcome = train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, _Signals(9))
    assert (outcome.signal, outcome.state.step) == (None, 9)


def test_memory_is_given_back_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between steps, which ask for the same blocks again; of a stopped run as well."""
    toy, taken = _Toy(), []
    monkeypatch.setattr("bertsmith.train.engine.loop.give_back_freed_memory",
                        lambda: taken.append(len(read_metrics(tmp_path))))  # fmt: skip
    optimizer = build_optimizer(toy.model, OptimSettings())
    train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, _Signals(4))
    assert taken == [len(read_metrics(tmp_path))]
    train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, NullProgress())
    assert taken[1:] == [len(read_metrics(tmp_path))]


def test_the_second_signal_acts_as_always() -> None:
    """The first Ctrl-C is noted, the second interrupts; afterwards all is as before."""
    before = signal.getsignal(signal.SIGINT)
    with DeferredSignals() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_journal_never_knows_less_than_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is on the disk before a checkpoint is: its sync comes first, every time."""
    order: list[str] = []
    monkeypatch.setattr(MetricsLog, "sync", lambda _: order.append("journal"))
    save = "bertsmith.train.engine.checkpoint.save"
    monkeypatch.setattr(save, lambda *_: order.append("checkpoint"))
    toy = _Toy()
    plan = LoopOptions(**{**PLAN.__dict__, "checkpoint_every": 3})
    train(
        toy,
        toy.model,
        build_optimizer(toy.model, OptimSettings()),
        MACHINE,
        plan,
        tmp_path,
        NullProgress(),
    )
    # Three checkpoints, of which the last is of the last step.
    assert order == ["journal", "checkpoint"] * 3
