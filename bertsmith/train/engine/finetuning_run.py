"""Opens fine-tuning runs, and reads and writes their results."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.bundle import compute_model_id
from bertsmith.compatibility import upgrade_finetuning_result
from bertsmith.errors import RunError
from bertsmith.files import parse_json, restore_nan, write_json
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.settings import SettingsType
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.data_files import check_files_unchanged
from bertsmith.train.engine.finetuning_overrides import EARLIER_DEFAULTS
from bertsmith.train.engine.loop import TrainingOutcome
from bertsmith.train.engine.run_directory import MODEL_DIR, load_run_settings

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class RunContext:
    """Directory, processes and progress of a run that is trained.

    Attributes:
        run: Run directory, which is locked.
        processes: The processes of the run.
        progress: Receives log messages and progress, in the main process.
        is_new: Whether the run must select its number of steps: it has no stored settings, or they
            have no number of steps.
    """

    run: Path
    processes: ProcessGroup
    progress: Progress
    is_new: bool


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a fine-tuning run. A finished run stores it in RUN/result.json.

    Attributes:
        run: Run directory.
        model: Model directory; None if a signal stopped the run.
        signal: Number of the signal that stopped the run; None if no signal stopped it.
        step: Number of completed steps.
        steps: Total number of steps.
        metric_names: Names of the task's metrics; the first one selects the best epoch or run.
        metrics: Held-out metrics of the weights in ``model``.
        counts: For each file, how many examples were read, skipped and truncated.
        seconds: Time spent training.
        late_signal: Number of a signal that arrived during the last step; None if there was none.
    """

    run: Path
    model: Path | None
    signal: int | None
    step: int
    steps: int
    metric_names: list[str]
    metrics: dict[str, float]
    counts: dict[str, dict[str, Any]]
    seconds: float
    late_signal: int | None = None


def set_start_id(settings: SettingsType) -> SettingsType:
    """Return the settings with the hash of the start model, which detects that it was replaced."""
    run = vars(settings)["run"]
    start_id = compute_model_id(run.start_from)
    return settings.model_copy(update={"run": run.model_copy(update={"start_id": start_id})})


def open_run(
    run: Path,
    settings: SettingsType,
    overrides: Mapping[str, Any],
    progress: Progress,
    table: str,
) -> tuple[SettingsType | None, FinetuneResult | None]:
    """Return the stored settings of a run, and its result if it is finished.

    Args:
        run: Run directory.
        settings: Settings of the current command.
        overrides: The settings that the user has set.
        progress: Receives log messages.
        table: The settings table with the data files, such as "embedding".

    Raises:
        RunError: If the data files, the start model, or settings that affect the weights, have
            changed.
    """
    check_files_unchanged(run, settings, table)
    is_finished = is_run_finished(run)
    stored_settings = load_run_settings(
        run,
        settings,
        overrides,
        progress,
        # A finished run needs no device.
        is_device_available=lambda name: is_finished or device.is_device_available(name),
        accepted_defaults=EARLIER_DEFAULTS,
    )
    if stored_settings is None or not is_finished:
        return stored_settings, None
    progress.log(
        f"{run}: this run is already finished; give --out another directory to start a new one"
    )
    return stored_settings, load_result(run)


def write_result(result: FinetuneResult, outcome: TrainingOutcome) -> FinetuneResult:
    """Write RUN/result.json of a finished run; return the result with the model directory."""
    excluded = ("run", "model", "late_signal")
    fields = {key: value for key, value in asdict(result).items() if key not in excluded}
    write_json(result.run / RESULT_FILE, fields)
    return replace(result, model=result.run / MODEL_DIR, late_signal=outcome.late_signal)


def load_result(run: Path) -> FinetuneResult:
    """Return the result that a finished run has stored in RUN/result.json.

    Raises:
        RunError: If the file is damaged.
    """
    path = run / RESULT_FILE
    try:
        fields = upgrade_finetuning_result(parse_json(path.read_bytes()))
        fields["metrics"] = restore_nan(fields["metrics"])
        return FinetuneResult(run=run, model=run / MODEL_DIR, **fields)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RunError(
            f"{path}: damaged; remove this file and run the same command again, which writes it "
            "from the last checkpoint"
        ) from None


def is_run_finished(run: Path) -> bool:
    """Return whether a run has a result and a model.

    If the model directory of a finished run was deleted, it is written again from a checkpoint.
    """
    must_rewrite_model = not (run / MODEL_DIR).exists() and checkpoint.list_checkpoints(run)
    return (run / RESULT_FILE).exists() and not must_rewrite_model
