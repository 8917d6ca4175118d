"""The same fine-tuning several times: other seeds, or the paper's grid; the best one is kept.

It never knows how one run trains.
"""

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
from bertsmith.settings import merge_settings, parse_assignments, user_settings
from bertsmith.tasks.metrics import LOWER_IS_BETTER
from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.finetuning.finetune import MODEL_DIR, FinetuneResult, finetune

#: Batch, learning rate, epochs: appendix A.3 of the paper.
GRID: dict[str, tuple[Any, ...]] = {
    "task.batch": (16, 32), "optim.lr": (5e-5, 3e-5, 2e-5), "schedule.epochs": (2.0, 3.0, 4.0),
}  # fmt: skip
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class GridPoint:
    """One place of the grid and its runs, one a seed."""

    hyperparameters: dict[str, Any]
    runs: list[FinetuneResult]

    def metric_over_seeds(self, metric: str) -> tuple[float, float, float]:
        """Return median, least and greatest of a metric over the seeds; NaN is the worst."""
        found = [_or_worst(run.figures[metric], metric) for run in self.runs]
        middle, least, most = (
            math.nan if math.isinf(one) else one for one in (median(found), min(found), max(found))
        )
        return middle, least, most


@dataclass(frozen=True)
class SweepResult:
    """All runs under ``out``. best: the run with the best first metric; model: a copy of its own.

    stopped_run: the run that a signal stopped, or the one after which it did, if one came; what was
    not begun is not there, and nothing was chosen.
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
    config: Path | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Fine-tune once for each seed (from ``run.seed`` on) and place of the grid; see ``finetune``.

    Each run has a folder of its own under ``out``, and its checkpoints go when it is finished;
    called again, finished runs are not repeated. The best by the first metric becomes
    ``out``/model, and ``out``/results.json has the figures of all. Raises BertsmithError.
    """
    folder, progress = Path(out), progress or NullProgress()
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: this is a file; give --out a new directory")
    taken = (folder / SETTINGS_FILE).exists() or (folder / MODEL_DIR).exists()
    if taken and not any(folder.glob(f"*seed-*/{SETTINGS_FILE}")):
        raise RunError(f"{folder}: a model or a single run stands here; give --out a new directory")
    said = user_settings(config, values, assignments)
    if grid:
        _refuse_said_twice(said)
    run_table = said.get("run", {})
    first = run_table.get("seed", 0) if isinstance(run_table, Mapping) else 0
    if type(first) is not int:
        raise SettingsError(f"run.seed is {first!r}; expected a number from 0 on")
    places = (
        [dict(zip(GRID, one, strict=True)) for one in product(*GRID.values())] if grid else [{}]
    )
    found: list[GridPoint] = []
    stopped = None
    for chosen in places:
        found.append(GridPoint(chosen, []))
        for seed in range(first, first + seeds):
            own = parse_assignments([f"{key}={value}" for key, value in chosen.items()])
            own = merge_settings(merge_settings(said, own), {"run": {"seed": seed}})
            run = folder / _name(chosen, seed)
            result = finetune(task, model, run, data=data, values=own, progress=progress)
            if result.signal is None:
                shutil.rmtree(run / CHECKPOINTS_DIR, ignore_errors=True)
                found[-1].runs.append(result)
            # A signal that came too late to stop a run stops those that would follow it.
            more = chosen is not places[-1] or seed < first + seeds - 1
            if result.signal is not None or (result.late is not None and more):
                stopped = result
                break
        if stopped:
            break
    return _told(folder, [one for one in found if one.runs], stopped)


def _refuse_said_twice(said: Mapping[str, Any]) -> None:
    """Refuse what the grid says itself, and steps, beside which its epochs would be idle."""
    for key in (*GRID, "schedule.steps"):
        table, _, name = key.partition(".")
        own = said.get(table)
        if isinstance(own, Mapping) and own.get(name) is not None:
            raise SettingsError(
                f"{key} is {own[name]}, but the grid sets batch, learning rate and epochs itself; "
                f"leave {key} out, or the grid"
            )


def _name(chosen: Mapping[str, Any], seed: int) -> str:
    """Return the name of a run's folder, such as "batch-16_lr-5e-05_epochs-2.0_seed-0"."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in chosen.items()]
    return "_".join([*parts, f"seed-{seed}"])


def _told(folder: Path, found: list[GridPoint], stopped: FinetuneResult | None) -> SweepResult:
    runs = [run for one in found for run in one.runs]
    if stopped or not runs:
        return SweepResult(folder, found, None, None, stopped)
    metric = runs[0].metrics[0]
    # A correlation with a constant is NaN, and worse than any other.
    choose = min if metric in LOWER_IS_BETTER else max
    best = choose(runs, key=lambda run: _or_worst(run.figures[metric], metric))
    if not (best.run / MODEL_DIR).exists():
        raise RunError(
            f"{best.run}: this run is the best one, but its model is gone; remove the run, and the "
            "same command trains it again"
        )
    with atomic_directory(folder / MODEL_DIR) as new:
        shutil.copytree(best.run / MODEL_DIR, new, dirs_exist_ok=True)
    table = [
        {"chosen": one.hyperparameters,
         **dict(zip(("median", "least", "greatest"), one.metric_over_seeds(metric), strict=True)),
         "runs": {run.run.name: run.figures for run in one.runs}}
        for one in found
    ]  # fmt: skip
    told = {"metric": metric, "best": best.run.name, "settings": table, "counts": best.counts}
    write_json(folder / RESULTS_FILE, told)
    return SweepResult(folder, found, best, folder / MODEL_DIR, None)


def _or_worst(score: float, metric: str) -> float:
    worst = math.inf if metric in LOWER_IS_BETTER else -math.inf
    return worst if math.isnan(score) else score
