"""Runs the stages of an experiment in order and skips stages that already have a result.

Results are kept in ``results.jsonl``, outputs such as stores and models in the work directory. The
work directory may be deleted: a stage runs again only if a stage without a result needs its output.
"""

import json
import shutil
import signal
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

from bertsmith.compatibility.lab import OLD_STAGE_OUTPUT, downgrade_stage_name, upgrade_lab_record
from bertsmith.errors import BertsmithError, RunError, StoppedError, StoreError
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
)
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.version import __version__

#: File in a stage's directory. It is written last and shows that the output is complete.
_RECORD_FILE = "result.json"
#: Result fields that are compared if a stage runs again. The last digits may differ on another
#: machine or with another number of threads.
_COMPARED_FIELDS = ("heldout_metrics", "metrics")
#: Result fields of texts, vocabularies and stores, which are equal on all machines.
_EXACT_FIELDS = ("characters", "vocab_size", "splits")
#: Required fields of a result by the kind of its stage, unless the run diverged.
_REQUIRED_FIELDS = {
    "pretrain": ("heldout_metrics", "heldout_curve", "training_curve", "gradient_norms"),
    "finetune": ("metric_names", "metrics"),
}


class _SilentProgress:
    """Forwards progress bars. Omits messages, which would be the same for hundreds of runs."""

    def __init__(self, progress: Progress) -> None:
        self.start, self.advance, self.finish = progress.start, progress.advance, progress.finish

    def log(self, text: str) -> None:
        """Ignore the message."""


@dataclass
class Runner:
    """Runs stages and stores their results.

    Attributes:
        results_dir: The directory of the results file.
        work_dir: The directory of stage outputs.
        progress: Receives progress bars and messages.
        stage_functions: Additional functions by the kind of stage, see ``STAGE_FUNCTIONS``.
        failures: Error messages of stages that failed in this process, by stage name.
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
        """Return the result of a stage, None if it is missing."""
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
        """Run every stage without a result. If a stage fails, the others still run.

        Args:
            stages: The stages by their description in messages.

        Raises:
            StoppedError: The process received a signal to stop.
        """
        try:
            for number, (description, stage) in enumerate(stages.items(), 1):
                if self.get_result(stage) is None:
                    self.progress.log(f"[{number} of {len(stages)}] {description}: {stage.name}")
                    self._ensure_result(stage)
        except KeyboardInterrupt:
            # Only training runs handle the signal themselves.
            raise StoppedError(signal.SIGINT) from None

    def find_missing_stages(self, stages: Iterable[Stage]) -> list[Stage]:
        """Return the stages that ``run_stages`` would compute, dependencies first.

        Stages that need no computation are excluded: their output is in the work directory, or
        they depend on a diverged run. ``run_stages`` only adds records for them.
        """
        missing: dict[str, Stage] = {}
        for stage in stages:
            if self.get_result(stage) is None and not self._depends_on_diverged(stage):
                self._collect_missing(stage, missing)
        return list(missing.values())

    def _collect_missing(self, stage: Stage, missing: dict[str, Stage]) -> None:
        """Add a stage and its dependencies to ``missing`` unless their outputs exist."""
        if stage.name in missing or self._read_work_record(stage) is not None:
            return
        for dependency in stage.dependencies.values():
            self._collect_missing(dependency, missing)
        missing[stage.name] = stage

    def _has_result_and_output(self, stage: Stage) -> bool:
        """Return whether a stage has a result, and a complete output for other stages to read."""
        return self.get_result(stage) is not None and self._read_work_record(stage) is not None

    def _read_work_record(self, stage: Stage) -> dict[str, Any] | None:
        """Return a stage's record from the work directory, None if the output is not complete."""
        folder = self._stage_dir(stage)
        record = _read_record(folder / _RECORD_FILE)
        if record is None or not record.get("has_output", True) or _output_path(folder).exists():
            return record
        return None

    def _stage_dir(self, stage: Stage) -> Path:
        """Return the directory of a stage, under its name in version 0.1 if that exists."""
        folder = self.work_dir / stage.name
        old_folder = self.work_dir / downgrade_stage_name(stage.name)
        return old_folder if old_folder.exists() and not folder.exists() else folder

    def _ensure_result(self, stage: Stage) -> bool:
        """Run a stage unless it has a result; return whether it has one now."""
        if stage.name in self.failures:
            return False
        return self.get_result(stage) is not None or self._run_with_dependencies(stage)

    def _ensure_output(self, stage: Stage) -> bool:
        """Run a stage unless it has a result and an output; return whether it has both now."""
        if stage.name in self.failures:
            return False
        return self._has_result_and_output(stage) or self._run_with_dependencies(stage)

    def _run_with_dependencies(self, stage: Stage) -> bool:
        """Run a stage after its dependencies; return whether all of them succeeded."""
        if self._read_work_record(stage) is not None:
            # The stage ran for another results directory. Its record is copied, which needs no
            # dependency.
            return self._try_stage(stage, partial(self._run, stage))
        for role, dependency in stage.dependencies.items():
            if not self._has_result_and_output(dependency) and not self._has_diverged(dependency):
                self.progress.log(f"  its {role}: {dependency.name}")
                if not self._ensure_output(dependency):
                    self.failures[stage.name] = f"its {role} ({dependency.name}) failed"
                    return False
            if self._has_diverged(dependency):
                # The stage can never run, so divergence is stored as its result.
                result = {"diverged": f"its {role} ({dependency.name}) diverged"}
                record = _build_record(stage, result, 0.0)
                return self._try_stage(stage, partial(self._append_record, stage, record))
        return self._try_stage(stage, partial(self._run, stage))

    def _depends_on_diverged(self, stage: Stage) -> bool:
        """Return whether a direct or indirect dependency diverged."""
        return any(
            self._has_diverged(dependency) or self._depends_on_diverged(dependency)
            for dependency in stage.dependencies.values()
        )

    def _has_diverged(self, stage: Stage) -> bool:
        """Return whether a stage diverged, according to its result or its work record."""
        result = self.get_result(stage)
        if result is None:
            record = self._read_work_record(stage)
            result = {} if record is None else record["result"]
        return "diverged" in result

    def _try_stage(self, stage: Stage, run: Callable[[], int | None]) -> bool:
        """Call ``run`` for a stage and return whether it succeeded.

        Errors are added to ``failures``.

        Args:
            stage: The stage.
            run: Runs the stage. It returns the number of a signal that arrived too late to stop
                the stage, otherwise None.

        Raises:
            StoppedError: The process received a signal to stop.
        """
        try:
            late_signal = run()
        except StoppedError:
            raise
        except StoreError as error:
            hint = ""
            if "store" in stage.dependencies:
                # The error suggests `bertsmith prepare`, which does not repair the lab's store.
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
        """Run a stage while holding its lock.

        Returns:
            The number of a signal that arrived too late to stop the stage, otherwise None.
        """
        folder = self._stage_dir(stage)
        with self._lock(folder):
            # Another process may have run the stage while this one waited for the lock.
            if stage.kind in RESULT_ONLY_KINDS and self.get_result(stage) is not None:
                return None
            if (record := self._read_work_record(stage)) is not None:
                if self.get_result(stage) is None:
                    self._append_record(stage, record)
                return None
            (folder / _RECORD_FILE).unlink(missing_ok=True)
            return self._run_locked(stage, folder)

    def _run_locked(self, stage: Stage, folder: Path) -> int | None:
        """Run a stage whose lock is held; see ``_run``."""
        start = time.perf_counter()
        output = _output_path(folder)
        is_resumed = output.exists()
        inputs = {
            role: _output_path(self._stage_dir(dependency))
            for role, dependency in stage.dependencies.items()
        }
        stage_function = {**STAGE_FUNCTIONS, **self.stage_functions}[stage.kind]
        result = stage_function(Job(stage, output, inputs, _SilentProgress(self.progress)))
        late_signal: int | None = result.pop(LATE_SIGNAL, None)
        stored_result = self.get_result(stage)
        is_first_divergence = stored_result is not None and "diverged" not in stored_result
        if "diverged" in result and is_first_divergence:
            # The stored result is kept, because other results were computed from that run.
            raise RunError(
                f"the stage ran again and diverged, unlike the first time: {result['diverged']}"
            )
        if stored_result is not None:
            _check_equal_data(stored_result, result)
        # For a resumed stage, only the time since it was resumed is known.
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
        """Return when and on which machine the outputs of a stage's dependencies were computed.

        An output that was deleted and computed again is newer than its record in the results file.
        """
        provenance: dict[str, Any] = {}
        for role, dependency in stage.dependencies.items():
            record = self._read_work_record(dependency)
            if record is not None:
                fields = ("date", "machine", "input_provenance")
                provenance[role] = {name: record[name] for name in fields if name in record}
        return provenance

    @contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Hold the lock of a stage's directory; wait while another process runs the stage."""
        folder.mkdir(parents=True, exist_ok=True)
        message = f"  waiting for {folder.name}, which another process runs"
        lock_file = folder.with_name(f".{folder.name}.lock")
        with hold_lock(lock_file, on_wait=lambda: self.progress.log(message)):
            # The process that held the lock may have deleted the directory.
            folder.mkdir(parents=True, exist_ok=True)
            yield

    def _add_failure(self, stage: Stage, message: str, trace: str = "") -> None:
        """Add a failure, log it, and write its traceback into the stage's directory."""
        self.failures[stage.name] = message
        self.progress.log(f"{stage.name} failed: {message}")
        folder = self._stage_dir(stage)
        if trace and folder.is_dir():
            # Writing fails too if a full disk caused the failure.
            with suppress(OSError):
                (folder / "traceback.txt").write_text(trace, encoding="utf-8")

    def _append_record(self, stage: Stage, record: dict[str, Any]) -> None:
        """Append a stage's record to the results file.

        The first result is kept, because other results were computed from it. The metrics of later
        runs are added under "reruns".
        """
        first_record = self._get_record(stage)
        if first_record is not None:
            result = record["result"]
            metrics = {name: result[name] for name in _COMPARED_FIELDS if name in result}
            first_metrics = {name: first_record["result"].get(name) for name in metrics}
            # The metrics are compared as JSON, because NaN is not equal to itself. In JSON, NaN
            # becomes null.
            if dump_json(metrics) != dump_json(first_metrics):
                self.progress.log(f"  {stage.name}: the numbers differ from the first run")
            rerun = {"date": record["date"], "machine": record["machine"], **metrics}
            reruns = [*first_record.get("reruns", ()), rerun]
            record = {**first_record, "reruns": reruns}
        self.results.append(stage.name, record)


def _check_equal_data(stored_result: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Raise RunError if a text, vocabulary or store differs from the one of the stored result."""
    for name in _EXACT_FIELDS:
        if name in stored_result and result.get(name) != stored_result[name]:
            raise RunError(
                f"the stage ran again, and {name} is {result.get(name)} instead of "
                f"{stored_result[name]}: another version of Bertsmith made the stored results; use "
                "that version, or give other folders for --results and --work"
            )


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Return whether a record has all fields that the kind of its stage requires."""
    try:
        result = record["result"]
        required_fields = _REQUIRED_FIELDS.get(record["kind"], ())
    except (LookupError, TypeError):
        return False
    if not isinstance(result, dict):
        return False
    return "diverged" in result or result.keys() >= set(required_fields)


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return the record in a stage's directory, None if it is missing, damaged or incomplete."""
    try:
        record = upgrade_lab_record(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return record if _is_complete(record) else None


def _output_path(folder: Path) -> Path:
    """Return the path of a stage's output: the version 0.1 path if it exists, else the new one."""
    old_path = folder / OLD_STAGE_OUTPUT
    return old_path if old_path.exists() else folder / OUTPUT


def _build_record(stage: Stage, result: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """Return the record of a result: what it depends on, and when and where it was computed."""
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
