"""Checkpoints: atomic writing, restoring, removal of old checkpoints, and damaged files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bertsmith.bundle import save_tensors
from bertsmith.errors import RunError
from bertsmith.files import write_json
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.checkpoint import (
    CHECKPOINTS_DIR,
    TrainingState,
    list_checkpoints,
    remove_partial_files,
    restore,
    resume,
    save,
)
from bertsmith.train.engine.run_clock import ELAPSED_FILE
from tests.data.synthetic_corpus import read_files
from tests.train.conftest import RecordingProgress


def _train_model(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a small model and its optimizer, which has moments after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    _take_step(model, optimizer)
    return model, optimizer


def _take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a training step on a fixed input."""
    model(torch.tensor([[1.0, -2.0, 0.5]])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_restored_run_takes_the_same_step(tmp_path: Path) -> None:
    """Restored weights, moments and state give the same next step as the saved ones."""
    model, optimizer = _train_model()
    state = TrainingState(step=1, seconds=2.5, best_step=1, best_loss=0.75)
    directory = save(tmp_path, state, model, optimizer, keep=2)
    restored_model, restored_optimizer = _train_model(seed=9)
    assert restore(directory, restored_model, restored_optimizer) == state
    _take_step(model, optimizer)
    _take_step(restored_model, restored_optimizer)
    for parameter, restored in zip(model.parameters(), restored_model.parameters(), strict=True):
        assert torch.equal(parameter, restored)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(
                optimizer.state[parameter][name], restored_optimizer.state[restored][name]
            )


def test_partly_trained_parameters_are_restored(tmp_path: Path) -> None:
    """Adam's step count of a parameter is stored if it was not trained in all steps.

    A parameter that has never been trained has no moments after restoring, as before.
    """

    def build() -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = nn.ParameterList(torch.randn(3) for _ in range(3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def take_step(model: nn.Module, optimizer: torch.optim.AdamW, trained: list[int]) -> None:
        parameters = list(model.parameters())
        for index in trained:
            loss = (parameters[index] * torch.tensor([1.0, -2.0, 0.5])).sum().square()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    take_step(model, optimizer, [0])
    take_step(model, optimizer, [0, 1])
    directory = save(tmp_path, TrainingState(step=2), model, optimizer, keep=1)
    restored_model, restored_optimizer = build()
    restore(directory, restored_model, restored_optimizer)
    assert list(restored_model.parameters())[2] not in restored_optimizer.state
    for models in ((model, optimizer), (restored_model, restored_optimizer)):
        take_step(*models, [0, 1, 2])
    for parameter, restored in zip(model.parameters(), restored_model.parameters(), strict=True):
        assert torch.equal(parameter, restored)
        step_count = optimizer.state[parameter]["step"]
        assert torch.equal(step_count, restored_optimizer.state[restored]["step"])
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [3, 2, 1]


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    """Saving a checkpoint removes all others but the last two and the best one."""
    model, optimizer = _train_model()
    remaining_steps = []
    for step, best_step in [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (10, 10), (11, 10), (12, 10)]:
        save(tmp_path, TrainingState(step=step, best_step=best_step), model, optimizer, keep=2)
        remaining_steps.append([step for step, _ in list_checkpoints(tmp_path)])
    assert remaining_steps == [
        [1],
        [1, 2],
        [2, 3],
        [2, 3, 4],
        [2, 4, 5],
        [5, 10],
        [10, 11],
        [10, 11, 12],
    ]


@pytest.mark.parametrize("failing_file", ["weights", "moments", "state", "checksums"])
def test_failed_save_keeps_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_file: str
) -> None:
    """If a file of a new checkpoint cannot be written, the run directory is unchanged."""
    model, optimizer = _train_model()
    save(tmp_path, TrainingState(step=1), model, optimizer, keep=1)
    files = read_files(tmp_path)
    # The files are written in this order.
    writes_before_failure = ["weights", "moments", "state", "checksums"].index(failing_file)

    def fail_later(write: Callable[..., None]) -> Callable[..., None]:
        def replacement(*arguments: Any) -> None:
            nonlocal writes_before_failure
            writes_before_failure -= 1
            if writes_before_failure < 0:
                raise OSError(28, "No space left on device")
            write(*arguments)

        return replacement

    monkeypatch.setattr(checkpoint, "save_tensors", fail_later(save_tensors))
    monkeypatch.setattr(checkpoint, "write_json", fail_later(write_json))
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, TrainingState(step=2), model, optimizer, keep=1)
    assert read_files(tmp_path) == files
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]


def test_partial_files_are_ignored_and_removed(tmp_path: Path) -> None:
    """What a killed process was writing or removing is not listed, and is removed."""
    model, optimizer = _train_model()
    save(tmp_path, TrainingState(step=1), model, optimizer, keep=1)
    files = read_files(tmp_path)
    for name in (".step-2.4711.tmp", ".step-1.old"):
        (tmp_path / CHECKPOINTS_DIR / name).mkdir()
        (tmp_path / CHECKPOINTS_DIR / name / "weights.safetensors").write_bytes(b"half")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    (tmp_path / ".settings.toml.4711.tmp").write_text("[mod")
    for name in (".model.4711.tmp", ".model.4711.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    remove_partial_files(tmp_path)
    # Without a new model, the old one is kept.
    old_model = tmp_path / ".model.4711.old"
    assert [path.name for path in tmp_path.glob(".*")] == [old_model.name]
    (tmp_path / "model").mkdir()
    remove_partial_files(tmp_path)
    assert not old_model.exists()
    assert read_files(tmp_path) == files


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        "truncated weights",
        "missing weights",
        "empty moments",
        "truncated state",
        "unknown state field",
        "other model",
    ],
)
def test_damaged_checkpoint_raises_run_error(
    tmp_path: Path, damage: str, has_checksums: bool
) -> None:
    """A checkpoint with any damage raises a RunError that names its directory."""
    model, optimizer = _train_model()
    directory = save(tmp_path, TrainingState(step=3), model, optimizer, keep=1)
    weights, state = directory / checkpoint.WEIGHTS_FILE, directory / checkpoint.STATE_FILE
    if not has_checksums:
        (directory / checkpoint.CHECKSUMS_FILE).unlink()
    match damage:
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-4])
        case "missing weights":
            weights.unlink()
        case "empty moments":
            (directory / checkpoint.MOMENTS_FILE).write_bytes(b"")
        case "truncated state":
            state.write_text(state.read_text()[:10])
        case "unknown state field":
            state.write_text(json.dumps({"steps": 3}))
        case _:
            model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    with pytest.raises(RunError, match=r"step-3: this checkpoint cannot be read"):
        restore(directory, model, optimizer)


def _flip_bit_of_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


CHECKPOINT_FILES = (
    checkpoint.WEIGHTS_FILE,
    checkpoint.MOMENTS_FILE,
    checkpoint.STATE_FILE,
    checkpoint.CHECKSUMS_FILE,
)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_resume_falls_back_to_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, name: str
) -> None:
    """The older checkpoint is restored; the damaged one is renamed, and a message is logged."""
    model, optimizer = _train_model()
    save(tmp_path, TrainingState(step=1), model, optimizer, keep=9)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    _take_step(model, optimizer)
    newest = save(tmp_path, TrainingState(step=2), model, optimizer, keep=9)
    _flip_bit_of_last_byte(newest / name)
    damaged_files = read_files(newest)
    restored_model, restored_optimizer = _train_model(seed=9)
    progress = RecordingProgress()
    state = resume(tmp_path, restored_model, restored_optimizer, progress)
    assert state == TrainingState(step=1)
    assert all(map(torch.equal, restored_model.parameters(), expected))
    for parameter in restored_model.parameters():
        assert float(restored_optimizer.state[parameter]["step"]) == 1.0
    (message,) = progress.messages
    assert message.startswith(f"{newest}: this checkpoint cannot be read: ")
    assert message.endswith("; kept as step-2.damaged")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    assert read_files(newest.with_name("step-2.damaged")) == damaged_files
    # A second damaged checkpoint of the same step replaces the first damaged one.
    second = save(tmp_path, TrainingState(step=2), model, optimizer, keep=9)
    _flip_bit_of_last_byte(second / name)
    assert resume(tmp_path, restored_model, restored_optimizer, progress).step == 1
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-1", "step-2.damaged"]


def test_resume_without_an_intact_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """The error lists all damaged checkpoints and says what to do; the files are unchanged."""
    model, optimizer = _train_model()
    for step in (1, 2):
        directory = save(tmp_path, TrainingState(step=step), model, optimizer, keep=9)
        _flip_bit_of_last_byte(directory / checkpoint.MOMENTS_FILE)
    files = read_files(tmp_path)
    with pytest.raises(RunError) as caught:
        resume(tmp_path, model, optimizer, RecordingProgress())
    for message in (
        "step-1: this",
        "step-2: this",
        "moments.safetensors does not match",
        "backup",
        f"remove {tmp_path / CHECKPOINTS_DIR} to train again",
    ):
        assert message in str(caught.value)
    assert read_files(tmp_path) == files
    # With a time budget, the new run would already have used its time.
    (tmp_path / ELAPSED_FILE).write_text("{}")
    with pytest.raises(RunError, match=r"checkpoints and .*elapsed\.json to train again from the"):
        resume(tmp_path, model, optimizer, RecordingProgress())


def test_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an intact checkpoint does not fit into memory, it is not renamed or called damaged."""
    model, optimizer = _train_model()
    for step in (1, 2):
        save(tmp_path, TrainingState(step=step), model, optimizer, keep=9)

    def run_out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(checkpoint, "_copy_weights", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        resume(tmp_path, model, optimizer, RecordingProgress())
    with pytest.raises(torch.OutOfMemoryError):
        checkpoint.load_weights(tmp_path / CHECKPOINTS_DIR / "step-2", model)
    assert {path.name for path in (tmp_path / CHECKPOINTS_DIR).iterdir()} == {"step-1", "step-2"}


def test_load_weights_verifies_the_checksum(tmp_path: Path) -> None:
    """Damaged weights are rejected by ``load_weights`` and ``load_best``."""
    model, optimizer = _train_model()
    directory = save(tmp_path, TrainingState(step=4), model, optimizer, keep=1)
    checkpoint.load_weights(directory, model)
    _flip_bit_of_last_byte(directory / checkpoint.WEIGHTS_FILE)
    with pytest.raises(RunError, match=r"weights\.safetensors does not match its checksum"):
        checkpoint.load_weights(directory, model)
    with pytest.raises(RunError, match="holds the best weights of this run; restore it"):
        checkpoint.load_best(tmp_path, 4, model)
    with pytest.raises(RunError, match=r"step-7: this checkpoint cannot be read"):
        checkpoint.load_best(tmp_path, 7, model)


def test_only_step_directories_are_listed(tmp_path: Path) -> None:
    """Only directories named step-N are checkpoints, sorted by number."""
    assert list_checkpoints(tmp_path) == []
    for name in ("step-10", "step-9", "step-x", "step-", "notes"):
        (tmp_path / CHECKPOINTS_DIR / name).mkdir(parents=True)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 10]
