"""Runs the stages of an experiment in order and skips those that already have a result.

Results are kept in ``results.jsonl``. What they were computed from (stores, runs, models) is in the
work directory and may be deleted: it is only computed again where a missing result needs it.
"""

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

from bertsmith.compatibility import OLD_STAGE_OUTPUT, downgrade_stage_name, upgrade_lab_record
from bertsmith.errors import BertsmithError, RunError, StoreError
from bertsmith.files import dump_json, hold_lock, write_json
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

#: Written last into a stage's directory, because the output alone may be incomplete.
_RECORD_FILE = "result.json"
#: Fields compared when a stage runs again. Even these may differ in the last digits on another
#: machine or with another number of threads.
_COMPARED_FIELDS = ("heldout_metrics", "metrics")
#: Fields that a complete result has, by kind, unless the run diverged.
_REQUIRED_FIELDS = {
    "pretrain": ("heldout_metrics", "heldout_curve", "training_curve", "gradient_norms"),
    "finetune": ("metric_names", "metrics"),
}


class _WithoutLog:
    """Forwards progress bars and drops messages, which would repeat for hundreds of runs."""

    def __init__(self, progress: Progress) -> None:
        self.start, self.advance, self.finish = progress.start, progress.advance, progress.finish

    def log(self, text: str) -> None:
        """Drop the message."""


@dataclass
class Runner:
    """Runs stages and stores their results.

    Attributes:
        results_dir: The directory of the results file.
        work_dir: The directory of stage outputs.
        progress: Receives progress bars and messages.
        stage_functions: Functions for kinds of stages beyond ``STAGE_FUNCTIONS``.
        failures: Error messages of this process, by stage name.
    """

    results_dir: Path
    work_dir: Path
    progress: Progress
    stage_functions: Mapping[str, StageFunction] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _reported_incomplete: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Open the results file."""
        self.results = ResultsFile(self.results_dir / RESULTS_FILE, self.progress.log)

    def get_result(self, stage: Stage) -> dict[str, Any] | None:
        """Return the result of a stage, None if it has none yet."""
        record = self._get_record(stage)
        return None if record is None else record["result"]

    def _get_record(self, stage: Stage) -> dict[str, Any] | None:
        """Return a stage's record from the results file, None if it is missing or incomplete."""
        record = self.results.get(stage.name)
        if record is None or _is_complete(record):
            return record
        if stage.name not in self._reported_incomplete:
            self._reported_incomplete.add(stage.name)
            self.progress.log(
                f"{self.results.path}: the result of {stage.name} is incomplete; it runs again"
            )
        return None

    def run_stages(self, stages: Mapping[str, Stage]) -> None:
        """Run every stage without a result; a failed stage does not stop the others.

        Args:
            stages: The stages by the description that messages show.

        Raises:
            StoppedError: A signal asked to stop.
        """
        for number, (description, stage) in enumerate(stages.items(), 1):
            if self.get_result(stage) is None:
                self.progress.log(f"[{number} of {len(stages)}] {description}: {stage.name}")
                self._ensure_result(stage)

    def find_missing_stages(self, stages: Iterable[Stage]) -> list[Stage]:
        """Return each stage that ``run_stages`` would compute, dependencies first.

        Stages that depend on a diverged run are left out, and so are stages whose output is in the
        work directory without a result here: both only need a new record.
        """
        missing: dict[str, Stage] = {}
        for stage in stages:
            if self.get_result(stage) is None and not self._depends_on_diverged(stage):
                self._collect_missing(stage, missing)
        return list(missing.values())

    def _collect_missing(self, stage: Stage, missing: dict[str, Stage]) -> None:
        if stage.name in missing or self._read_work_record(stage) is not None:
            return
        for dependency in stage.dependencies.values():
            self._collect_missing(dependency, missing)
        missing[stage.name] = stage

    def _has_result_and_output(self, stage: Stage) -> bool:
        return self.get_result(stage) is not None and self._read_work_record(stage) is not None

    def _read_work_record(self, stage: Stage) -> dict[str, Any] | None:
        """Return a stage's record from the work directory, None unless its output is complete."""
        folder = self._stage_dir(stage)
        record = _read_record(folder / _RECORD_FILE)
        if record is None or not record.get("has_output", True) or _output_path(folder).exists():
            return record
        return None

    def _stage_dir(self, stage: Stage) -> Path:
        """Return the directory of a stage, which version 0.1 may have created."""
        folder = self.work_dir / stage.name
        old_folder = self.work_dir / downgrade_stage_name(stage.name)
        return old_folder if old_folder.exists() and not folder.exists() else folder

    def _ensure_result(self, stage: Stage) -> bool:
        """Run a stage unless it has a result; return whether it succeeded."""
        if stage.name in self.failures:
            return False
        return self.get_result(stage) is not None or self._run_with_dependencies(stage)

    def _ensure_output(self, stage: Stage) -> bool:
        """Run a stage unless it has a result and its output; return whether it succeeded."""
        if stage.name in self.failures:
            return False
        return self._has_result_and_output(stage) or self._run_with_dependencies(stage)

    def _run_with_dependencies(self, stage: Stage) -> bool:
        """Run a stage after its dependencies; return whether all of them succeeded."""
        if self._read_work_record(stage) is not None:
            # Another results directory has it: its record is copied, without any dependency.
            return self._try_stage(stage, partial(self._run, stage))
        for role, dependency in stage.dependencies.items():
            if not self._has_result_and_output(dependency) and not self._has_diverged(dependency):
                self.progress.log(f"  its {role}: {dependency.name}")
                if not self._ensure_output(dependency):
                    self.failures[stage.name] = f"its {role} ({dependency.name}) failed"
                    return False
            if self._has_diverged(dependency):
                # Later attempts cannot succeed either, so this is stored as the result.
                result = {"diverged": f"its {role} ({dependency.name}) did"}
                record = _build_record(stage, result, 0.0)
                return self._try_stage(stage, partial(self._append_record, stage, record))
        return self._try_stage(stage, partial(self._run, stage))

    def _depends_on_diverged(self, stage: Stage) -> bool:
        """Return whether any direct or indirect dependency diverged."""
        return any(self._has_diverged(dependency) or self._depends_on_diverged(dependency)
                   for dependency in stage.dependencies.values())  # fmt: skip

    def _has_diverged(self, stage: Stage) -> bool:
        result = self.get_result(stage) or (self._read_work_record(stage) or {}).get("result", {})
        return "diverged" in result

    def _try_stage(self, stage: Stage, run: Callable[[], int | None]) -> bool:
        """Call ``run``, record an error as a failure, and return whether it succeeded.

        Args:
            stage: The stage that ``run`` runs.
            run: Returns the number of a signal that arrived too late to stop the stage, or None.

        Raises:
            StoppedError: A signal asked to stop.
        """
        try:
            late_signal = run()
        except StoppedError:
            raise
        except StoreError as error:
            hint = ""
            if "store" in stage.dependencies:
                # The error message suggests `bertsmith prepare`, which does not apply to the lab.
                path = self._stage_dir(stage.dependencies["store"])
                hint = f" (in the lab: remove {path} and run the command again)"
            self._add_failure(stage, f"{error}{hint}")
            return False
        except BertsmithError as error:
            self._add_failure(stage, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - reported; the other stages still run
            self._add_failure(stage, f"{type(error).__name__}: {error}", traceback.format_exc())
            return False
        if late_signal is not None:
            raise StoppedError(late_signal)
        return True

    def _run(self, stage: Stage) -> int | None:
        """Run a stage under its lock; return the signal that arrived too late to stop it."""
        folder = self._stage_dir(stage)
        with self._lock(folder):
            # Another process may have finished it in the meantime.
            if stage.kind in RESULT_ONLY_KINDS and self.get_result(stage) is not None:
                return None
            if (record := self._read_work_record(stage)) is not None:
                if self.get_result(stage) is None:
                    self._append_record(stage, record)
                return None
            (folder / _RECORD_FILE).unlink(missing_ok=True)
            return self._run_locked(stage, folder)

    def _run_locked(self, stage: Stage, folder: Path) -> int | None:
        output, start = _output_path(folder), time.perf_counter()
        is_resumed = output.exists()
        inputs = {role: _output_path(self._stage_dir(dependency))
                  for role, dependency in stage.dependencies.items()}  # fmt: skip
        stage_function = {**STAGE_FUNCTIONS, **self.stage_functions}[stage.kind]
        result = stage_function(Job(stage, output, inputs, _WithoutLog(self.progress)))
        late_signal: int | None = result.pop(LATE_SIGNAL, None)
        if "diverged" in result and "diverged" not in (self.get_result(stage) or result):
            # The stored result stays: other results were computed from the earlier run.
            raise RunError(
                f"the stage ran again and diverged, unlike the first time: {result['diverged']}"
            )
        # A resumed stage did not measure its total time.
        seconds = None if is_resumed else time.perf_counter() - start
        record = _build_record(stage, result, seconds)
        if stage.dependencies:
            record["input_provenance"] = self._collect_provenance(stage)
        if stage.kind in RESULT_ONLY_KINDS:
            self._append_record(stage, record)
            shutil.rmtree(folder)
        else:
            work_record = {**record, "has_output": output.exists()}
            write_json(folder / _RECORD_FILE, work_record, inline_numbers=True)
            self._append_record(stage, record)
        return late_signal

    def _collect_provenance(self, stage: Stage) -> dict[str, Any]:
        """Return when and on which machine the outputs of the dependencies were computed.

        This can differ from the records of their results, because an output may have been computed
        again later.
        """
        records = {role: self._read_work_record(dependency)
                   for role, dependency in stage.dependencies.items()}  # fmt: skip
        fields = ("date", "machine", "input_provenance")
        return {role: {name: record[name] for name in fields if name in record}
                for role, record in records.items() if record}  # fmt: skip

    @contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Hold a stage's lock; wait while another process runs the same stage."""
        folder.mkdir(parents=True, exist_ok=True)
        message = f"  waiting for {folder.name}, which another process runs"
        lock_file = folder.with_name(f".{folder.name}.lock")
        with hold_lock(lock_file, on_wait=lambda: self.progress.log(message)):
            folder.mkdir(parents=True, exist_ok=True)
            yield

    def _add_failure(self, stage: Stage, message: str, trace: str = "") -> None:
        self.failures[stage.name] = message
        self.progress.log(f"{stage.name} failed: {message}")
        if trace and (folder := self._stage_dir(stage)).is_dir():
            # A full disk may have caused the failure.
            with suppress(OSError):
                (folder / "traceback.txt").write_text(trace, encoding="utf-8")

    def _append_record(self, stage: Stage, record: dict[str, Any]) -> None:
        """Append a stage's record to the results file.

        An earlier result stays in place because other results were computed from it; the new
        numbers are added under "reruns".
        """
        earlier, updated = self._get_record(stage), record
        if earlier is not None:
            result = record["result"]
            new = {name: result[name] for name in _COMPARED_FIELDS if name in result}
            old = {name: earlier["result"].get(name) for name in new}
            # Both as JSON, where NaN is null.
            if dump_json(new) != dump_json(old):
                self.progress.log(f"  {stage.name}: the numbers differ from the first run")
            rerun = {"date": record["date"], "machine": record["machine"], **new}
            updated = {**earlier, "reruns": [*earlier.get("reruns", ()), rerun]}
        self.results.append(stage.name, updated)


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Return whether a record has all fields that its kind requires."""
    try:
        result, required = record["result"], _REQUIRED_FIELDS.get(record["kind"], ())
    except (LookupError, TypeError):
        return False
    return isinstance(result, dict) and ("diverged" in result or result.keys() >= set(required))


def _read_record(path: Path) -> dict[str, Any] | None:
    """Read the record of a stage's directory; None if it is missing, damaged or incomplete."""
    try:
        record: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    record = upgrade_lab_record(record)
    return record if _is_complete(record) else None


def _output_path(folder: Path) -> Path:
    """Return the output of a stage's directory, which version 0.1 may have written."""
    old_path = folder / OLD_STAGE_OUTPUT
    return old_path if old_path.exists() else folder / OUTPUT


def _build_record(stage: Stage, result: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """Return a result together with everything that it depends on."""
    return {
        "bertsmith": __version__,
        "kind": stage.kind,
        "settings": dict(stage.settings),
        "dependencies": {role: dependency.name for role, dependency in stage.dependencies.items()},
        "files": {role: path.name for role, path in stage.files.items()},
        "result": result,
        "wall_seconds": None if seconds is None else round(seconds, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": device.get_processor_name(), "threads": torch.get_num_threads(),
                    "torch": torch.__version__, "auto_device": device.describe_auto_device()},
    }  # fmt: skip
