"""Checkpoints: whole or not there, the last few and the best, and damage that is told."""

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
from bertsmith.progress import NullProgress
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.checkpoint import (
    CHECKPOINTS_DIR,
    TrainingState,
    list_checkpoints,
    remove_partial_checkpoints,
    restore,
    resume,
    save,
)


def _trained(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a small model after one step, so that it has moments."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([[1.0, -2.0, 0.5]])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _content(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def test_a_restored_run_takes_the_same_step(tmp_path: Path) -> None:
    """Weights, moments, count of steps and state come back bit by bit."""
    model, optimizer = _trained()
    state = TrainingState(step=1, seconds=2.5, best_step=1, best_loss=0.75)
    directory = save(tmp_path, state, model, optimizer, keep=2)
    other, fresh = _trained(seed=9)
    assert restore(directory, other, fresh) == state
    _step(model, optimizer)
    _step(other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[one][kind], fresh.state[two][kind])


def test_the_last_few_and_the_best_stay(tmp_path: Path) -> None:
    """Of ten checkpoints the last two stay, and the best one as long as it is the best."""
    model, optimizer = _trained()
    standing = []
    for step, best in [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (10, 10), (11, 10), (12, 10)]:
        save(tmp_path, TrainingState(step=step, best_step=best), model, optimizer, keep=2)
        standing.append([step for step, _ in list_checkpoints(tmp_path)])
    assert standing == [
        [1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 10], [10, 11], [10, 11, 12]
    ]  # fmt: skip


@pytest.mark.parametrize("at", ["weights", "moments", "state", "checksums"])
def test_a_crash_in_the_middle_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whichever file cannot be written, nothing new stands under a checkpoint's name."""
    model, optimizer = _trained()
    save(tmp_path, TrainingState(step=1), model, optimizer, keep=1)
    before = _content(tmp_path)
    files_before_failure = {"weights": 0, "moments": 1, "state": 2, "checksums": 3}[at]

    def fails_later(write: Callable[..., None]) -> Callable[..., None]:
        def replacement(*arguments: Any) -> None:
            nonlocal files_before_failure
            files_before_failure -= 1
            if files_before_failure < 0:
                raise OSError(28, "No space left on device")
            write(*arguments)

        return replacement

    monkeypatch.setattr(checkpoint, "save_tensors", fails_later(save_tensors))
    monkeypatch.setattr(checkpoint, "write_json", fails_later(write_json))
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, TrainingState(step=2), model, optimizer, keep=1)
    assert _content(tmp_path) == before
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]


def test_what_a_kill_leaves_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    """Half-written and half-removed directories are never found; the next start sweeps them."""
    model, optimizer = _trained()
    save(tmp_path, TrainingState(step=1), model, optimizer, keep=1)
    before = _content(tmp_path)
    for name in (".step-2.4711.tmp", ".step-1.old"):
        (tmp_path / CHECKPOINTS_DIR / name).mkdir()
        (tmp_path / CHECKPOINTS_DIR / name / "weights.safetensors").write_bytes(b"half")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    remove_partial_checkpoints(tmp_path)
    assert _content(tmp_path) == before


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        "weights short",
        "weights gone",
        "moments empty",
        "state torn",
        "state strange",
        "other model",
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str, has_checksums: bool) -> None:
    """RunError names the directory; nothing is a traceback of a library."""
    model, optimizer = _trained()
    directory = save(tmp_path, TrainingState(step=3), model, optimizer, keep=1)
    weights, state = directory / checkpoint.WEIGHTS_FILE, directory / checkpoint.STATE_FILE
    if not has_checksums:
        (directory / checkpoint.CHECKSUMS_FILE).unlink()
    match damage:
        case "weights short":
            weights.write_bytes(weights.read_bytes()[:-4])
        case "weights gone":
            weights.unlink()
        case "moments empty":
            (directory / checkpoint.MOMENTS_FILE).write_bytes(b"")
        case "state torn":
            state.write_text(state.read_text()[:10])
        case "state strange":
            state.write_text(json.dumps({"steps": 3}))
        case _:
            model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    with pytest.raises(RunError, match=r"step-3: this checkpoint cannot be read"):
        restore(directory, model, optimizer)


class RecordingProgress(NullProgress):
    """Progress that collects the notes."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Collect a note."""
        self.messages.append(text)


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


FILES = (
    checkpoint.WEIGHTS_FILE,
    checkpoint.MOMENTS_FILE,
    checkpoint.STATE_FILE,
    checkpoint.CHECKSUMS_FILE,
)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_falls_back_to_the_checkpoint_before(tmp_path: Path, name: str) -> None:
    """The damaged checkpoint is named and set aside; weights and moments of the older one load."""
    model, optimizer = _trained()
    save(tmp_path, TrainingState(step=1), model, optimizer, keep=9)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    _step(model, optimizer)
    newest = save(tmp_path, TrainingState(step=2), model, optimizer, keep=9)
    _flip_last_byte(newest / name)
    damaged = _content(newest)
    other, fresh = _trained(seed=9)
    notes = RecordingProgress()
    assert resume(tmp_path, other, fresh, notes) == TrainingState(step=1)
    assert all(map(torch.equal, other.parameters(), expected))
    assert all(float(fresh.state[one]["step"]) == 1.0 for one in other.parameters())
    (text,) = notes.messages
    assert text.startswith(f"{newest}: this checkpoint cannot be read: ")
    assert text.endswith("; kept as step-2.damaged")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    assert _content(newest.with_name("step-2.damaged")) == damaged
    # A new checkpoint of that step, damaged as well, replaces the one that was set aside.
    _flip_last_byte(save(tmp_path, TrainingState(step=2), model, optimizer, keep=9) / name)
    assert resume(tmp_path, other, fresh, notes).step == 1
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-1", "step-2.damaged"]


def test_without_an_intact_checkpoint_nothing_is_renamed(tmp_path: Path) -> None:
    """The error names each checkpoint with its reason and says what to do; the files stay."""
    model, optimizer = _trained()
    for step in (1, 2):
        directory = save(tmp_path, TrainingState(step=step), model, optimizer, keep=9)
        _flip_last_byte(directory / checkpoint.MOMENTS_FILE)
    before = _content(tmp_path)
    with pytest.raises(RunError) as raised:
        resume(tmp_path, model, optimizer, RecordingProgress())
    for words in ("step-1: this", "step-2: this", "moments.safetensors does not match", "backup",
                  f"remove {tmp_path / CHECKPOINTS_DIR} to train again"):  # fmt: skip
        assert words in str(raised.value)
    assert _content(tmp_path) == before


def test_weights_alone_are_verified_too(tmp_path: Path) -> None:
    """Neither a snapshot nor the best weights of a fine-tuning are read from a damaged file."""
    model, optimizer = _trained()
    directory = save(tmp_path, TrainingState(step=4), model, optimizer, keep=1)
    checkpoint.load_weights(directory, model)
    _flip_last_byte(directory / checkpoint.WEIGHTS_FILE)
    with pytest.raises(RunError, match=r"weights\.safetensors does not match its checksum"):
        checkpoint.load_weights(directory, model)
    with pytest.raises(RunError, match="holds the best weights of this run; restore it"):
        checkpoint.load_best(tmp_path, 4, model)
    with pytest.raises(RunError, match=r"step-7: this checkpoint cannot be read"):
        checkpoint.load_best(tmp_path, 7, model)


def test_foreign_names_are_no_checkpoints(tmp_path: Path) -> None:
    """Only step-N counts, in the order of the numbers; a run without any has none."""
    assert list_checkpoints(tmp_path) == []
    for name in ("step-10", "step-9", "step-x", "step-", "notes"):
        (tmp_path / CHECKPOINTS_DIR / name).mkdir(parents=True)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 10]
