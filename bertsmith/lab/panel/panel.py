"""Plans and runs a panel, and writes its table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.errors import RunError, TaskError
from bertsmith.files import write_atomic, write_json
from bertsmith.lab.panel.cells import CellKey, PanelOptions, create_cells
from bertsmith.lab.panel.cost import PanelCostEstimator
from bertsmith.lab.panel.data import PanelData
from bertsmith.lab.panel.models import PanelModel, load_models
from bertsmith.lab.panel.stage_functions import (
    PANEL_STAGE_FUNCTIONS,
    PROBE_KIND,
    check_scikit_learn,
)
from bertsmith.lab.panel.table import build_json, build_notes, read_table
from bertsmith.lab.panel.tasks import PanelTask
from bertsmith.lab.runner import Runner
from bertsmith.lab.sources import Sources
from bertsmith.lab.stage import Stage
from bertsmith.progress import NullProgress, Progress

#: Subdirectory of the output folder for fine-tuning runs, untrained models and split files.
_WORK_DIR = "work"
_HASH_LENGTH = 12


@dataclass(frozen=True)
class PlannedTask:
    """The cells of a task that are still to run.

    Attributes:
        task: The task.
        num_cells: The number of cells.
        seconds: Their estimated duration.
    """

    task: PanelTask
    num_cells: int
    seconds: float


@dataclass(frozen=True)
class PanelOutcome:
    """The outcome of running a panel.

    Attributes:
        markdown: The table and the notes below it.
        data: The content of the JSON file.
        failures: The error messages of failed cells, by cell.
        num_missing: The number of missing results.
        files: The files that were written.
    """

    markdown: str
    data: dict[str, Any]
    failures: dict[str, str]
    num_missing: int
    files: list[Path]


class Panel:
    """A comparison of models on the tasks of the panel."""

    def __init__(
        self,
        models: Sequence[Path | str],
        tasks: Sequence[PanelTask],
        *,
        data: Path | None = None,
        text: Path | None = None,
        minimal_pairs: Sequence[Path] = (),
        out: Path | str = "panel",
        options: PanelOptions | None = None,
        with_untrained: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Check the arguments and find all files, without evaluating a model.

        Args:
            models: Model directories, run directories, or names of models.
            tasks: The tasks, see ``select_tasks``.
            data: The folder with one subfolder for each public task.
            text: A file or folder with held-out text.
            minimal_pairs: Files of minimal pairs, or folders of such files.
            out: The folder of the table and the results.
            options: Sizes of the evaluations.
            with_untrained: Whether to add untrained models of the same architectures.
            progress: Receives progress bars and messages.

        Raises:
            BertsmithError: A model or a file is missing or cannot be read.
        """
        self.out, self.tasks = Path(out), list(tasks)
        if self.out.exists() and not self.out.is_dir():
            raise RunError(f"{self.out}: this is a file; give --out a directory")
        self.options, self.progress = options or PanelOptions(), progress or NullProgress()
        work_dir = self.out / _WORK_DIR
        self.models = load_models(models, with_untrained=with_untrained)
        if text is not None:
            Sources(english=text).check_paths(("en",), self.out)
        for path in minimal_pairs:
            if path.resolve() == self.out.resolve():
                raise TaskError(
                    f"--minimal-pairs {path}: this is also the output folder, whose tables the "
                    "next run would read as minimal pairs; choose another --out"
                )
        sources = PanelData(data, text, minimal_pairs, work_dir / "splits")
        self._files = {task.name: sources.find_files(task) for task in self.tasks}
        self.runner = Runner(self.out, work_dir, self.progress, PANEL_STAGE_FUNCTIONS)
        self.cells: dict[CellKey, Stage] = {}
        try:
            for model in self.models:
                for task in self.tasks:
                    self.cells |= create_cells(
                        model, task, self._files[task.name], self.options, work_dir
                    )
            # Computing the names hashes all input files, so that unreadable files are reported now.
            self._cell_names = {key.describe(): stage.name for key, stage in self.cells.items()}
        except OSError as error:
            raise TaskError(f"{error.filename or self.out}: {error.strerror or error}") from error
        if any(stage.kind == PROBE_KIND for stage in self._get_missing_cells().values()):
            check_scikit_learn()

    def _get_missing_cells(self) -> dict[CellKey, Stage]:
        """Return the cells that are still to run."""
        return {
            key: stage for key, stage in self.cells.items() if self.runner.get_result(stage) is None
        }

    def has_missing_results(self) -> bool:
        """Return whether a cell is still to run."""
        return bool(self._get_missing_cells())

    def plan(self) -> list[PlannedTask]:
        """Return the tasks with cells that are still to run, with their estimated durations."""
        costs = PanelCostEstimator(self.options)
        models = {model.label: model for model in self.models}
        missing = self._get_missing_cells()
        self.progress.start("measuring", len(missing), "cells")
        planned = []
        try:
            for task in self.tasks:
                keys = [key for key in missing if key.task == task.name]
                seconds = 0.0
                for key in keys:
                    files = self._files[task.name]
                    seconds += costs.estimate_seconds(models[key.model], task, files)
                    self.progress.advance(1)
                if keys:
                    planned.append(PlannedTask(task, len(keys), seconds))
        finally:
            self.progress.finish()
        return planned

    def run(self) -> PanelOutcome:
        """Run the missing cells and write the table.

        Raises:
            StoppedError: The process received a signal to stop. The table has been written from
                the existing results.
        """
        try:
            self.runner.run_stages({key.describe(): stage for key, stage in self.cells.items()})
        finally:
            # Also after StoppedError, or the exception of the command line for SIGTERM.
            outcome = self.write_table()
        return outcome

    def write_table(self) -> PanelOutcome:
        """Write the table of the existing results."""
        results = {key: self.runner.get_result(stage) for key, stage in self.cells.items()}
        notes = build_notes(results, self.models, self.tasks, self.options)
        missing = [key.describe() for key, result in results.items() if result is None]
        failures = {name: self.runner.failures[stage] for name, stage in self._cell_names.items()
                    if stage in self.runner.failures}  # fmt: skip
        data = {
            "models": [
                {"name": model.label, "untrained": model.is_untrained,
                 **({} if model.is_untrained else _identify(model)),
                 "vocab_size": model.tokenizer.vocab_size}
                for model in self.models
            ],
            "seeds": self.options.num_seeds,
            "learning_rate": self.options.learning_rate,
            "results": build_json(results, self.models, self.tasks),
            "notes": notes, "missing": missing, "failures": failures, "cells": self._cell_names,
        }  # fmt: skip
        markdown = "\n\n".join([read_table(data).to_markdown(), *notes]) + "\n"
        files = [self.out / "panel.md", self.out / "panel.json"]
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(files[0], markdown)
        write_json(files[1], data, inline_numbers=True)
        return PanelOutcome(markdown, data, failures, len(missing), files)


def _identify(model: PanelModel) -> dict[str, str]:
    """Return the path and the hash of a model."""
    return {"path": str(model.path), "hash": model.hash[:_HASH_LENGTH]}
