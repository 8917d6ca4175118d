"""Trains a student from the outputs of a teacher and writes the student as a model directory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bertsmith.bundle import compute_model_id, pin_model_path
from bertsmith.data.store import MANIFEST_FILE
from bertsmith.files import write_atomic
from bertsmith.model.bert import count_parameters
from bertsmith.plurals import count_noun
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.runtime.process_group import SINGLE_PROCESS
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.distillation import embedding_distillation, task_distillation
from bertsmith.train.distillation.embedding_distillation import EmbeddingDistillation
from bertsmith.train.distillation.settings import (
    DistillRunSettings,
    DistillSettings,
    read_overrides,
    resolve_settings,
)
from bertsmith.train.distillation.task_distillation import TaskDistillation
from bertsmith.train.distillation.text_distillation import TextDistillation
from bertsmith.train.engine.data_files import hash_files
from bertsmith.train.engine.example_counts import log_counts
from bertsmith.train.engine.finetuning_run import (
    FinetuneResult,
    RunContext,
    open_run,
    set_start_id,
)
from bertsmith.train.engine.finetuning_training import (
    EpochObjective,
    freeze_layers,
    resolve_run_machine,
    train_and_save,
)
from bertsmith.train.engine.provenance import dump_settings
from bertsmith.train.engine.run_device import record_machine
from bertsmith.train.engine.run_directory import (
    MODEL_DIR,
    SETTINGS_FILE,
    check_run_directory,
    lock_run,
)
from bertsmith.train.engine.threads import restore_torch_settings


class Distillation(Protocol):
    """The models and data of a distillation run; each objective has its own class."""

    @property
    def settings(self) -> DistillRunSettings:
        """Settings of the run, completed with values of the teacher."""

    @property
    def model(self) -> Any:
        """The student, a module with the attribute ``bert``."""

    @property
    def counts(self) -> dict[str, ExampleCounts]:
        """For each file, how many examples were read and skipped."""

    @property
    def batch_tokens(self) -> int:
        """Approximate number of tokens per step."""

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; the first one selects the best epoch."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the first metric is better."""

    def describe(self) -> str:
        """Return a description of the data and the loss."""

    def build_objective(self, run: Path, machine: Machine, progress: Progress) -> EpochObjective:
        """Compute or open the teacher's outputs, and return the objective of the training loop."""

    def save(self, directory: Path, info: Mapping[str, Any]) -> None:
        """Write the student as a model directory with ``info`` in bertsmith.json."""


def distill(
    teacher: Path | str,
    out: Path | str,
    *,
    data: Path | str | Sequence[Path | str] = (),
    start_from: Path | str | None = None,
    config: Path | str | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Train a student from the outputs of a teacher, and write the run and its model to ``out``.

    If the run was interrupted, a call with the same arguments resumes it.

    Args:
        teacher: Path or name of the teacher, as in ``load``.
        out: Run directory. OUT/model is the student.
        data: Training file, or several files.
        start_from: Model that the student starts from. None if ``values`` describe the student, as
            in ``{"distill": {"layers": 3}}``.
        config: TOML file with settings.
        assignments: Settings as "section.name=value"; override ``values`` and ``config``.
        values: Nested settings as in ``DistillRunSettings``; override ``config``.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    run = Path(out)
    progress = progress or NullProgress()
    check_run_directory(run)
    files = [Path(file) for file in ([data] if isinstance(data, Path | str) else data)]
    has_start_model = start_from is not None
    overrides = read_overrides(config, values, assignments, has_start_model=has_start_model)
    start = None if start_from is None else pin_model_path(start_from)
    settings = resolve_settings(pin_model_path(teacher), files, start, overrides)
    settings = _add_hashes(settings)
    distillation = load_distillation(settings)
    settings = distillation.settings
    run.mkdir(parents=True, exist_ok=True)
    with lock_run(run), restore_torch_settings(settings.run.threads):
        stored_settings, finished_result = open_run(run, settings, overrides, progress, "distill")
        if finished_result is not None:
            return finished_result
        settings = stored_settings or settings
        # The length of a run that was interrupted while the teacher computed is not known yet.
        is_new = stored_settings is None or settings.schedule.steps is None
        context = RunContext(run, SINGLE_PROCESS, progress, is_new)
        return _train(settings, distillation, context)


def load_distillation(settings: DistillRunSettings, *, reads_data: bool = True) -> Distillation:
    """Load the teacher, build the student with the seed of the run, and read the data.

    Args:
        settings: Settings of the run.
        reads_data: Whether to read the data; without them, the student can only be saved.
    """
    torch.manual_seed(settings.run.seed)
    classes: dict[str, Callable[..., Distillation]] = {
        "embedding": EmbeddingDistillation.load, "task": TaskDistillation.load,
    }  # fmt: skip
    load = classes.get(settings.distill.objective or "", TextDistillation.load)
    return load(settings, reads_data=reads_data)


def _add_hashes(settings: DistillRunSettings) -> DistillRunSettings:
    """Return the settings with the hashes of the data files, the teacher and the start model."""
    distill = settings.distill
    fingerprint = hash_files(_list_data_files(distill))
    teacher_hash = compute_model_id(distill.teacher)
    changed = distill.model_copy(update={"fingerprint": f"{fingerprint}{teacher_hash}"})
    settings = settings.model_copy(update={"distill": changed})
    # If the student starts from layers of the teacher, the fingerprint identifies the start model.
    is_separate = settings.run.start_from not in ("", distill.teacher)
    return set_start_id(settings) if is_separate else settings


def _list_data_files(distill: DistillSettings) -> list[Path]:
    if distill.objective == "embedding":
        return embedding_distillation.list_data_files(distill)
    if distill.objective == "task":
        return task_distillation.list_data_files(distill)
    # The manifest of a token store has checksums of its other files.
    return [Path(file) / MANIFEST_FILE for file in distill.train_files]


def _train(
    settings: DistillRunSettings,
    distillation: Distillation,
    context: RunContext,
) -> FinetuneResult:
    """Train or resume a run; if no signal stops it, write its model and result."""
    run, progress = context.run, context.progress
    machine = resolve_run_machine(
        settings.run,
        settings.model,
        distillation.batch_tokens,
        context,
        settings.optim.optimizer,
    )
    model = distillation.model
    freeze_layers(model.bert, settings.run.num_frozen_layers)
    if context.is_new:
        # Written before the teacher's outputs, because a run directory is recognized by this file,
        # and an interrupted computation continues with the same threads.
        settings = record_machine(settings, machine)
        write_atomic(run / SETTINGS_FILE, settings.to_toml())
    objective = distillation.build_objective(run, machine, progress)
    model = model.to(machine.device)
    model.bert.kernel = machine.kernel
    _log_summary(progress, run, settings, distillation, machine)

    def save_model(settings: DistillRunSettings, metrics: dict[str, float]) -> None:
        info = {"provenance": dump_settings(settings), "heldout_metrics": metrics}
        distillation.save(run / MODEL_DIR, info)

    return train_and_save(
        settings,
        model,
        objective,
        machine,
        context,
        metric_names=distillation.metric_names,
        higher_is_better=distillation.higher_is_better,
        counts=distillation.counts,
        save_model=save_model,
    )


def _log_summary(
    progress: Progress,
    run: Path,
    settings: DistillRunSettings,
    distillation: Distillation,
    machine: Machine,
) -> None:
    """Log the student, data, loss and device of a run, and warnings about its data."""
    progress.log(f"{run}: {distillation.describe()} ({device.describe_machine(machine)})")
    progress.log(f"student: {describe_student(settings, distillation.model)}")
    log_counts(progress, distillation.counts)


def describe_student(settings: DistillRunSettings, model: nn.Module) -> str:
    """Return a description of the sizes and the initial weights of the student."""
    config = settings.model
    weights = f"from {settings.run.start_from}"
    if settings.distill.size is not None:
        weights = "with random weights"
    elif settings.distill.student_layers:
        numbers = ", ".join(map(str, settings.distill.student_layers))
        weights = f"from layers {numbers} of the teacher"
    return (
        f"{count_noun(config.layers, 'layer')} of width {config.width}, "
        f"{count_parameters(model):,} parameters, "
        f"{weights}"
    )
