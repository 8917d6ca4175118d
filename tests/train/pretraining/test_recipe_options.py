"""Options of a recipe: interrupted runs with them end with the bytes of uninterrupted ones."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR, list_checkpoints
from tests.train.conftest import TrainFunction

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"optim__optimizer": "muon"},
    "average": {"optim__average_fraction": 0.3},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_resumed_run_has_the_same_bytes(train: TrainFunction, tmp_path: Path, option: str) -> None:
    """A run that loses its last checkpoints and resumes ends with the same checkpoint and model."""
    arguments: dict[str, Any] = {
        "steps": 7, "checkpoint__every": 1, "checkpoint__keep": 9, "run__eval_every": 2,
        "checkpoint__keep_optimizer": "true", **OPTIONS[option],
    }  # fmt: skip
    train("uninterrupted", **arguments)
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "uninterrupted", run)
    shutil.rmtree(run / "model")
    for step, directory in list_checkpoints(run):
        if step > 3:
            shutil.rmtree(directory)
    train("run", **arguments)
    for folder in ("model", f"{CHECKPOINTS_DIR}/step-7"):
        files = sorted((tmp_path / "uninterrupted" / folder).glob("*.safetensors"))
        assert files
        for file in files:
            assert (run / folder / file.name).read_bytes() == file.read_bytes(), file.name
