"""Checkpoints that a thread writes while training continues: content, errors and interruptions.

A write is slow here because it waits for an event of the training, not for a time.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bertsmith import bundle
from bertsmith.progress import NullProgress
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.checkpoint import (
    MOMENTS_FILE,
    WEIGHTS_FILE,
    TrainingState,
    collect_checkpoint,
    list_checkpoints,
)
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.loop import LoopOptions, TrainingOutcome, train
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.settings import CheckpointSettings, OptimSettings
from tests.train.engine.toy_run import MACHINE, OPTIONS, ToyObjective

#: Seconds after which a test fails if an event does not happen.
_TIMEOUT = 30.0
ASYNCHRONOUS = replace(OPTIONS, checkpoint_every=3, has_asynchronous_checkpoints=True)


class _Objective(ToyObjective):
    """The toy objective, which calls a function at the start of each step."""

    def __init__(self, start_step: Callable[[int], None]) -> None:
        super().__init__()
        self._start_step = start_step

    def compute_losses(
        self, micro_batch: int, micro_batches: Any, dropout_seed: Any
    ) -> dict[str, Tensor]:
        self._start_step(micro_batch)
        return super().compute_losses(micro_batch, micro_batches, dropout_seed)


def _train(
    run: Path, options: LoopOptions, start_step: Callable[[int], None] = lambda _: None
) -> TrainingOutcome:
    """Train from the same weights in every call."""
    objective = _Objective(start_step)
    for parameter in objective.model.parameters():
        parameter.data.fill_(0.5)
    optimizer = build_optimizer(objective.model, OptimSettings())
    return train(objective, objective.model, optimizer, MACHINE, options, run, NullProgress())


def _delay_moments(
    monkeypatch: pytest.MonkeyPatch, step: int, wait: Callable[[Path], object]
) -> None:
    """Call ``wait`` in the checkpoint of ``step``, when its weights are written."""
    save_tensors = bundle.save_tensors

    def save_slowly(tensors: dict[str, Tensor], path: Path) -> None:
        if f"step-{step}." in str(path) and path.name == MOMENTS_FILE:
            wait(path)
        save_tensors(tensors, path)

    monkeypatch.setattr(checkpoint, "save_tensors", save_slowly)


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth step starts before the checkpoint of the third is written.

    The checkpoint nevertheless has the weights and moments of the third step, and no other files
    than one that is written at once.
    """
    options = replace(ASYNCHRONOUS, keep_checkpoints=3)
    _train(tmp_path / "synchronous", replace(options, has_asynchronous_checkpoints=False))
    is_fifth_step = threading.Event()
    waits: list[bool] = []
    _delay_moments(monkeypatch, 3, lambda _: waits.append(is_fifth_step.wait(_TIMEOUT)))
    _train(tmp_path / "run", options, lambda step: is_fifth_step.set() if step == 4 else None)
    assert waits == [True]
    for step in (3, 6, 9):
        expected = tmp_path / "synchronous" / "checkpoints" / f"step-{step}"
        directory = tmp_path / "run" / "checkpoints" / f"step-{step}"
        assert [path.name for path in sorted(directory.iterdir())] == [
            path.name for path in sorted(expected.iterdir())
        ]
        for name in (WEIGHTS_FILE, MOMENTS_FILE):
            assert (directory / name).read_bytes() == (expected / name).read_bytes()


def test_at_most_one_checkpoint_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint waits for the previous one, so memory for one copy is enough."""
    num_writing = [0]
    write = checkpoint.write
    largest = []

    def count_and_write(*arguments: Any) -> Path:
        num_writing[0] += 1
        largest.append(num_writing[0])
        directory = write(*arguments)
        num_writing[0] -= 1
        return directory

    monkeypatch.setattr(checkpoint, "write", count_and_write)
    _train(tmp_path, replace(ASYNCHRONOUS, checkpoint_every=1))
    assert largest == [1] * 9
    assert [step for step, _ in list_checkpoints(tmp_path)] == [8, 9]


def test_failed_write_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the thread ends training after the current step and names the checkpoint.

    The previous checkpoint remains, and the same command continues from it.
    """
    has_next_step_started = threading.Event()

    def fail(path: Path) -> None:
        has_next_step_started.wait(_TIMEOUT)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def join_writer(step: int) -> None:
        if step == 6:
            has_next_step_started.set()
            for thread in threading.enumerate():
                if thread.name == "bertsmith-checkpoint":
                    thread.join(_TIMEOUT)

    with monkeypatch.context() as patch:
        _delay_moments(patch, 6, fail)
        with pytest.raises(OSError, match="No space left") as caught:
            _train(tmp_path, ASYNCHRONOUS, join_writer)
    assert caught.value.filename == str(tmp_path / "checkpoints" / "step-6")
    assert read_metrics(tmp_path)[-1]["step"] == 7
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
    assert _train(tmp_path, ASYNCHRONOUS).state.step == 9


def test_signal_during_a_write_saves_both_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM waits for the checkpoint that is being written, and then saves the last step."""
    has_signal = threading.Event()
    _delay_moments(monkeypatch, 3, lambda _: has_signal.wait(_TIMEOUT))

    def send_signal(step: int) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
            has_signal.set()

    outcome = _train(tmp_path, ASYNCHRONOUS, send_signal)
    assert (outcome.signal, outcome.state.step) == (signal.SIGTERM, 5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-3", "step-5",
    ]  # fmt: skip
    assert _train(tmp_path, ASYNCHRONOUS).state.step == 9


def test_second_interrupt_does_not_wait_for_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C ends the run while a checkpoint is being written."""
    is_released = threading.Event()
    _delay_moments(monkeypatch, 3, lambda _: is_released.wait(_TIMEOUT))

    def interrupt_twice(step: int) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, ASYNCHRONOUS, interrupt_twice)
    assert list_checkpoints(tmp_path) == []
    is_released.set()


def test_error_of_a_step_waits_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If training fails while a checkpoint is being written, the checkpoint is completed."""
    has_failed = threading.Event()
    _delay_moments(monkeypatch, 3, lambda _: has_failed.wait(_TIMEOUT))

    def fail(step: int) -> None:
        if step == 4:
            has_failed.set()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        _train(tmp_path, ASYNCHRONOUS, fail)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3]


def test_checkpoints_are_due_by_time(tmp_path: Path) -> None:
    """With steps of 2 s and at most 5 s between checkpoints, every third step is saved.

    An interval in steps that ends earlier comes first, and starts the time again.
    """
    now = [0.0]

    def spend_two_seconds(_: int) -> None:
        now[0] += 2.0

    duration = StepDuration(9, 5.0, clock=lambda: now[0])
    options = replace(OPTIONS, duration=duration, checkpoint_every=100, keep_checkpoints=9)
    _train(tmp_path / "time", options, spend_two_seconds)
    assert [step for step, _ in list_checkpoints(tmp_path / "time")] == [3, 6, 9]
    options = replace(options, checkpoint_every=4)
    _train(tmp_path / "both", options, spend_two_seconds)
    assert [step for step, _ in list_checkpoints(tmp_path / "both")] == [3, 4, 7, 8, 9]


def test_checkpoint_of_a_gpu_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting a checkpoint reads no value, and its event is recorded on the device of the model.

    The tensors are fake: reading the step count of Adam, a CUDA tensor, raises an error here and
    would wait for all earlier copies on a GPU.
    """
    recorded_streams = []

    class Event:
        def record(self, stream: str) -> None:
            recorded_streams.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    with FakeTensorMode():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(2, 3, device="cuda:1"))
        optimizer = torch.optim.AdamW(model.parameters())
        moments = {name: torch.empty(2, 3, device="cuda:1") for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[model.weight] = {"step": torch.empty((), device="cuda:1"), **moments}
        content = collect_checkpoint(TrainingState(step=4), model, optimizer, should_copy=True)
        names = ["weight.step", "weight.exp_avg", "weight.exp_avg_sq"]
        assert list(content.files[MOMENTS_FILE]) == names
        assert {tensor.device.type for tensor in content.files[MOMENTS_FILE].values()} == {"cpu"}
    assert recorded_streams == ["stream of cuda:1"]


def test_write_waits_on_the_device_of_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread selects the device before it waits for the copies."""
    log: list[object] = []

    class Event:
        device = torch.device("cuda:1")

        def synchronize(self) -> None:
            log.append("wait")

    monkeypatch.setattr(torch.cuda, "set_device", log.append)
    event: Any = Event()
    checkpoint.write(tmp_path, checkpoint.CheckpointContent(TrainingState(step=4), {}, event), 1)
    assert log == [torch.device("cuda:1"), "wait"]


def test_checkpoints_are_asynchronous_on_a_gpu_by_default() -> None:
    """A thread writes checkpoints on a GPU, and on a CPU only if the user wants it."""
    settings = CheckpointSettings()
    assert settings.is_asynchronous("cuda")
    assert not settings.is_asynchronous("cpu")
    assert CheckpointSettings(asynchronous=True).is_asynchronous("cpu")
    assert not CheckpointSettings(asynchronous=False).is_asynchronous("cuda")
