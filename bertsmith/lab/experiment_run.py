"""Plans and runs the stages of an experiment, and writes its report."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.bundle import hash_model_files, locate_model
from bertsmith.compatibility.lab import OLD_MODEL_REPORT_PREFIX, upgrade_stage_name
from bertsmith.errors import MissingExtraError, RunError, SettingsError, TaskError
from bertsmith.files import write_atomic, write_json
from bertsmith.lab import toy_language
from bertsmith.lab.cost import CostEstimator, count_training_steps
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments import EXPERIMENTS
from bertsmith.lab.report import Report, save_figure
from bertsmith.lab.runner import Runner
from bertsmith.lab.scale import SCALES, Scale
from bertsmith.lab.sources import Sources, estimate_characters, is_compressed
from bertsmith.lab.stage import Stage
from bertsmith.lab.stages import TRAINING_KINDS, StageFactory
from bertsmith.lab.verdict import verdict_to_json
from bertsmith.progress import NullProgress, Progress

#: Experiments that evaluate the user's model if there is one, instead of training models.
MODEL_EXPERIMENTS = ("features", "pooling", "context", "positions")
#: Experiments that also use Korean text if there is one.
_KOREAN_EXPERIMENTS = ("context", "vocabulary")
#: The default name of the directory of stage outputs, a subdirectory of OUT/SCALE.
WORK_DIR = "work"
#: Prefix of the file names of reports on the user's model.
_MODEL_REPORT_PREFIX = "external-"


@dataclass(frozen=True)
class PlannedStage:
    """A stage that is still to run.

    Attributes:
        stage: The stage.
        description: What the stage computes, or the first stage that depends on it.
        num_steps: The number of training steps, 0 without training.
        seconds: The estimated duration, None without an estimate.
    """

    stage: Stage
    description: str
    num_steps: int
    seconds: float | None


@dataclass(frozen=True)
class ExperimentOutcome:
    """The outcome of running an experiment.

    Attributes:
        experiment: The experiment.
        report: The tables and plots.
        failures: The error messages of failed stages, by stage name.
        num_missing: The number of missing results.
        files: The report files that were written.
    """

    experiment: Experiment
    report: Report
    failures: dict[str, str]
    num_missing: int
    files: list[Path]


class ExperimentRun:
    """An experiment at a scale, with its input files and output directories."""

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
        """Check the arguments and create the stages without running them.

        Args:
            name: The name of an experiment.
            scale: The name of a scale.
            sources: The input files. At scale "smoke", generated toy files replace missing ones.
            out: The directory of reports, which are written to OUT/SCALE.
            results_dir: The directory of SCALE/results.jsonl, by default ``out``.
            work_dir: The directory of stage outputs such as stores and models, by default
                OUT/SCALE/work. It may be deleted at any time.
            num_seeds: The number of seeds per configuration, by default that of the scale.
            progress: Receives progress bars and messages.

        Raises:
            SettingsError: The experiment or scale is unknown.
            TaskError: An input file is missing or cannot be read.
            RunError: ``out`` is a file, or contains the report of another model.
        """
        sources = _check_arguments(name, scale, sources or Sources())
        self.experiment = EXPERIMENTS[name]
        self.out = Path(out)
        if self.out.exists() and not self.out.is_dir():
            raise RunError(f"{self.out}: this is a file; give --out a directory")
        # Reports of different scales have the same file names.
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
            # Computing the names hashes all input files, so that unreadable files are reported now.
            self._stage_names = {key: stage.name for key, stage in self.stages.items()}
        except OSError as error:
            raise TaskError(f"{error.filename or self.out}: {error.strerror or error}") from error
        self._model_id = _identify_model(sources.model)
        previous_hash = self._read_previous_report().get("model_hash")
        if previous_hash is not None and previous_hash != self._model_id.get("model_hash"):
            raise RunError(
                f"{self._report_path('md')} is the report of another model; choose another --out"
            )

    def plan(self, costs: CostEstimator | None = None) -> list[PlannedStage]:
        """Return the stages that are still to run, in order, with their estimated durations.

        Args:
            costs: An estimator whose measurements are reused, None for a new one.
        """
        costs = costs or CostEstimator()
        descriptions = self.describe_stages()
        missing = self.find_missing_stages()
        progress = self.runner.progress
        planned = []
        progress.start("probing", len(missing), "stages")
        try:
            for stage in missing:
                num_steps = count_training_steps(stage)
                seconds = costs.estimate_seconds(stage)
                planned.append(PlannedStage(stage, descriptions[stage.name], num_steps, seconds))
                progress.advance(1)
        finally:
            progress.finish()
        return planned

    def describe_stages(self) -> dict[str, str]:
        """Return a description of each stage, by stage name.

        Stages without a result in the report are described by their role for the first stage that
        depends on them, such as "the vocabulary of relu, 0".
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
            StoppedError: The process received a signal to stop. As after any other exception, the
                report has been written from the existing results.
        """
        try:
            self.runner.run_stages(
                {_describe_key(key): stage for key, stage in self.stages.items()}
            )
        finally:
            # Also after StoppedError, or the exception of the command line for SIGTERM.
            outcome = self.write_report()
        return outcome

    def write_report(self) -> ExperimentOutcome:
        """Write tables and figure of the existing results.

        A complete report is not replaced if some of its results are missing now.
        """
        results: Results = {
            key: self.runner.get_result(stage) for key, stage in self.stages.items()
        }
        report = self.experiment.build_report(self.factory, self._remove_unmeasured(results))
        num_missing = sum(result is None for result in results.values())
        markdown_file, json_file, figure_file = map(self._report_path, ("md", "json", "png"))
        failures = self.runner.failures
        if num_missing and markdown_file.exists() and self._would_lose_results(results):
            self.runner.progress.log(
                f"{markdown_file} is not replaced: it is complete and has results that are missing "
                "now"
            )
            return ExperimentOutcome(self.experiment, report, failures, num_missing, [])
        write_atomic(markdown_file, report.to_markdown())
        write_json(json_file, self._build_json(report, results), inline_numbers=True)
        files = [markdown_file, json_file]
        try:
            if report.panels:
                title = f"{self.experiment.name}: {self.experiment.question}"
                save_figure(report, figure_file, title)
                files.append(figure_file)
        except MissingExtraError as error:
            self.runner.progress.log(str(error))
        return ExperimentOutcome(self.experiment, report, failures, num_missing, files)

    def _remove_unmeasured(self, results: Results) -> Results:
        """Return the results with None for measurements of models whose training diverged.

        The results of the diverged training runs themselves are kept, so that they are reported.
        """
        remaining: dict[Any, dict[str, Any] | None] = {}
        for key, result in results.items():
            is_training = self.stages[key].kind in TRAINING_KINDS
            is_diverged = result is not None and "diverged" in result
            remaining[key] = None if is_diverged and not is_training else result
        return remaining

    def _report_path(self, suffix: str) -> Path:
        """Return the path of the report file with a suffix."""
        prefix = _MODEL_REPORT_PREFIX if self.factory.sources.model else ""
        return self.out / f"{prefix}{self.experiment.name}.{suffix}"

    def _count_seeds(self) -> int:
        """Return the number of seeds, 1 for experiments that use only the first seed."""
        one_seed_factory = replace(self.factory, scale=self.factory.scale.with_seeds(1))
        one_seed_stages = self.experiment.build_stages(one_seed_factory)
        if one_seed_stages.keys() == self.stages.keys():
            return 1
        return self.factory.scale.num_seeds

    def _read_previous_report(self) -> dict[str, Any]:
        """Return the JSON of the existing report, empty if there is none."""
        path = self._report_path("json")
        if self.factory.sources.model and not path.exists():
            path = self.out / f"{OLD_MODEL_REPORT_PREFIX}{self.experiment.name}.json"
        try:
            report: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def _would_lose_results(self, results: Results) -> bool:
        """Return whether the existing report is complete and has results that are missing now."""
        previous = self._read_previous_report()
        if previous.get("missing") != []:
            return False
        names = {self._stage_names[key] for key, result in results.items() if result is not None}
        return not names.issuperset(map(upgrade_stage_name, previous["stages"].values()))

    def _build_json(self, report: Report, results: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the content of the report's JSON file."""
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
            **verdict_to_json(report.claims),
            "tables": [table.to_json() for table in report.tables],
            "data": report.data,
        }


def _check_arguments(name: str, scale: str, sources: Sources) -> Sources:
    """Check the names, and return the sources with the model directory of a model or run.

    Raises:
        SettingsError: The experiment or scale is unknown, or the experiment takes no model.
    """
    if name not in EXPERIMENTS:
        raise SettingsError(f"unknown experiment {name!r}; expected: {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        raise SettingsError(f"unknown scale {scale!r}; expected: {', '.join(SCALES)}")
    if not sources.model:
        return sources
    if name not in MODEL_EXPERIMENTS:
        raise SettingsError(
            f"--model does not apply to {name}, which trains its models; use it with "
            f"{', '.join(MODEL_EXPERIMENTS)}"
        )
    return replace(sources, model=str(locate_model(sources.model)))


def _identify_model(model: str | None) -> dict[str, str]:
    """Return the report fields that identify the user's model; empty without a model."""
    if model is None:
        return {}
    return {"model": Path(model).name, "model_hash": hash_model_files(Path(model))[:12]}


def _describe_dependencies(stage: Stage, description: str, descriptions: dict[str, str]) -> None:
    """Add descriptions of the direct and indirect dependencies that have none yet."""
    for role, dependency in stage.dependencies.items():
        descriptions.setdefault(dependency.name, f"the {role} of {description}")
        _describe_dependencies(dependency, description, descriptions)


def _check_text_sizes(scale: Scale, sources: Sources, *, uses_korean: bool) -> Iterator[str]:
    """Yield a warning for each text that has fewer characters than the scale uses.

    Compressed texts are not checked. Scale "full" uses texts of any length.
    """
    texts = [("--text", "en", sources.english)]
    if uses_korean:
        texts.append(("--korean-text", "ko", sources.korean))
    for option, language, path in texts:
        if path is None or scale.name == "full" or sources.model:
            continue
        files = sources.find_text_files(language).values()
        if any(is_compressed(file) for file in files):
            continue
        num_characters = sum(estimate_characters(file) for file in files)
        if num_characters < scale.max_characters:
            rounded = float(f"{num_characters:.2g}")
            yield (
                f"{option} {path}: about {rounded:,.0f} characters, but scale {scale.name} uses "
                f"{scale.max_characters:,}; models will be worse than with more text"
            )


def _describe_key(key: Any) -> str:
    """Return the key of a stage as text, such as "relu, 0" for the key ("relu", 0)."""
    if isinstance(key, tuple):
        return ", ".join(map(str, key))
    return str(key)
