"""Describe what is made of many: a fine-tuning with several seeds, and an index of embedded lines.

It never loads a model.
"""

from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import RunError
from bertsmith.files import restore_nan
from bertsmith.train.finetuning.sweep import RESULTS_FILE
from bertsmith.use.inspection.describe import is_finished
from bertsmith.use.inspection.description import (
    Description,
    flatten,
    format_aligned,
    read_json_object,
)
from bertsmith.use.nearest_neighbors import VECTORS_FILE, damaged_index_error, open_mapped_array
from bertsmith.use.search import read_index_manifest


def describe_sweep(path: Path) -> Description:
    """Describe the runs of ``finetune --seeds`` or ``--grid``: their figures, and the best one."""
    runs = sorted(file.parent for file in path.glob("*seed-*/settings.toml"))
    names, done = ([run.name for run in own] for own in (runs, filter(is_finished, runs)))
    facts: dict[str, Any] = {"path": str(path), "runs": names, "done": done}
    results = read_json_object(path / RESULTS_FILE) if (path / RESULTS_FILE).exists() else None
    try:
        lines = [] if results is None else _told(results)
        told = {name for own in (results or {"settings": []})["settings"] for name in own["runs"]}
    except (KeyError, TypeError, AttributeError):
        raise RunError(
            f"{path / RESULTS_FILE}: it is broken; the same command as before makes it anew"
        ) from None
    if told >= set(names) == set(done):
        first = f"runs {path}: {len(runs)}, all finished"
    else:
        first = (
            f"runs {path}: {len(done)} of {len(runs)} begun are finished: the same command goes on "
            "with them"
        )
        unfinished = [f"  {name}" for name in names if name not in told or name not in done]
        lines = ["", "not finished, or not counted yet", *unfinished, *lines]
    return Description(facts | (results or {}), [first, *lines])


def _told(results: dict[str, Any]) -> list[str]:
    """Return the figures of results.json as lines: the best run, and those of each setting."""
    metric = results["metric"]
    lines = ["", f"the best one by {metric}: {results['best']}"]
    for setting in results["settings"]:
        own = restore_nan(setting)
        chosen = ", ".join(f"{key} {value}" for key, value in own["chosen"].items())
        figures = f"{own['median']:.4f} ({own['least']:.4f} to {own['greatest']:.4f})"
        lines += ["", f"{chosen + ': ' if chosen else ''}{metric}, median and range: {figures}"]
        runs = ((name, restore_nan(run)[metric]) for name, run in own["runs"].items())
        lines += format_aligned((name, f"{value:.4f}") for name, value in runs)
    return [*lines, "", "examples", *format_aligned(flatten(results["counts"]))]


def describe_index(path: Path) -> Description:
    """Describe an index that ``embed`` wrote: how many lines, and what made their vectors."""
    about, shape = read_index_manifest(path), np.shape(open_mapped_array(path / VECTORS_FILE))
    if len(shape) != 2:
        raise damaged_index_error(
            path / VECTORS_FILE, ValueError(f"shape {shape}; expected lines and width")
        )
    counts = {"lines": shape[0], "width": shape[1]}
    lines = [f"index {path}: {shape[0]:,} lines, vectors of {shape[1]:,} numbers"]
    return Description(
        {"path": str(path), **counts, "made": about}, lines + format_aligned(flatten(about))
    )
