"""Stages that make numbers, so that what a bench does is seen without any training.

It never knows what is tested.
"""

import json
from pathlib import Path
from typing import Any

from bertsmith.errors import RunError
from bertsmith.lab.results import RESULTS_FILE
from bertsmith.lab.runner import Runner
from bertsmith.lab.stage_runners import OUTPUT, Job
from bertsmith.progress import NullProgress


def run_number_stage(job: Job) -> dict[str, Any]:
    """Write a number that is one more than those that it needs, and return it."""
    needed = [int((path).read_text()) for path in job.inputs.values()]
    value = 1 + sum(needed) + job.stage.settings.get("add", 0)
    if job.stage.settings.get("diverges"):
        return {"diverged": "the loss is nan"}
    if job.stage.settings.get("fails"):
        raise RunError("it was to fail")
    if job.stage.settings.get("breaks"):
        raise ZeroDivisionError("a fault of ours")
    (job.folder / OUTPUT).write_text(str(value))
    return {"value": value}


def make_runner(folder: Path) -> Runner:
    """Return a bench that knows how numbers are made."""
    return Runner(folder / "out", folder / "work", NullProgress(), {"number": run_number_stage})


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a results file by name, the last one of each."""
    lines = (folder / RESULTS_FILE).read_text(encoding="utf-8").splitlines()
    return {record["name"]: record for record in map(json.loads, lines)}


def remove_record(folder: Path, name: str) -> None:
    """Remove the lines of a name from a results file."""
    path = folder / RESULTS_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["name"] != name))
