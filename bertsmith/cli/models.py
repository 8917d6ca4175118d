"""Finds the model that a command line names, before torch is loaded."""

import atexit
import shutil
import tempfile
from pathlib import Path

from bertsmith.cli.console import log


def find_model(model: Path) -> Path:
    """Return ``model``; of a run without a model yet, its last checkpoint as a model directory.

    The copy is removed when the program ends. Raises ModelError where nothing is found.
    """
    from bertsmith.bundle.directory import is_unfinished_run, locate_model

    if not is_unfinished_run(model):
        locate_model(model)
        return model
    from bertsmith.train.pretraining.snapshot import write_latest_snapshot

    folder = Path(tempfile.mkdtemp(prefix="bertsmith-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    step, steps = write_latest_snapshot(model, folder / "model")
    log(f"{model}: this run is not finished; using its last checkpoint, step {step:,} of {steps:,}")
    return folder / "model"
