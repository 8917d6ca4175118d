"""Checkpoints: whole or not there, the last few and the best, and damage that is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bertsmith.errors import RunError
from bertsmith.train import checkpoint
from bertsmith.train.checkpoint import FOLDER, State, found, restore, save, sweep


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
    state = State(step=1, seconds=2.5, best_step=1, best_loss=0.75)
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
        save(tmp_path, State(step=step, best_step=best), model, optimizer, keep=2)
        standing.append([step for step, _ in found(tmp_path)])
    assert standing == [
        [1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 10], [10, 11], [10, 11, 12]
    ]  # fmt: skip


@pytest.mark.parametrize("at", ["weights", "moments", "state"])
def test_a_crash_in_the_middle_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whichever file cannot be written, nothing new stands under a checkpoint's name."""
    model, optimizer = _trained()
    save(tmp_path, State(step=1), model, optimizer, keep=1)
    before = _content(tmp_path)
    left = {"weights": 0, "moments": 1, "state": 2}[at]

    def failing(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        save_file(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", failing)
    monkeypatch.setattr(checkpoint, "write_json", failing)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, State(step=2), model, optimizer, keep=1)
    assert _content(tmp_path) == before
    assert [step for step, _ in found(tmp_path)] == [1]


def test_what_a_kill_leaves_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    """Half-written and half-removed directories are never found; the next start sweeps them."""
    model, optimizer = _trained()
    save(tmp_path, State(step=1), model, optimizer, keep=1)
    before = _content(tmp_path)
    for name in (".step-2.4711.tmp", ".step-1.old"):
        (tmp_path / FOLDER / name).mkdir()
        (tmp_path / FOLDER / name / "weights.safetensors").write_bytes(b"half")
    assert [step for step, _ in found(tmp_path)] == [1]
    sweep(tmp_path)
    assert _content(tmp_path) == before


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
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    """RunError names the directory and what to do; nothing is a traceback of a library."""
    model, optimizer = _trained()
    directory = save(tmp_path, State(step=3), model, optimizer, keep=1)
    weights, state = directory / checkpoint.WEIGHTS, directory / checkpoint.STATE
    match damage:
        case "weights short":
            weights.write_bytes(weights.read_bytes()[:-4])
        case "weights gone":
            weights.unlink()
        case "moments empty":
            (directory / checkpoint.MOMENTS).write_bytes(b"")
        case "state torn":
            state.write_text(state.read_text()[:10])
        case "state strange":
            state.write_text(json.dumps({"steps": 3}))
        case _:
            model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    with pytest.raises(RunError, match=r"step-3: this checkpoint cannot be read.*run again"):
        restore(directory, model, optimizer)


def test_foreign_names_are_no_checkpoints(tmp_path: Path) -> None:
    """Only step-N counts, in the order of the numbers; a run without any has none."""
    assert found(tmp_path) == []
    for name in ("step-10", "step-9", "step-x", "step-", "notes"):
        (tmp_path / FOLDER / name).mkdir(parents=True)
    assert [step for step, _ in found(tmp_path)] == [9, 10]
