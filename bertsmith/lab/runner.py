"""Makes the stages of an experiment one after another: what stands is not made again.

Results are kept in ``results.jsonl``. What they were computed from (stores, runs, models) is in the
work folder and may be deleted: it is only made again where a missing result needs it.
"""

import fcntl
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertsmith.errors import BertsmithError, RunError, StoreError
from bertsmith.files import dump_json, write_json
from bertsmith.lab.results import RESULTS_FILE, ResultsFile
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import (
    LATE_SIGNAL,
    OUTPUT,
    RESULT_ONLY_KINDS,
    STAGE_FUNCTIONS,
    Job,
    StageFunction,
    StoppedError,
)
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.version import __version__

#: What is written into a stage's folder last, its result: an outcome alone may be half of one.
WHOLE = "result.json"
#: What a result is compared by when its stage was made again, and no run of another machine, or of
#: another number of threads, has to the last digit.
_COMPARED = ("heldout", "figures")
#: What a result of a kind must hold to be one, unless it tells that the run diverged.
_HELD = {
    "pretrain": ("heldout", "heldout_curve", "training", "gradients"),
    "finetune": ("figures",),
}


class _Quiet:
    """The bars of a stage without its notes: hundreds of runs would say the same of themselves."""

    def __init__(self, progress: Progress) -> None:
        self.start, self.advance, self.finish = progress.start, progress.advance, progress.finish

    def log(self, text: str) -> None:
        """Leave it out."""


@dataclass
class Runner:
    """Where stages are made. ``makers``: how each kind is, beside those that all share.

    failures: what went wrong in this process, by the name of the stage.
    """

    #: The folder of the results file.
    results_dir: Path
    work_dir: Path
    progress: Progress
    stage_functions: Mapping[str, StageFunction] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _incomplete: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Open the results file."""
        self.results = ResultsFile(self.results_dir / RESULTS_FILE, self.progress.log)

    def get_result(self, stage: Stage) -> dict[str, Any] | None:
        """Return the result of a stage, None where it has not been made."""
        record = self._record(stage)
        return None if record is None else record["result"]

    def _record(self, stage: Stage) -> dict[str, Any] | None:
        """Return the complete record of a stage, None if there is none or only a part of one."""
        record = self.results.get(stage.name)
        if record is None or _is_complete(record):
            return record
        if stage.name not in self._incomplete:
            self._incomplete.add(stage.name)
            self.progress.log(f"{self.results.path}: {stage.name} is incomplete; it is made again")
        return None

    def run_stages(self, stages: Mapping[str, Stage]) -> None:
        """Make every stage whose result is missing; one that fails does not take others with it.

        ``stages``: by what people call them. Raises StoppedError where a signal asks to stop.
        """
        for number, (words, stage) in enumerate(stages.items(), 1):
            if self.get_result(stage) is None:
                self.progress.log(f"[{number} of {len(stages)}] {words}: {stage.name}")
                self._outcome(stage, again=False)

    def missing_stages(self, stages: Iterable[Stage]) -> list[Stage]:
        """Return every stage that ``make`` would work on, each once, in order.

        What is in vain is not among them, nor what the work folder holds of another folder of
        results: either is written down in no time.
        """
        found: dict[str, Stage] = {}
        for stage in stages:
            if self.get_result(stage) is None and not self._vain(stage):
                self._collect(stage, found)
        return list(found.values())

    def _collect(self, stage: Stage, found: dict[str, Stage]) -> None:
        if stage.name in found or self._whole(stage) is not None:
            return
        for need in stage.dependencies.values():
            self._collect(need, found)
        found[stage.name] = stage

    def _stands(self, stage: Stage) -> bool:
        """Tell whether a stage is made and what it made is still there."""
        return self.get_result(stage) is not None and self._whole(stage) is not None

    def _whole(self, stage: Stage) -> dict[str, Any] | None:
        """Return what was told of a stage when all of it was made, if that is still there."""
        folder = self.work_dir / stage.name
        made = _read_record(folder / WHOLE)
        gone = made is not None and made.get(OUTPUT, True) and not (folder / OUTPUT).exists()
        return None if gone else made

    def _outcome(self, stage: Stage, *, again: bool = True) -> bool:
        """Make a stage, and what it needs, unless it stands; tell whether all went well.

        ``again``: whether what it made must be there, and not its result alone.
        """
        if stage.name in self.failures:
            return False
        if self._stands(stage) or (not again and self.get_result(stage) is not None):
            return True
        if self._whole(stage) is not None:
            # For another folder of results: it is taken over, and nothing that it needs is made.
            return self._tried(stage, partial(self._make, stage))
        for part, need in stage.dependencies.items():
            if not self._stands(need) and not self._diverged(need):
                self.progress.log(f"  its {part}: {need.name}")
                if not self._outcome(need):
                    self.failures[stage.name] = f"its {part} ({need.name}) failed"
                    return False
            if self._diverged(need):
                # Nothing can be made of it, today or tomorrow.
                vain = _told(stage, {"diverged": f"its {part} ({need.name}) did"}, 0.0)
                return self._tried(stage, partial(self._keep, stage, vain))
        return self._tried(stage, partial(self._make, stage))

    def _vain(self, stage: Stage) -> bool:
        """Tell whether a run that it needs, or that what it needs needs, diverged."""
        return any(self._diverged(need) or self._vain(need) for need in stage.dependencies.values())

    def _diverged(self, stage: Stage) -> bool:
        made = self.get_result(stage) or (self._whole(stage) or {}).get("result", {})
        return "diverged" in made

    def _tried(self, stage: Stage, make: Callable[[], int | None]) -> bool:
        """Tell whether a stage could be made; raise StoppedError where a signal asks to stop."""
        try:
            late = make()
        except StoppedError:
            raise
        except StoreError as error:
            way = ""
            if "store" in stage.dependencies:
                # It is not the user's own, and `bertsmith prepare` is not the way to another one.
                place = self.work_dir / stage.dependencies["store"].name
                way = f" (in the lab: remove {place}, and ask again)"
            self._failed(stage, f"{error}{way}")
            return False
        except BertsmithError as error:
            self._failed(stage, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - it is told, and the other stages go on
            self._failed(stage, f"{type(error).__name__}: {error}", traceback.format_exc())
            return False
        if late is not None:
            raise StoppedError(late)
        return True

    def _make(self, stage: Stage) -> int | None:
        """Make a stage, alone among all processes; return the signal that came when it was done."""
        folder = self.work_dir / stage.name
        with self._alone(folder):
            # By another process just now; or for another folder of results.
            if stage.kind in RESULT_ONLY_KINDS and self.get_result(stage) is not None:
                return None
            if (made := self._whole(stage)) is not None:
                if self.get_result(stage) is None:
                    self._keep(stage, made)
                return None
            (folder / WHOLE).unlink(missing_ok=True)
            return self._make_alone(stage, folder)

    def _make_alone(self, stage: Stage, folder: Path) -> int | None:
        goes_on, began = (folder / OUTPUT).exists(), time.perf_counter()
        needs = {
            part: self.work_dir / need.name / OUTPUT for part, need in stage.dependencies.items()
        }
        maker = {**STAGE_FUNCTIONS, **self.stage_functions}[stage.kind]
        result = maker(Job(stage, folder, needs, _Quiet(self.progress)))
        late: int | None = result.pop(LATE_SIGNAL, None)
        if "diverged" in result and "diverged" not in (self.get_result(stage) or result):
            # What others were made of cannot be made again: that is no finding of theirs.
            raise RunError(f"made again it diverged, which it had not: {result['diverged']}")
        # Of what was made in several goes, the last one's seconds say nothing.
        made = _told(stage, result, None if goes_on else time.perf_counter() - began)
        if stage.dependencies:
            made["made_of"] = self._made_of(stage)
        if stage.kind in RESULT_ONLY_KINDS:
            self._keep(stage, made)
            shutil.rmtree(folder)
        else:
            left = {OUTPUT: (folder / OUTPUT).exists()}
            write_json(folder / WHOLE, {**made, **left}, inline_numbers=True)
            self._keep(stage, made)
        return late

    def _made_of(self, stage: Stage) -> dict[str, Any]:
        """Return when and where what a stage needs was made, and what that was made of.

        Their results may be of an earlier time: a model may have been made again since.
        """
        records = {part: self._whole(need) for part, need in stage.dependencies.items()}
        told = ("date", "machine", "made_of")
        return {part: {name: own[name] for name in told if name in own}
                for part, own in records.items() if own}  # fmt: skip

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Hold a stage's lock; wait where another process makes the same one."""
        folder.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.progress.log(f"  another process makes {folder.name}; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            folder.mkdir(parents=True, exist_ok=True)
            yield

    def _failed(self, stage: Stage, why: str, trace: str = "") -> None:
        self.failures[stage.name] = why
        self.progress.log(f"{stage.name} failed: {why}")
        if trace and (folder := self.work_dir / stage.name).is_dir():
            # What went wrong may be the disk.
            with suppress(OSError):
                (folder / "traceback.txt").write_text(trace, encoding="utf-8")

    def _keep(self, stage: Stage, made: dict[str, Any]) -> None:
        """Write a result, and all that was run, for whoever doubts it.

        One that stood already stays, since others were made of it; what it became this time stands
        beside it under "again".
        """
        stood, now = self._record(stage), made
        if stood is not None:
            brief = {name: made["result"][name] for name in _COMPARED if name in made["result"]}
            before = {name: stood["result"].get(name) for name in brief}
            # As it stands in a file, where NaN is null.
            if dump_json(brief) != dump_json(before):
                self.progress.log(f"  {stage.name}: made again, not the same to the last digit")
            once = {"date": made["date"], "machine": made["machine"], **brief}
            now = {**stood, "again": [*stood.get("again", ()), once]}
        self.results.append(stage.name, now)


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Tell whether a record holds all that a result of its kind must hold."""
    try:
        result, required = record["result"], _HELD.get(record["kind"], ())
    except (LookupError, TypeError):
        return False
    return isinstance(result, dict) and ("diverged" in result or result.keys() >= set(required))


def _read_record(path: Path) -> dict[str, Any] | None:
    """Read the record in a work folder; None if it is missing, damaged or incomplete."""
    try:
        record: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and _is_complete(record) else None


def _told(stage: Stage, result: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """Return a result with all that decided it."""
    return {
        "bertsmith": __version__,
        "kind": stage.kind,
        "settings": dict(stage.settings),
        "needs": {part: need.name for part, need in stage.dependencies.items()},
        "files": {part: path.name for part, path in stage.files.items()},
        "result": result,
        "wall_seconds": None if seconds is None else round(seconds, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": device.processor_name(), "threads": torch.get_num_threads(),
                    "torch": torch.__version__, "auto": device.describe_auto_device()},
    }  # fmt: skip
