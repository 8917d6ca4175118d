"""Runs an experiment: its plan, its stages, and the files that tell what came out.

It never knows the command line.
"""

import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.bundle import fingerprint, locate
from bertsmith.errors import MissingExtraError, RunError, SettingsError, TaskError
from bertsmith.files import write_json, write_whole
from bertsmith.lab import report, toy_language
from bertsmith.lab.cost import Costs, steps_of
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.report import Report
from bertsmith.lab.runner import Bench
from bertsmith.lab.scale import SCALES, Scale
from bertsmith.lab.sources import Sources, characters_in, is_packed
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StoppedError
from bertsmith.lab.stages import RUNS, Kit
from bertsmith.progress import Progress, Silent

#: Experiments that can be asked of a model that was not made here.
ON_A_MODEL = ("features", "pooling", "context", "positions")
#: Experiments that ask Korean text as well, where it is given.
IN_KOREAN = ("context", "vocabulary")
#: Where what results were made of stands, under OUT where nobody says.
WORK = "work"


@dataclass(frozen=True)
class Planned:
    """A stage that is to be made, and its seconds as far as they can be told.

    words: what people call it, or what it is first made for. steps: of training, 0 without any.
    """

    stage: Stage
    words: str
    steps: int
    seconds: float | None


@dataclass(frozen=True)
class Done:
    """An experiment that has run. failures: why stages failed, by their names; files: written."""

    experiment: Experiment
    report: Report
    failures: dict[str, str]
    missing: int
    files: list[Path]


class Laboratory:
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
        results: Path | str | None = None,
        work: Path | str | None = None,
        seeds: int | None = None,
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
        work = Path(work) / scale if work else self.out / WORK
        results = Path(results) / scale if results else self.out
        progress = progress or Silent()
        given.check(("en", "ko") if name in IN_KOREAN else ("en",), self.out, results, work)
        for what in _too_little(SCALES[scale], given, korean=name in IN_KOREAN):
            progress.note(what)
        if scale == "smoke":
            given = toy_language.stand_in(given, work / "toy")
        if name in IN_KOREAN and given.korean is None and not given.model:
            progress.note(f"without --korean-text, {name} is of English alone")
        self.kit = Kit(SCALES[scale].with_seeds(seeds), given, work)
        self.bench = Bench(results, work, progress, self.experiment.makers)
        try:
            self.stages: Stages = self.experiment.stages(self.kit)
            # Of all that is read, before anything starts: what changes later is for the next call.
            self._named = {key: stage.name for key, stage in self.stages.items()}
        except OSError as error:
            raise TaskError(f"{error.filename or self.out}: {error.strerror or error}") from error
        self._model = _identity(given.model)
        stood = self._stood().get("model_hash")
        if stood is not None and stood != self._model.get("model_hash", stood):
            raise RunError(f"{self._file('md')} is of another model; give another --out")

    def plan(self) -> list[Planned]:
        """Return what is still to be made, in order, with its cost from a short probe."""
        costs, words = Costs(), self.words()
        missing, progress = self.missing(), self.bench.progress
        planned = []
        progress.start("probing", len(missing), "stages")
        try:
            for stage in missing:
                planned.append(Planned(stage, words[stage.name], steps_of(stage), costs.of(stage)))
                progress.advance(1)
        finally:
            progress.finish()
        return planned

    def words(self) -> dict[str, str]:
        """Return what people call each stage, by its name: what needs it first gives it one."""
        words = {stage.name: _words(key) for key, stage in self.stages.items()}
        for key, stage in self.stages.items():
            _name_needs(stage, _words(key), words)
        return words

    def missing(self) -> list[Stage]:
        """Return the stages that are still to be made, in order."""
        return self.bench.missing(self.stages.values())

    def run(self) -> Done:
        """Make what is missing, then write tables and picture.

        Raises StoppedError on a signal, once what is there so far is written.
        """
        try:
            self.bench.make({_words(key): stage for key, stage in self.stages.items()})
        except KeyboardInterrupt:
            # Where no loop of training waits for it.
            self.tell()
            raise StoppedError(signal.SIGINT) from None
        except StoppedError:
            self.tell()
            raise
        return self.tell()

    def tell(self) -> Done:
        """Write tables and picture from the results that are there."""
        results: Results = {key: self.bench.result(stage) for key, stage in self.stages.items()}
        # A run that diverged is a finding; of what was to be measured on it, there is nothing.
        vain = {key for key, own in results.items()
                if own and "diverged" in own and self.stages[key].kind not in RUNS}  # fmt: skip
        found = self.experiment.report(self.kit, {**results, **dict.fromkeys(vain)})
        missing = sum(own is None for own in results.values())
        table, facts, picture = (self._file(end) for end in ("md", "json", "png"))
        if missing and table.exists() and self._lacks(results):
            self.bench.progress.note(
                f"{table} stays as it was: it is whole, and there are results in it that are not "
                "in this one"
            )
            return Done(self.experiment, found, self.bench.failures, missing, [])
        write_whole(table, found.markdown())
        write_json(facts, self._facts(found, results), rows=True)
        files = [table, facts]
        try:
            if found.panels:
                report.draw(found, picture, f"{self.experiment.name}: {self.experiment.question}")
                files.append(picture)
        except MissingExtraError as error:
            self.bench.progress.note(str(error))
        return Done(self.experiment, found, self.bench.failures, missing, files)

    def _file(self, end: str) -> Path:
        """Return a file that tells what came out; of a given model, beside those of models here."""
        given = "given-" if self.kit.sources.model else ""
        return self.out / f"{given}{self.experiment.name}.{end}"

    def _seeds(self) -> int:
        """Return how many seeds were asked: one, where the experiment is of one run or of none."""
        one = self.experiment.stages(replace(self.kit, scale=self.kit.scale.with_seeds(1)))
        return 1 if one.keys() == self.stages.keys() else self.kit.scale.seeds

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
            "scale": self.kit.scale.name,
            "seeds": self._seeds(),
            **self._model,
            "stages": {_words(key): name for key, name in self._named.items()},
            "missing": [_words(key) for key, own in results.items() if own is None],
            "failures": self.bench.failures,
            "tables": [table.to_json() for table in found.tables],
            "figures": found.figures,
        }


def _asked(name: str, scale: str, given: Sources) -> Sources:
    """Return the sources with the model's own directory; SettingsError for what is not known."""
    if name not in EXPERIMENTS:
        raise SettingsError(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        raise SettingsError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    if not given.model:
        return given
    if name not in ON_A_MODEL:
        raise SettingsError(
            f"{name} trains models of its own; only {', '.join(ON_A_MODEL)} take --model"
        )
    return replace(given, model=str(locate(given.model)))


def _identity(model: str | None) -> dict[str, str]:
    """Return which model was given, by its name and the hash of what makes it that model."""
    if model is None:
        return {}
    return {"model": Path(model).name, "model_hash": fingerprint(Path(model))[:12]}


def _name_needs(stage: Stage, words: str, named: dict[str, str]) -> None:
    """Name what a stage needs by what it is first needed for."""
    for part, need in stage.needs.items():
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
        files = given.texts(language).values()
        size = sum(map(characters_in, files))
        if size < scale.characters and not any(map(is_packed, files)):
            yield (
                f"{option} {place}: about {float(f'{size:.2g}'):,.0f} characters, where scale "
                f"{scale.name} takes {scale.characters:,}; what it finds is of less than that scale"
            )


def _words(key: Any) -> str:
    """Return what people call a stage: its key, numbers without a name being seeds and moments."""
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
