"""Repeating the command of a finished run, or of one whose files were removed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import RunError
from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR
from bertsmith.train.engine.metrics_log import METRICS_FILE
from bertsmith.train.pretraining.pretrain import pretrain
from tests.data.synthetic_corpus import read_files
from tests.train.conftest import RecordingProgress, make_assignments


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_finished_run_is_not_changed(
    finished_run: Path, store: Path, tmp_path: Path, has_checkpoints: bool
) -> None:
    """Repeating the command of a finished run takes no step and changes no file but the curve.

    It needs no checkpoint, and an edited model card stays.
    """
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    if not has_checkpoints:
        shutil.rmtree(run / CHECKPOINTS_DIR)
    (run / "model" / "README.md").write_text("an edited model card")
    old_files = read_files(run)
    progress = RecordingProgress()
    arguments: dict[str, Any] = {"assignments": make_assignments(run__eval_every=4)}
    result = pretrain(store, run, steps=8, progress=progress, **arguments)
    new_files = read_files(run)
    assert any("this run is already finished (step 8 of 8)" in line for line in progress.messages)
    assert not any("resuming" in line for line in progress.messages)
    assert result.outcome.state.step == 8
    assert result.outcome.state.seconds > 0
    assert result.heldout == pretrain(store, finished_run, steps=8, **arguments).heldout
    for name in old_files.keys() - {"curve.png"}:
        assert new_files[name] == old_files[name], name


def test_model_of_an_unfinished_run_is_not_overwritten(
    finished_run: Path, store: Path, tmp_path: Path
) -> None:
    """A run with a model, but without checkpoints and its last evaluation, is not trained again."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / CHECKPOINTS_DIR)
    (run / METRICS_FILE).unlink()
    files = read_files(run)
    with pytest.raises(RunError, match=r"has a model, but neither a checkpoint .*run/model to "):
        pretrain(store, run, steps=8, assignments=make_assignments(run__eval_every=4))
    assert read_files(run) == files
