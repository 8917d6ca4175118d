"""Describe what is made of many: a fine-tuning with several seeds, and an index of embedded lines.

It never loads a model.
"""

from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import RunError
from bertsmith.train.several import RESULTS
from bertsmith.use.description import Description, flat, indented, read_object
from bertsmith.use.neighbours import VECTORS, mapped
from bertsmith.use.search import about_index


def describe_several(path: Path) -> Description:
    """Describe the runs of ``finetune --seeds`` or ``--grid``: their figures, and the best one."""
    runs = sorted(file.parent for file in path.glob("*seed-*/settings.toml"))
    done = [run.name for run in runs if (run / "model").is_dir()]
    facts: dict[str, Any] = {"path": str(path), "runs": [run.name for run in runs], "done": done}
    if not (path / RESULTS).exists():
        state = f"{len(done)} of {len(runs)} begun are finished: the same command goes on with them"
        listed = [f"  {run.name}" for run in runs]
        return Description(facts, [f"runs {path}: {state}", *listed])
    results = read_object(path / RESULTS)
    if not {"metric", "best", "settings", "counts"} <= set(results):
        raise RunError(f"{path / RESULTS}: it is broken; the same command as before makes it anew")
    metric = results["metric"]
    lines = [f"runs {path}: {len(runs)}, all finished; the best one by {metric}: {results['best']}"]
    for own in results["settings"]:
        chosen = ", ".join(f"{key} {value}" for key, value in own["chosen"].items())
        figures = f"{own['median']:.4f} ({own['least']:.4f} to {own['greatest']:.4f})"
        lines += ["", f"{chosen + ': ' if chosen else ''}{metric}, median and range: {figures}"]
        lines += indented((name, f"{run[metric]:.4f}") for name, run in own["runs"].items())
    lines += ["", "examples", *indented(flat(results["counts"]))]
    return Description(facts | results, lines)


def describe_index(path: Path) -> Description:
    """Describe an index that ``embed`` wrote: how many lines, and what made their vectors."""
    about, shape = about_index(path), np.shape(mapped(path / VECTORS))
    counts = {"lines": shape[0], "width": shape[1]}
    lines = [f"index {path}: {shape[0]:,} lines, vectors of {shape[1]:,} numbers"]
    return Description({"path": str(path), **counts, "made": about}, lines + indented(flat(about)))
