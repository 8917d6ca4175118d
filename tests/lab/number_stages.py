"""Stages that compute numbers, for fast tests of the runner."""

import json
from pathlib import Path
from typing import Any

from bertsmith.errors import RunError
from bertsmith.lab.results import RESULTS_FILE
from bertsmith.lab.runner import Runner
from bertsmith.lab.stage_runners import Job
from bertsmith.progress import NullProgress


def run_number_stage(job: Job) -> dict[str, Any]:
    """Write and return the sum of 1, the inputs and the setting ``add``.

    The settings ``diverges``, ``fails`` and ``breaks`` make the stage diverge, fail with an
    expected error, or fail with an unexpected error.
    """
    settings = job.stage.settings
    inputs = [int(path.read_text()) for path in job.inputs.values()]
    value = 1 + sum(inputs) + settings.get("add", 0)
    if settings.get("diverges"):
        return {"diverged": "the loss is nan"}
    if settings.get("fails"):
        raise RunError("expected failure")
    if settings.get("breaks"):
        raise ZeroDivisionError("unexpected error")
    job.output.write_text(str(value))
    return {"value": value}


def make_runner(folder: Path) -> Runner:
    """Return a runner that runs stages of kind "number"."""
    return Runner(folder / "out", folder / "work", NullProgress(), {"number": run_number_stage})


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each stage in a results file, by stage name."""
    lines = (folder / RESULTS_FILE).read_text(encoding="utf-8").splitlines()
    return {record["name"]: record for record in map(json.loads, lines)}


def remove_record(folder: Path, name: str) -> None:
    """Remove the records of a stage from a results file."""
    path = folder / RESULTS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["name"] != name))
