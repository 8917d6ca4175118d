"""Stages that make numbers, so that what a bench does is seen without any training.

It never knows what is tested.
"""

from pathlib import Path
from typing import Any

from bertsmith.errors import RunError
from bertsmith.lab.bench import Bench
from bertsmith.lab.making import OUTCOME, Job
from bertsmith.progress import Silent


def number(job: Job) -> dict[str, Any]:
    """Write a number that is one more than those that it needs, and return it."""
    needed = [int((path).read_text()) for path in job.needs.values()]
    value = 1 + sum(needed) + job.stage.settings.get("add", 0)
    if job.stage.settings.get("diverges"):
        return {"diverged": "the loss is nan"}
    if job.stage.settings.get("fails"):
        raise RunError("it was to fail")
    if job.stage.settings.get("breaks"):
        raise ZeroDivisionError("a fault of ours")
    (job.folder / OUTCOME).write_text(str(value))
    return {"value": value}


def bench(folder: Path) -> Bench:
    """Return a bench that knows how numbers are made."""
    return Bench(folder / "out", folder / "work", Silent(), {"number": number})
