"""Runs an experiment: its plan, its stages, and the files that tell what came out.

It never knows the command line.
"""

import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.bundle import hash_model_files, locate_model
from bertsmith.errors import MissingExtraError, RunError, SettingsError, TaskError
from bertsmith.files import write_atomic, write_json
from bertsmith.lab import report, toy_language
from bertsmith.lab.cost import CostEstimator, count_training_steps
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.report import Report
from bertsmith.lab.runner import Runner
from bertsmith.lab.scale import SCALES, Scale
from bertsmith.lab.sources import Sources, estimate_characters, is_compressed
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StoppedError
from bertsmith.lab.stages import TRAINING_KINDS, StageFactory
from bertsmith.progress import NullProgress, Progress

#: Experiments that can be asked of a model that was not made here.
MODEL_EXPERIMENTS = ("features", "pooling", "context", "positions")
#: Experiments that ask Korean text as well, where it is given.
IN_KOREAN = ("context", "vocabulary")
#: Where what results were made of stands, under OUT where nobody says.
WORK_DIR = "work"


@dataclass(frozen=True)
class PlannedStage:
    """A stage that is to be made, and its seconds as far as they can be told.

    description: what people call it, or what it is first made for. steps: of training, 0 without any.
    """

    stage: Stage
    description: str
    num_steps: int
    seconds: float | None


@dataclass(frozen=True)
class ExperimentOutcome:
    """An experiment that has run. failures: why stages failed, by their names; files: written."""

    experiment: Experiment
    report: Report
    failures: dict[str, str]
    num_missing: int
    files: list[Path]


class ExperimentRun:
    """One experiment at one scale, with its folders.

    out: tables and pictures. results: the results file, by default next to them. work: stores, runs
    and models, which may be thrown away.
    """

    def __init__(
        self,
        name: str,
        *,
        scale: str = "small",
        sources: Sources | None = None,
        out: Path | str = "lab",
        results_dir: Path | str | None = None,
        work_dir: Path | str | None = None,
        num_seeds: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Raises SettingsError for an unknown experiment or scale, TaskError for missing files.

        ``sources``: at scale "smoke" a toy language stands in for what is not given.
        """
        given = _asked(name, scale, sources or Sources())
        self.experiment, self.out = EXPERIMENTS[name], Path(out)
        if self.out.exists() and not self.out.is_dir():
            raise RunError(f"{self.out}: this is a file; give --out a directory")
        # Of another scale, nothing is shared, and tables stand beside each other.
        self.out = self.out / scale
        work_dir = Path(work_dir) / scale if work_dir else self.out / WORK_DIR
        results_dir = Path(results_dir) / scale if results_dir else self.out
        progress = progress or NullProgress()
        given.check_paths(
            ("en", "ko") if name in IN_KOREAN else ("en",), self.out, results_dir, work_dir
        )
        for what in _too_little(SCALES[scale], given, korean=name in IN_KOREAN):
            progress.log(what)
        if scale == "smoke":
            given = toy_language.fill_missing_sources(given, work_dir / "toy")
        if name in IN_KOREAN and given.korean is None and not given.model:
            progress.log(f"without --korean-text, {name} is of English alone")
        self.factory = StageFactory(SCALES[scale].with_seeds(num_seeds), given, work_dir)
        self.runner = Runner(results_dir, work_dir, progress, self.experiment.stage_functions)
        try:
            self.stages: Stages = self.experiment.build_stages(self.factory)
            # Of all that is read, before anything starts: what changes later is for the next call.
            self._named = {key: stage.name for key, stage in self.stages.items()}
        except OSError as error:
            raise TaskError(f"{error.filename or self.out}: {error.strerror or error}") from error
        self._model = _identity(given.model)
        stood = self._stood().get("model_hash")
        if stood is not None and stood != self._model.get("model_hash", stood):
            raise RunError(f"{self._file('md')} is of another model; give another --out")

    def plan(self) -> list[PlannedStage]:
        """Return what is still to be made, in order, with its cost from a short probe."""
        costs, words = CostEstimator(), self.describe_stages()
        missing, progress = self.missing_stages(), self.runner.progress
        planned = []
        progress.start("probing", len(missing), "stages")
        try:
            for stage in missing:
                planned.append(
                    PlannedStage(
                        stage,
                        words[stage.name],
                        count_training_steps(stage),
                        costs.estimate_seconds(stage),
                    )
                )
                progress.advance(1)
        finally:
            progress.finish()
        return planned

    def describe_stages(self) -> dict[str, str]:
        """Return what people call each stage, by its name: what needs it first gives it one."""
        words = {stage.name: _words(key) for key, stage in self.stages.items()}
        for key, stage in self.stages.items():
            _name_needs(stage, _words(key), words)
        return words

    def missing_stages(self) -> list[Stage]:
        """Return the stages that are still to be made, in order."""
        return self.runner.missing_stages(self.stages.values())

    def run(self) -> ExperimentOutcome:
        """Make what is missing, then write tables and picture.

        Raises StoppedError on a signal, once what is there so far is written.
        """
        try:
            self.runner.run_stages({_words(key): stage for key, stage in self.stages.items()})
        except KeyboardInterrupt:
            # Where no loop of training waits for it.
            self.write_report()
            raise StoppedError(signal.SIGINT) from None
        except StoppedError:
            self.write_report()
            raise
        return self.write_report()

    def write_report(self) -> ExperimentOutcome:
        """Write tables and picture from the results that are there."""
        results: Results = {
            key: self.runner.get_result(stage) for key, stage in self.stages.items()
        }
        # A run that diverged is a finding; of what was to be measured on it, there is nothing.
        vain = {key for key, own in results.items()
                if own and "diverged" in own and self.stages[key].kind not in TRAINING_KINDS}  # fmt: skip
        found = self.experiment.build_report(self.factory, {**results, **dict.fromkeys(vain)})
        missing = sum(own is None for own in results.values())
        table, facts, picture = (self._file(end) for end in ("md", "json", "png"))
        if missing and table.exists() and self._lacks(results):
            self.runner.progress.log(
                f"{table} stays as it was: it is whole, and there are results in it that are not "
                "in this one"
            )
            return ExperimentOutcome(self.experiment, found, self.runner.failures, missing, [])
        write_atomic(table, found.to_markdown())
        write_json(facts, self._facts(found, results), inline_numbers=True)
        files = [table, facts]
        try:
            if found.panels:
                report.save_figure(
                    found, picture, f"{self.experiment.name}: {self.experiment.question}"
                )
                files.append(picture)
        except MissingExtraError as error:
            self.runner.progress.log(str(error))
        return ExperimentOutcome(self.experiment, found, self.runner.failures, missing, files)

    def _file(self, end: str) -> Path:
        """Return a file that tells what came out; of a given model, beside those of models here."""
        given = "given-" if self.factory.sources.model else ""
        return self.out / f"{given}{self.experiment.name}.{end}"

    def _seeds(self) -> int:
        """Return how many seeds were asked: one, where the experiment is of one run or of none."""
        one = self.experiment.build_stages(
            replace(self.factory, scale=self.factory.scale.with_seeds(1))
        )
        return 1 if one.keys() == self.stages.keys() else self.factory.scale.num_seeds

    def _stood(self) -> dict[str, Any]:
        """Return the facts of the tables that stand there already, nothing where none do."""
        try:
            found: Any = json.loads(self._file("json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _lacks(self, results: Results) -> bool:
        """Tell whether the tables that stand there are whole, and hold what these would not."""
        stood = self._stood()
        here = {self._named[key] for key, own in results.items() if own is not None}
        return stood.get("missing") == [] and not here.issuperset(stood["stages"].values())

    def _facts(self, found: Report, results: Mapping[Any, Any]) -> dict[str, Any]:
        return {
            "experiment": self.experiment.name,
            "source": self.experiment.source,
            "question": self.experiment.question,
            "scale": self.factory.scale.name,
            "seeds": self._seeds(),
            **self._model,
            "stages": {_words(key): name for key, name in self._named.items()},
            "missing": [_words(key) for key, own in results.items() if own is None],
            "failures": self.runner.failures,
            "tables": [table.to_json() for table in found.tables],
            "figures": found.data,
        }


def _asked(name: str, scale: str, given: Sources) -> Sources:
    """Return the sources with the model's own directory; SettingsError for what is not known."""
    if name not in EXPERIMENTS:
        raise SettingsError(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        raise SettingsError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    if not given.model:
        return given
    if name not in MODEL_EXPERIMENTS:
        raise SettingsError(
            f"{name} trains models of its own; only {', '.join(MODEL_EXPERIMENTS)} take --model"
        )
    return replace(given, model=str(locate_model(given.model)))


def _identity(model: str | None) -> dict[str, str]:
    """Return which model was given, by its name and the hash of what makes it that model."""
    if model is None:
        return {}
    return {"model": Path(model).name, "model_hash": hash_model_files(Path(model))[:12]}


def _name_needs(stage: Stage, words: str, named: dict[str, str]) -> None:
    """Name what a stage needs by what it is first needed for."""
    for part, need in stage.dependencies.items():
        named.setdefault(need.name, f"the {part} of {words}")
        _name_needs(need, words, named)


def _too_little(scale: Scale, given: Sources, *, korean: bool) -> Iterator[str]:
    """Tell of each text that has fewer characters than the scale takes of it, where that is known.

    The paper's scale takes all that there is. korean: whether Korean is read.
    """
    asked = [("--text", "en", given.english)]
    asked += [("--korean-text", "ko", given.korean)] if korean else []
    for option, language, place in asked:
        if place is None or scale.name == "full" or given.model:
            continue
        files = given.text_files(language).values()
        size = sum(map(estimate_characters, files))
        if size < scale.max_characters and not any(map(is_compressed, files)):
            yield (
                f"{option} {place}: about {float(f'{size:.2g}'):,.0f} characters, where scale "
                f"{scale.name} takes {scale.max_characters:,}; what it finds is of less than that scale"
            )


def _words(key: Any) -> str:
    """Return what people call a stage: its key, numbers without a name being seeds and moments."""
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
