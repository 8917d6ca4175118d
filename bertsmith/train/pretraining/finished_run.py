"""Recognizes finished pre-training runs, which are neither trained nor written again."""

from pathlib import Path

from bertsmith.bundle.directory import find_weights_file
from bertsmith.errors import RunError
from bertsmith.progress import Progress
from bertsmith.settings import get_table, read_stored_settings
from bertsmith.train.engine import checkpoint, metrics_log
from bertsmith.train.engine.checkpoint import TrainingState
from bertsmith.train.engine.loop import TrainingOutcome
from bertsmith.train.engine.metrics_log import METRICS_FILE
from bertsmith.train.engine.run_directory import MODEL_DIR, SETTINGS_FILE
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.result import PretrainResult


def is_pretraining_finished(run: Path) -> bool:
    """Return whether a run has its model, and an evaluation after its last step.

    A run with a time budget has a number of steps when it is finished.

    Raises:
        RunError: If an unfinished run has a model, which training would overwrite, and no
            checkpoint from which it can continue.
    """
    has_model = find_weights_file(run / MODEL_DIR) is not None
    if not (has_model and (run / SETTINGS_FILE).exists()):
        return False
    steps = get_table(read_stored_settings(run / SETTINGS_FILE), "schedule").get("steps")
    if isinstance(steps, int) and metrics_log.read_heldout_metrics(run, steps):
        return True
    if not checkpoint.list_checkpoints(run):
        raise RunError(
            f"{run}: this run has a model, but neither a checkpoint to continue from nor the "
            f"metrics of its last step in {METRICS_FILE}; give --out another directory, or remove "
            f"{run / MODEL_DIR} to train this run again from the start"
        )
    return False


def load_finished_result(
    run: Path, settings: PretrainSettings, curve: Path | None, progress: Progress
) -> PretrainResult:
    """Return the result of a finished run, whose model and metrics are not changed.

    Args:
        run: Run directory.
        settings: Stored settings of the run.
        curve: Image file of the loss curve; None if it cannot be drawn.
        progress: Receives a log message.
    """
    steps = settings.schedule.total_steps()
    progress.log(
        f"{run}: this run is already finished (step {steps} of {steps}); give --out another "
        "directory to start a new one"
    )
    lines = metrics_log.read_metrics(run)
    seconds = max((line["seconds"] for line in lines if "seconds" in line), default=0.0)
    return PretrainResult(
        run=run,
        model=run / MODEL_DIR,
        settings=settings,
        outcome=TrainingOutcome(TrainingState(step=steps, seconds=seconds), signal=None),
        heldout=metrics_log.read_heldout_metrics(run),
        start_heldout=metrics_log.read_heldout_metrics(run, step=0),
        curve=curve,
        was_finished=True,
    )
