"""Runs an experiment: plans and runs its stages, and writes its report."""

import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.bundle import hash_model_files, locate_model
from bertsmith.compatibility import OLD_MODEL_REPORT_PREFIX, upgrade_stage_name
from bertsmith.errors import MissingExtraError, RunError, SettingsError, TaskError
from bertsmith.files import write_atomic, write_json
from bertsmith.lab import toy_language
from bertsmith.lab.cost import CostEstimator, count_training_steps
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.report import Report, save_figure
from bertsmith.lab.runner import Runner
from bertsmith.lab.scale import SCALES, Scale
from bertsmith.lab.sources import Sources, estimate_characters, is_compressed
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StoppedError
from bertsmith.lab.stages import TRAINING_KINDS, StageFactory
from bertsmith.progress import NullProgress, Progress

#: Experiments that can evaluate the user's model instead of training models.
MODEL_EXPERIMENTS = ("features", "pooling", "context", "positions")
#: Experiments that also use Korean text if there is any.
_KOREAN_EXPERIMENTS = ("context", "vocabulary")
#: The default directory of stage outputs, in OUT/SCALE.
WORK_DIR = "work"
#: Prefix of the names of reports on the user's model.
_MODEL_REPORT_PREFIX = "external-"


@dataclass(frozen=True)
class PlannedStage:
    """A stage that is still to run.

    Attributes:
        stage: The stage.
        description: What the stage measures, or which stage needs it first.
        num_steps: Its training steps, 0 if it does not train.
        seconds: Its estimated duration, None if it cannot be estimated.
    """

    stage: Stage
    description: str
    num_steps: int
    seconds: float | None


@dataclass(frozen=True)
class ExperimentOutcome:
    """The outcome of an experiment.

    Attributes:
        experiment: The experiment.
        report: Its tables and plots.
        failures: Error messages by stage name.
        num_missing: The number of missing results.
        files: The files that were written.
    """

    experiment: Experiment
    report: Report
    failures: dict[str, str]
    num_missing: int
    files: list[Path]


class ExperimentRun:
    """One experiment at one scale, with its directories."""

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
        """Check the arguments and create the stages, without running any.

        Args:
            name: The name of an experiment.
            scale: The name of a scale.
            sources: The input files; at scale "smoke", toy files replace missing ones.
            out: The directory for tables and figures, which go to OUT/SCALE.
            results_dir: The directory of SCALE/results.jsonl, by default ``out``.
            work_dir: The directory for stores, runs and models, by default OUT/SCALE/work. It may
                be deleted at any time.
            num_seeds: Runs per configuration, by default that of the scale.
            progress: Receives progress bars and messages.

        Raises:
            SettingsError: The experiment or scale is unknown.
            TaskError: An input file is missing or cannot be read.
            RunError: ``out`` is a file, or has the report of another model.
        """
        sources = _check_arguments(name, scale, sources or Sources())
        self.experiment, self.out = EXPERIMENTS[name], Path(out)
        if self.out.exists() and not self.out.is_dir():
            raise RunError(f"{self.out}: this is a file; give --out a directory")
        # Scales share no stages, and their reports must not replace each other.
        self.out = self.out / scale
        work_dir = Path(work_dir) / scale if work_dir else self.out / WORK_DIR
        results_dir = Path(results_dir) / scale if results_dir else self.out
        progress = progress or NullProgress()
        uses_korean = name in _KOREAN_EXPERIMENTS
        sources.check_paths(
            ("en", "ko") if uses_korean else ("en",), self.out, results_dir, work_dir
        )
        for warning in _check_text_sizes(SCALES[scale], sources, uses_korean=uses_korean):
            progress.log(warning)
        if scale == "smoke":
            sources = toy_language.fill_missing_sources(sources, work_dir / "toy")
        if uses_korean and sources.korean is None and not sources.model:
            progress.log(f"without --korean-text, {name} covers English only")
        self.factory = StageFactory(SCALES[scale].with_seeds(num_seeds), sources, work_dir)
        self.runner = Runner(results_dir, work_dir, progress, self.experiment.stage_functions)
        try:
            self.stages: Stages = self.experiment.build_stages(self.factory)
            # Hashes all input files now, so that changes during the run do not affect it.
            self._stage_names = {key: stage.name for key, stage in self.stages.items()}
        except OSError as error:
            raise TaskError(f"{error.filename or self.out}: {error.strerror or error}") from error
        self._model_id = _identify_model(sources.model)
        old_hash = self._read_previous_report().get("model_hash")
        if old_hash is not None and old_hash != self._model_id.get("model_hash", old_hash):
            raise RunError(
                f"{self._report_path('md')} is the report of another model; choose another --out"
            )

    def plan(self) -> list[PlannedStage]:
        """Return the stages that are still to run, in order, with estimated durations."""
        costs, descriptions = CostEstimator(), self.describe_stages()
        missing, progress = self.find_missing_stages(), self.runner.progress
        planned = []
        progress.start("probing", len(missing), "stages")
        try:
            for stage in missing:
                num_steps, seconds = count_training_steps(stage), costs.estimate_seconds(stage)
                planned.append(PlannedStage(stage, descriptions[stage.name], num_steps, seconds))
                progress.advance(1)
        finally:
            progress.finish()
        return planned

    def describe_stages(self) -> dict[str, str]:
        """Return a description of each stage by its name.

        A stage that only others need is described by its role and the first stage that needs it.
        """
        descriptions = {stage.name: _describe_key(key) for key, stage in self.stages.items()}
        for key, stage in self.stages.items():
            _describe_dependencies(stage, _describe_key(key), descriptions)
        return descriptions

    def find_missing_stages(self) -> list[Stage]:
        """Return the stages that are still to run, in order."""
        return self.runner.find_missing_stages(self.stages.values())

    def run(self) -> ExperimentOutcome:
        """Run the missing stages and write the report.

        Raises:
            StoppedError: A signal asked to stop; the report has the results so far.
        """
        try:
            self.runner.run_stages(
                {_describe_key(key): stage for key, stage in self.stages.items()}
            )
        except KeyboardInterrupt:
            # Only training loops turn the signal into a StoppedError.
            self.write_report()
            raise StoppedError(signal.SIGINT) from None
        except StoppedError:
            self.write_report()
            raise
        return self.write_report()

    def write_report(self) -> ExperimentOutcome:
        """Write tables and figure from the results so far.

        A complete report is not replaced by an incomplete one that lacks some of its results.
        """
        results: Results = {key: self.runner.get_result(stage)
                            for key, stage in self.stages.items()}  # fmt: skip
        # A diverged training run is reported; measurements of its model do not exist.
        unmeasured = {key for key, result in results.items() if result and "diverged" in result
                      and self.stages[key].kind not in TRAINING_KINDS}  # fmt: skip
        report = self.experiment.build_report(
            self.factory, {**results, **dict.fromkeys(unmeasured)}
        )
        num_missing = sum(result is None for result in results.values())
        table, facts, picture = (self._report_path(suffix) for suffix in ("md", "json", "png"))
        failures = self.runner.failures
        if num_missing and table.exists() and self._would_lose_results(results):
            self.runner.progress.log(
                f"{table} is not replaced: it is complete and has results that are missing now"
            )
            return ExperimentOutcome(self.experiment, report, failures, num_missing, [])
        write_atomic(table, report.to_markdown())
        write_json(facts, self._build_json(report, results), inline_numbers=True)
        files = [table, facts]
        try:
            if report.panels:
                save_figure(report, picture, f"{self.experiment.name}: {self.experiment.question}")
                files.append(picture)
        except MissingExtraError as error:
            self.runner.progress.log(str(error))
        return ExperimentOutcome(self.experiment, report, failures, num_missing, files)

    def _report_path(self, suffix: str) -> Path:
        """Return the path of a report file; reports of the user's model have another name."""
        prefix = _MODEL_REPORT_PREFIX if self.factory.sources.model else ""
        return self.out / f"{prefix}{self.experiment.name}.{suffix}"

    def _count_seeds(self) -> int:
        """Return the number of seeds, 1 for an experiment whose stages do not depend on it."""
        one_seed = replace(self.factory, scale=self.factory.scale.with_seeds(1))
        is_seedless = self.experiment.build_stages(one_seed).keys() == self.stages.keys()
        return 1 if is_seedless else self.factory.scale.num_seeds

    def _read_previous_report(self) -> dict[str, Any]:
        """Return the JSON of the existing report, empty if there is none."""
        path = self._report_path("json")
        if self.factory.sources.model and not path.exists():
            path = self.out / f"{OLD_MODEL_REPORT_PREFIX}{self.experiment.name}.json"
        try:
            facts: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _would_lose_results(self, results: Results) -> bool:
        """Return whether the existing report is complete and has results that are missing here."""
        old = self._read_previous_report()
        names = {self._stage_names[key] for key, result in results.items() if result is not None}
        if old.get("missing") != []:
            return False
        return not names.issuperset(map(upgrade_stage_name, old["stages"].values()))

    def _build_json(self, report: Report, results: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the JSON of a report."""
        return {
            "experiment": self.experiment.name,
            "source": self.experiment.source,
            "question": self.experiment.question,
            "scale": self.factory.scale.name,
            "seeds": self._count_seeds(),
            **self._model_id,
            "stages": {_describe_key(key): name for key, name in self._stage_names.items()},
            "missing": [_describe_key(key) for key, result in results.items() if result is None],
            "failures": self.runner.failures,
            "tables": [table.to_json() for table in report.tables],
            "data": report.data,
        }


def _check_arguments(name: str, scale: str, sources: Sources) -> Sources:
    """Check the names and return the sources with the path of the model directory.

    Raises:
        SettingsError: The experiment or scale is unknown, or the experiment takes no model.
    """
    if name not in EXPERIMENTS:
        raise SettingsError(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        raise SettingsError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    if not sources.model:
        return sources
    if name not in MODEL_EXPERIMENTS:
        raise SettingsError(
            f"{name} trains models of its own; only {', '.join(MODEL_EXPERIMENTS)} take --model"
        )
    return replace(sources, model=str(locate_model(sources.model)))


def _identify_model(model: str | None) -> dict[str, str]:
    """Return the name and the hash of the user's model for the report, empty without one."""
    if model is None:
        return {}
    return {"model": Path(model).name, "model_hash": hash_model_files(Path(model))[:12]}


def _describe_dependencies(stage: Stage, description: str, descriptions: dict[str, str]) -> None:
    """Add descriptions of a stage's dependencies that have none yet."""
    for role, dependency in stage.dependencies.items():
        descriptions.setdefault(dependency.name, f"the {role} of {description}")
        _describe_dependencies(dependency, description, descriptions)


def _check_text_sizes(scale: Scale, sources: Sources, *, uses_korean: bool) -> Iterator[str]:
    """Yield a warning for each text that has fewer characters than the scale uses.

    Compressed texts are not checked, and neither is scale "full", which uses all text.
    """
    texts = [("--text", "en", sources.english)]
    texts += [("--korean-text", "ko", sources.korean)] if uses_korean else []
    for option, language, path in texts:
        if path is None or scale.name == "full" or sources.model:
            continue
        files = sources.find_text_files(language).values()
        num_characters = sum(map(estimate_characters, files))
        if num_characters < scale.max_characters and not any(map(is_compressed, files)):
            rounded = float(f"{num_characters:.2g}")
            yield (
                f"{option} {path}: about {rounded:,.0f} characters, but scale {scale.name} uses "
                f"{scale.max_characters:,}; the results will be those of a smaller scale"
            )


def _describe_key(key: Any) -> str:
    """Return the key of a stage as text, such as "relu, 0" for activation and seed."""
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
