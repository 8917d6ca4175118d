"""Describe sweeps (fine-tuning with several seeds or settings) and indexes of embedded lines."""

from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.compatibility import upgrade_sweep_results
from bertsmith.errors import RunError
from bertsmith.files import restore_nan
from bertsmith.plurals import count_noun
from bertsmith.train.finetuning.sweep import RESULTS_FILE
from bertsmith.use.inspection.describe import is_finished_run
from bertsmith.use.inspection.description import (
    Description,
    flatten_mapping,
    format_aligned,
    read_json_object,
)
from bertsmith.use.nearest_neighbors import (
    VECTORS_FILE,
    create_damaged_index_error,
    memory_map_array,
)
from bertsmith.use.search_index import read_index_manifest


def describe_sweep(path: Path) -> Description:
    """Describe the runs of ``finetune --seeds`` or ``--grid``: metrics, and which run is best.

    Raises:
        RunError: The results file is damaged.
    """
    runs = sorted(file.parent for file in path.glob("*seed-*/settings.toml"))
    run_names = [run.name for run in runs]
    finished_names = [run.name for run in runs if is_finished_run(run)]
    facts: dict[str, Any] = {"path": str(path), "runs": run_names, "finished_runs": finished_names}
    results: dict[str, Any] = {}
    names_in_results: set[str] = set()
    lines: list[str] = []
    try:
        if (path / RESULTS_FILE).exists():
            results = upgrade_sweep_results(read_json_object(path / RESULTS_FILE))
            names_in_results = {name for point in results["points"] for name in point["runs"]}
            lines = _format_results(results)
    except (KeyError, TypeError, AttributeError):
        raise RunError(
            f"{path / RESULTS_FILE}: damaged; repeat the command that wrote it"
        ) from None
    all_are_finished = set(finished_names) == set(run_names)
    all_have_results = names_in_results >= set(run_names)
    if all_are_finished and all_have_results:
        first_line = f"runs {path}: {len(runs)}, all finished"
    else:
        first_line = (
            f"runs {path}: {len(finished_names)} of {len(runs)} started runs are finished; repeat "
            "the same command to continue"
        )
        unfinished = [
            f"  {name}"
            for name in run_names
            if name not in names_in_results or name not in finished_names
        ]
        lines = ["", "unfinished, or not in the results yet", *unfinished, *lines]
    return Description(facts | results, [first_line, *lines])


def _format_results(results: dict[str, Any]) -> list[str]:
    """Format the contents of results.json: the best run, and the metrics of each grid point."""
    metric = results["metric"]
    lines = ["", f"best run by {metric}: {results['best']}"]
    for json_point in results["points"]:
        point = restore_nan(json_point)
        name = ", ".join(f"{key} {value}" for key, value in point["hyperparameters"].items())
        values = f"{point['median']:.4f} ({point['min']:.4f} to {point['max']:.4f})"
        lines += ["", f"{name + ': ' if name else ''}{metric}, median and range: {values}"]
        runs = ((run, restore_nan(metrics)[metric]) for run, metrics in point["runs"].items())
        lines += format_aligned((run, f"{value:.4f}") for run, value in runs)
    return [*lines, "", "examples", *format_aligned(flatten_mapping(results["counts"]))]


def describe_index(path: Path) -> Description:
    """Describe an index written by ``embed``: its size, and how its vectors were computed.

    Raises:
        InputError: The index is missing or damaged.
    """
    manifest = read_index_manifest(path)
    shape = np.shape(memory_map_array(path / VECTORS_FILE))
    if len(shape) != 2:
        raise create_damaged_index_error(
            path / VECTORS_FILE, f"shape {shape}; expected lines and width"
        )
    counts = {"num_lines": shape[0], "width": shape[1]}
    lines = [
        f"index {path}: {count_noun(shape[0], 'line')}, vectors of {count_noun(shape[1], 'number')}"
    ]
    facts = {"path": str(path), **counts, "settings": manifest}
    # The manifest has the settings that were given, such as no pooling.
    displayed_manifest = {
        name: "default of the model" if value is None else value for name, value in manifest.items()
    }
    return Description(facts, lines + format_aligned(flatten_mapping(displayed_manifest)))
