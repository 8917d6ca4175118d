"""Makes the stages of an experiment one after another: what stands is not made again.

It never knows what the stages are for. A result stands in ``OUT/results`` as a small file, to be
kept; what it was made of (stores, runs, models) stands in the work folder, and may be thrown away:
it is only made again where a result that is still missing needs it.
"""

import json
import platform
import shutil
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bertsmith import __version__
from bertsmith.errors import BertsmithError
from bertsmith.files import write_json
from bertsmith.lab.making import KINDS, LATE, OUTCOME, SPENT, Job, Maker, StoppedError
from bertsmith.lab.stages import Stage
from bertsmith.progress import Progress

RESULTS = "results"


class _Quiet:
    """The bars of a stage without its notes: hundreds of runs would say the same of themselves."""

    def __init__(self, progress: Progress) -> None:
        self.start, self.advance, self.finish = progress.start, progress.advance, progress.finish

    def note(self, text: str) -> None:
        """Leave it out."""


@dataclass
class Bench:
    """Where stages are made. ``makers``: how each kind is, beside those that all share.

    failures: what went wrong in this process, by the name of the stage.
    """

    out: Path
    work: Path
    progress: Progress
    makers: Mapping[str, Maker] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def result(self, stage: Stage) -> dict[str, Any] | None:
        """Return the result of a stage, None where it has not been made."""
        file = self._file(stage)
        if not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["result"]
        return found

    def make(self, stages: Mapping[str, Stage]) -> None:
        """Make every stage whose result is missing; one that fails does not take others with it.

        ``stages``: by what people call them. Raises StoppedError where a signal asks to stop.
        """
        for number, (words, stage) in enumerate(stages.items(), 1):
            if self.result(stage) is None:
                self.progress.note(f"[{number} of {len(stages)}] {words}: {stage.name}")
                self._outcome(stage, again=False)

    def missing(self, stages: Iterable[Stage]) -> list[Stage]:
        """Return every stage that ``make`` would work on, each once, in order.

        What is in vain is not among them: that it is, is written down in no time.
        """
        found: dict[str, Stage] = {}
        for stage in stages:
            if self.result(stage) is None and not self._vain(stage):
                self._collect(stage, found)
        return list(found.values())

    def _collect(self, stage: Stage, found: dict[str, Stage]) -> None:
        if stage.name in found:
            return
        for need in stage.needs.values():
            if not self._stands(need):
                self._collect(need, found)
        found[stage.name] = stage

    def _file(self, stage: Stage) -> Path:
        return self.out / RESULTS / f"{stage.name}.json"

    def _stands(self, stage: Stage) -> bool:
        """Tell whether a stage is made and what it made is still there."""
        return self.result(stage) is not None and (self.work / stage.name / OUTCOME).exists()

    def _outcome(self, stage: Stage, *, again: bool = True) -> bool:
        """Make a stage, and what it needs, unless it stands; tell whether all went well.

        ``again``: whether what it made must be there, and not its result alone.
        """
        if stage.name in self.failures:
            return False
        if self._stands(stage) or (not again and self.result(stage) is not None):
            return True
        for part, need in stage.needs.items():
            if not self._stands(need) and not self._diverged(need):
                self.progress.note(f"  its {part}: {need.name}")
                if not self._outcome(need):
                    self.failures[stage.name] = f"its {part} ({need.name}) failed"
                    return False
            if self._diverged(need):
                # Nothing can be made of it, today or tomorrow.
                result: dict[str, Any] = {"diverged": f"its {part} ({need.name}) did"}
                self._keep(stage, result, 0.0)
                return True
        return self._made(stage)

    def _vain(self, stage: Stage) -> bool:
        """Tell whether a run that it needs, or that what it needs needs, diverged."""
        return any(self._diverged(need) or self._vain(need) for need in stage.needs.values())

    def _diverged(self, stage: Stage) -> bool:
        return "diverged" in (self.result(stage) or {})

    def _made(self, stage: Stage) -> bool:
        maker = {**KINDS, **self.makers}[stage.kind]
        folder = self.work / stage.name
        folder.mkdir(parents=True, exist_ok=True)
        needs = {part: self.work / need.name / OUTCOME for part, need in stage.needs.items()}
        began = time.perf_counter()
        try:
            result = maker(Job(stage, folder, needs, _Quiet(self.progress)))
        except StoppedError:
            raise
        except BertsmithError as error:
            self._failed(stage, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - it is told, and the other stages go on
            self._failed(stage, f"{type(error).__name__}: {error}")
            (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
            return False
        late = result.pop(LATE, None)
        self._keep(stage, result, time.perf_counter() - began)
        if stage.kind in SPENT:
            shutil.rmtree(folder)
        if late is not None:
            raise StoppedError(late)
        return True

    def _failed(self, stage: Stage, why: str) -> None:
        self.failures[stage.name] = why
        self.progress.note(f"{stage.name} failed: {why}")

    def _keep(self, stage: Stage, result: dict[str, Any], seconds: float) -> None:
        """Write a result, and all that was run, for whoever doubts it."""
        record = {
            "bertsmith": __version__,
            "kind": stage.kind,
            "settings": dict(stage.settings),
            "needs": {part: need.name for part, need in stage.needs.items()},
            "files": {part: path.name for part, path in stage.files.items()},
            "result": result,
            "wall_seconds": round(seconds, 1),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": {"processor": platform.processor() or platform.machine(),
                        "threads": torch.get_num_threads(), "torch": torch.__version__},
        }  # fmt: skip
        write_json(self._file(stage), record, rows=True)
