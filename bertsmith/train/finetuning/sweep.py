"""Repeats a fine-tuning run over seeds or the paper's grid, and copies the best model."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bertsmith.errors import RunError, SettingsError
from bertsmith.files import atomic_directory, write_json
from bertsmith.progress import NullProgress, Progress
from bertsmith.settings import get_table, merge_settings, parse_assignments
from bertsmith.tasks.metrics import LOWER_IS_BETTER
from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.run_directory import MODEL_DIR, SETTINGS_FILE
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.finetuning.settings import read_overrides

#: Batch size, learning rate and epochs of appendix A.3.
GRID: dict[str, tuple[Any, ...]] = {
    "task.batch_size": (16, 32),
    "optim.lr": (5e-5, 3e-5, 2e-5),
    "schedule.epochs": (2.0, 3.0, 4.0),
}
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class GridPoint:
    """The hyperparameters of a grid point, and the results of its runs with different seeds."""

    hyperparameters: dict[str, Any]
    runs: list[FinetuneResult]

    def summarize_metric(self, metric: str) -> tuple[float, float, float]:
        """Return median, minimum and maximum of a metric over the seeds.

        NaN counts as the worst score.
        """
        scores = [_replace_nan_by_worst(result.metrics[metric], metric) for result in self.runs]
        statistics = (median(scores), min(scores), max(scores))
        median_score, min_score, max_score = (
            math.nan if math.isinf(score) else score for score in statistics
        )
        return median_score, min_score, max_score


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
        out: Directory of the sweep.
        points: Grid points with finished runs; a sweep without a grid has only one point.
        best: The run with the best value of the first metric; None if the sweep was stopped.
        model: Copy of the model directory of the best run; None if the sweep was stopped.
        stopped_run: The run in which a signal stopped the sweep; None if the sweep is finished.
    """

    out: Path
    points: list[GridPoint]
    best: FinetuneResult | None
    model: Path | None
    stopped_run: FinetuneResult | None


def run_sweep(
    task: str,
    model: Path | str,
    out: Path | str,
    *,
    seeds: int = 1,
    grid: bool = False,
    data: Path | str | None = None,
    config: Path | str | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Fine-tune once for each grid point and seed, and copy the best model to ``out``/model.

    Each run has its own directory in ``out``; its checkpoints are removed when it is finished. The
    metrics of all runs are written to ``out``/results.json. If the sweep was stopped, a call with
    the same arguments resumes it; finished runs are not repeated.

    Args:
        task: Name of a public task or of a task family, as in ``finetune``.
        model: Model to start from.
        out: Directory of the sweep.
        seeds: Number of seeds, starting at ``run.seed``.
        grid: Whether to run all points of the paper's grid, ``GRID``.
        data: Data folder or training file.
        config: TOML file with settings.
        assignments: Settings as "section.name=value".
        values: Nested settings.
        progress: Receives log messages and the progress bars.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    out = Path(out)
    progress = progress or NullProgress()
    _check_sweep_directory(out)
    data = Path(data) if data else None
    overrides = read_overrides(task, data, config, values, assignments)
    if grid:
        _check_no_grid_settings(overrides)
    first_seed = _get_first_seed(overrides)
    points = _create_grid_points() if grid else [GridPoint({}, [])]
    planned_runs = list(product(points, range(first_seed, first_seed + seeds)))
    stopped_run = None
    for index, (point, seed) in enumerate(planned_runs):
        run_values = _build_run_values(overrides, point.hyperparameters, seed)
        run = out / _format_run_name(point.hyperparameters, seed)
        result = finetune(task, model, run, data=data, values=run_values, progress=progress)
        if result.signal is None:
            if not get_table(overrides, "checkpoint").get("keep_optimizer"):
                shutil.rmtree(run / CHECKPOINTS_DIR, ignore_errors=True)
            point.runs.append(result)
        # A signal in the last step of this run stops the sweep before the next run.
        is_last = index == len(planned_runs) - 1
        if result.signal is not None or (result.late_signal is not None and not is_last):
            stopped_run = result
            break
    return _save_best_model(out, [point for point in points if point.runs], stopped_run)


def _check_sweep_directory(out: Path) -> None:
    """Raise RunError if ``out`` is a file, or the directory of a model or a single run."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out}: this is a file; give --out a new directory")
    has_run_or_model = (out / SETTINGS_FILE).exists() or (out / MODEL_DIR).exists()
    if has_run_or_model and not any(out.glob(f"*seed-*/{SETTINGS_FILE}")):
        raise RunError(
            f"{out}: this directory contains a model or a single run; give --out a new directory"
        )


def _check_no_grid_settings(overrides: Mapping[str, Any]) -> None:
    """Raise SettingsError if the user sets a hyperparameter of the grid, or the number of steps."""
    for key in (*GRID, "schedule.steps"):
        section, _, name = key.partition(".")
        table = overrides.get(section)
        if isinstance(table, Mapping) and table.get(name) is not None:
            raise SettingsError(
                f"{key} is {table[name]}, but the grid sets batch size, learning rate and epochs; "
                f"leave out {key} or the grid"
            )


def _get_first_seed(overrides: Mapping[str, Any]) -> int:
    """Return the user's ``run.seed``; 0 if it is not set.

    Raises:
        SettingsError: If it is not an integer.
    """
    run_table = overrides.get("run", {})
    first_seed = run_table.get("seed", 0) if isinstance(run_table, Mapping) else 0
    if type(first_seed) is not int:
        raise SettingsError(f"run.seed is {first_seed!r}; expected an integer of at least 0")
    return first_seed


def _create_grid_points() -> list[GridPoint]:
    """Return a grid point without runs for each combination of the values of ``GRID``."""
    combinations = product(*GRID.values())
    return [GridPoint(dict(zip(GRID, values, strict=True)), []) for values in combinations]


def _build_run_values(
    overrides: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return the user's settings with the hyperparameters and the seed of a run."""
    assignments = [f"{key}={value}" for key, value in hyperparameters.items()]
    values = merge_settings(overrides, parse_assignments(assignments))
    return merge_settings(values, {"run": {"seed": seed}})


def _format_run_name(hyperparameters: Mapping[str, Any], seed: int) -> str:
    """Return the directory name of a run, such as "batch-16_lr-5e-05_epochs-2.0_seed-0"."""
    parts = []
    for key, value in hyperparameters.items():
        name = key.rpartition(".")[2].removesuffix("_size")
        parts.append(f"{name}-{value}")
    return "_".join([*parts, f"seed-{seed}"])


def _save_best_model(
    out: Path, points: list[GridPoint], stopped_run: FinetuneResult | None
) -> SweepResult:
    """Copy the model of the best run and write results.json, unless the sweep was stopped."""
    results = [result for point in points for result in point.runs]
    if stopped_run or not results:
        return SweepResult(out, points, None, None, stopped_run)
    metric = results[0].metric_names[0]
    select = min if metric in LOWER_IS_BETTER else max
    best = select(results, key=lambda result: _replace_nan_by_worst(result.metrics[metric], metric))
    if not (best.run / MODEL_DIR).exists():
        raise RunError(
            f"{best.run}: this is the best run, but its model directory is missing; remove the run "
            "and repeat the command to train it again"
        )
    with atomic_directory(out / MODEL_DIR) as new:
        shutil.copytree(best.run / MODEL_DIR, new, dirs_exist_ok=True)
    statistic_names = ("median", "min", "max")
    table = [
        {
            "hyperparameters": point.hyperparameters,
            **dict(zip(statistic_names, point.summarize_metric(metric), strict=True)),
            "runs": {result.run.name: result.metrics for result in point.runs},
        }
        for point in points
    ]
    summary = {"metric": metric, "best": best.run.name, "points": table, "counts": best.counts}
    write_json(out / RESULTS_FILE, summary)
    return SweepResult(out, points, best, out / MODEL_DIR, None)


def _replace_nan_by_worst(score: float, metric: str) -> float:
    """Replace a NaN score by the worst possible score; correlations with a constant are NaN."""
    worst = math.inf if metric in LOWER_IS_BETTER else -math.inf
    return worst if math.isnan(score) else score
