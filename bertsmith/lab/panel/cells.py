"""The cells of the panel: one stage for each model, task and seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bertsmith.lab.panel.models import PanelModel
from bertsmith.lab.panel.stage_functions import HELD_OUT_KIND, MINIMAL_PAIRS_KIND, PROBE_KIND
from bertsmith.lab.panel.tasks import BATCH_SIZE, LEARNING_RATE, PanelTask
from bertsmith.lab.stage import Stage


class CellKey(NamedTuple):
    """Identifies a cell."""

    model: str
    task: str
    seed: int

    def describe(self) -> str:
        """Return the name of the cell in messages, such as "my-run, sst-2-1k, seed 0"."""
        return f"{self.model}, {self.task}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class PanelOptions:
    """Sizes of the evaluations.

    Attributes:
        num_seeds: Number of seeds of tasks whose result depends on a seed.
        learning_rate: Peak learning rate of fine-tuning, the same for all models and tasks.
        max_pairs: Maximum minimal pairs of each file, the first ones; None for all.
        num_sentences: Sentences of the held-out text.
    """

    num_seeds: int = 3
    learning_rate: float = LEARNING_RATE
    max_pairs: int | None = 250
    num_sentences: int = 1000


def create_cells(
    model: PanelModel,
    task: PanelTask,
    files: Mapping[str, Path],
    options: PanelOptions,
    work_dir: Path,
) -> dict[CellKey, Stage]:
    """Return the stages of a model and a task: one for each seed, or one if seeds have no effect.

    Args:
        model: The model.
        task: The task.
        files: The files of the task.
        options: Sizes of the evaluations.
        work_dir: The folder of stage outputs.

    Returns:
        The stages; none if the task needs a masked-LM head that the model does not have.
    """
    if task.evaluation in ("held-out", "minimal-pairs") and not model.has_mlm_head:
        return {}
    cells = {}
    for seed in range(options.num_seeds if task.is_seeded else 1):
        kind, settings = _get_settings(task, seed, options)
        if model.is_untrained:
            dependencies = {"model": model.create_untrained_stage(seed, work_dir)}
            stage = Stage(kind, settings, dependencies, files)
        else:
            model_files = {**files, "model": model.path}
            stage = Stage(kind, settings, {}, model_files, hashes={"model": model.hash})
        cells[CellKey(model.label, task.name, seed)] = stage
    return cells


def _get_settings(task: PanelTask, seed: int, options: PanelOptions) -> tuple[str, dict[str, Any]]:
    """Return the kind and the settings of a stage."""
    if task.evaluation == "held-out":
        return HELD_OUT_KIND, {"sentences": options.num_sentences}
    if task.evaluation == "minimal-pairs":
        return MINIMAL_PAIRS_KIND, {"max_pairs": options.max_pairs}
    if task.evaluation == "probe":
        return PROBE_KIND, {"task": task.public_task, "seed": seed,
                            "max_train_examples": task.max_train_examples}  # fmt: skip
    values: dict[str, Any] = {
        "task": {"batch_size": BATCH_SIZE},
        "optim": {"lr": options.learning_rate},
        "schedule": {"epochs": task.epochs},
        "run": {"seed": seed},
        # A run takes minutes, so a killed run starts again without checkpoints.
        "checkpoint": {"steps": 10**9},
    }
    if task.max_train_examples is not None:
        values["task"] |= {"max_train_examples": task.max_train_examples,
                           "train_subset": "random", "train_subset_seed": seed}  # fmt: skip
    return "finetune", {"task": task.public_task, "values": values}
