"""Signals: a run that is asked to stop saves and leaves, and goes on as if nothing had been."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.cli.console import Bars
from bertsmith.cli.main import main
from bertsmith.progress import Silent
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.checkpoint import found
from bertsmith.train.engine.loop import Plan, train
from bertsmith.train.engine.metrics_log import Journal, read
from bertsmith.train.engine.optimizer import build
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.signals import Stopper
from tests.train.conftest import assignments

MACHINE = Machine(torch.device("cpu"), "fp32", "padded")
PLAN = Plan(
    steps=9, seed=0, clip=1.0, rate=lambda _: 0.1, log_every=1, eval_every=100,
    checkpoint_every=100, keep=2, best_by="loss", ceiling=lambda: 1.0,
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
    advance = Bars.advance

    def interrupted(self: Bars, amount: float, **fields: str) -> None:
        advance(self, amount, **fields)
        if "loss" in fields and len(read(run)) == 3:
            signal.raise_signal(stop)

    monkeypatch.setattr(Bars, "advance", interrupted)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert left.value.code == status, err
    assert "stopped after step 3 of 100, all saved" in err
    assert "the same command goes on from there" in err
    assert [step for step, _ in found(run)] == [3]
    assert [line["step"] for line in read(run)] == [1, 2, 3]
    assert not (run / "model").exists()
    assert out == ""


class _Toy:
    """Work of one number, that can send a signal in a step or while evaluating."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def pieces(self, first_step: int) -> Any:
        yield from ([step] for step in range(first_step, 9))

    def losses(self, piece: int, whole: Any, noise: Any) -> dict[str, Tensor]:
        return {"loss": self.model(torch.tensor([float(piece)])).square().sum()}

    def whereabouts(self, step: int) -> str:
        return str(step)

    def tokens(self, whole: Any) -> int:
        return 1

    def products(self, whole: Any) -> float:
        return 1.0

    def evaluate(self) -> dict[str, float]:
        return {"loss": 1.0}


class _Signals(Silent):
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
    optimizer = build(toy.model, OptimSettings())
    outcome = train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, _Signals(4))
    assert (outcome.signal, outcome.state.step) == (signal.SIGTERM, 4)
    assert [step for step, _ in found(tmp_path)] == [4]
    outcome = train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, Silent())
    assert (outcome.signal, outcome.state.step) == (None, 9)
    assert [line["step"] for line in read(tmp_path) if line["kind"] == "train"] == [*range(1, 10)]


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path) -> None:
    """A run that came to its end is finished, whatever signal came with its last step."""
    toy = _Toy()
    optimizer = build(toy.model, OptimSettings())
    outcome = train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, _Signals(9))
    assert (outcome.signal, outcome.state.step) == (None, 9)


def test_memory_is_given_back_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between steps, which ask for the same blocks again; of a stopped run as well."""
    toy, taken = _Toy(), []
    monkeypatch.setattr("bertsmith.train.engine.loop.give_back_freed_memory",
                        lambda: taken.append(len(read(tmp_path))))  # fmt: skip
    optimizer = build(toy.model, OptimSettings())
    train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, _Signals(4))
    assert taken == [len(read(tmp_path))]
    train(toy, toy.model, optimizer, MACHINE, PLAN, tmp_path, Silent())
    assert taken[1:] == [len(read(tmp_path))]


def test_the_second_signal_acts_as_always() -> None:
    """The first Ctrl-C is noted, the second interrupts; afterwards all is as before."""
    before = signal.getsignal(signal.SIGINT)
    with Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_journal_never_knows_less_than_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is on the disk before a checkpoint is: its sync comes first, every time."""
    order: list[str] = []
    monkeypatch.setattr(Journal, "sync", lambda _: order.append("journal"))
    save = "bertsmith.train.engine.checkpoint.save"
    monkeypatch.setattr(save, lambda *_: order.append("checkpoint"))
    toy = _Toy()
    plan = Plan(**{**PLAN.__dict__, "checkpoint_every": 3})
    train(toy, toy.model, build(toy.model, OptimSettings()), MACHINE, plan, tmp_path, Silent())
    # Three checkpoints, of which the last is of the last step.
    assert order == ["journal", "checkpoint"] * 3
