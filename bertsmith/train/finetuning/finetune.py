"""Fine-tunes a model directory on a task and writes a fine-tuned model directory."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.bundle import (
    FineTunedBundle,
    HeadConfig,
    load_for_fine_tuning,
    pin_model_path,
    save_fine_tuned,
)
from bertsmith.errors import SettingsError
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.progress import Progress
from bertsmith.tasks.families import resolve_metrics
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.metrics import LOWER_IS_BETTER
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.engine.data_files import hash_files
from bertsmith.train.engine.finetuning_overrides import get_model_overrides
from bertsmith.train.engine.finetuning_run import FinetuneResult, RunContext
from bertsmith.train.engine.finetuning_training import (
    freeze_layers,
    resolve_run_machine,
    train_and_save,
)
from bertsmith.train.engine.provenance import dump_settings
from bertsmith.train.engine.run_directory import MODEL_DIR
from bertsmith.train.engine.start_run import start_run
from bertsmith.train.finetuning.objective import FinetuningObjective, encode_task_data
from bertsmith.train.finetuning.settings import (
    FinetuneSettings,
    check_files_exist,
    read_overrides,
    update_task_settings,
)
from bertsmith.train.finetuning.summary import log_run_summary, warn_below_majority_class
from bertsmith.train.finetuning.task_data import (
    TaskData,
    build_head,
    find_unseen_labels,
    read_task_data,
    resolve_model_settings,
    resolve_task_settings,
)


def finetune(
    task: str,
    model: Path | str,
    out: Path | str,
    *,
    data: Path | str | None = None,
    config: Path | str | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Fine-tune the encoder of ``model`` on a task, and write the run and its model to ``out``.

    If the run was interrupted, a call with the same arguments resumes it.

    Args:
        task: Name of a public task, such as "rte", or of a task family, such as "classify".
        model: Path or name of the model to start from, as in ``load``.
        out: Run directory.
        data: The folder of a public task, or the training file of a task family.
        config: TOML file with settings.
        assignments: Settings as "section.name=value"; override ``values`` and ``config``.
        values: Nested settings as in ``FinetuneSettings``; override ``config``.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    start, data = pin_model_path(model), Path(data) if data else None
    overrides = read_overrides(task, data, config, values, assignments)
    return start_run(
        Path(out),
        "task",
        overrides,
        lambda: _load(task, start, data, overrides),
        _train,
        progress,
    )


def _load(
    task: str, model: Path, data: Path | None, overrides: Mapping[str, Any]
) -> tuple[FinetuneSettings, tuple[FineTunedBundle, HeadConfig, TaskData]]:
    """Return the settings of a run, the model with its new head, and the examples."""
    settings = resolve_task_settings(task, model, data, overrides)
    check_files_exist(settings.task)
    examples = read_task_data(settings.task, allow_numeric="kind" in overrides.get("task", {}))
    head = build_head(settings.task, examples)
    examples.counts["train"].unseen_labels = find_unseen_labels(settings.task, head, examples)
    changes = {"labels": list(head.labels), "fingerprint": hash_files(settings.task.list_files())}
    settings = update_task_settings(settings, changes)
    # Check the metrics again, because some of them need a certain number of labels.
    resolve_metrics(settings.task)
    torch.manual_seed(settings.run.seed)
    bundle = load_for_fine_tuning(model, head, get_model_overrides(overrides), settings.features)
    return resolve_model_settings(settings, bundle), (bundle, head, examples)


def _train(
    settings: FinetuneSettings,
    inputs: tuple[FineTunedBundle, HeadConfig, TaskData],
    context: RunContext,
) -> FinetuneResult:
    """Train or resume a run; if no signal stops it, write its model and result."""
    bundle, head, data = inputs
    train, heldout = encode_task_data(data, settings.task, head, bundle.tokenizer)
    data.counts["train"].num_without_target = len(train) - len(train.find_inputs_with_target())
    mean_tokens = math.ceil(sum(map(train.count_tokens, range(len(train)))) / max(len(train), 1))
    machine = resolve_run_machine(
        settings.run,
        settings.model,
        min(settings.task.batch_size, len(train)) * mean_tokens,
        context,
        settings.optim.optimizer,
        is_encoder_frozen=settings.features is not None and settings.features.frozen,
    )
    model = bundle.model.to(machine.device)
    model.bert.kernel = machine.kernel
    objective = FinetuningObjective(
        model,
        head,
        settings.task,
        train,
        heldout,
        machine,
        micro_batch_tokens=settings.run.micro_batch_tokens,
        seed=settings.run.seed,
        class_weights=_compute_class_weights(settings.task, head, train),
        is_compiled=settings.run.is_compiled(machine.device.type),
    )
    _freeze_layers(bundle, settings.run.num_frozen_layers)
    log_run_summary(context.progress, context.run, settings.task, bundle, data, machine)

    def save_model(settings: FinetuneSettings, metrics: dict[str, float]) -> None:
        warn_below_majority_class(context.progress, settings.task, data, metrics)
        info = {
            "task": settings.task.name,
            "provenance": dump_settings(settings),
            "heldout_metrics": metrics,
        }
        save_fine_tuned(context.run / MODEL_DIR, model, bundle.tokenizer, head, info)

    return train_and_save(
        settings,
        model,
        objective,
        machine,
        context,
        metric_names=settings.task.metrics,
        higher_is_better=settings.task.metrics[0] not in LOWER_IS_BETTER,
        counts=data.counts,
        save_model=save_model,
    )


def _compute_class_weights(
    task: TaskSettings, head: HeadConfig, train: ModelInputs
) -> NDArray[np.float32] | None:
    """Return the weight of each class in the loss, float32 [C]; None if all weights are equal."""
    if task.class_weights == "none":
        return None
    if head.kind not in ("single", "entities", "tags"):
        raise SettingsError(
            f"task.class_weights is 'balanced', but the kind of the task is {head.kind!r}; class "
            "weights need one label per text or token"
        )
    assert train.targets is not None
    targets = np.concatenate(train.targets)
    class_counts = np.bincount(targets, minlength=head.num_outputs)
    return (len(targets) / (head.num_outputs * class_counts.clip(min=1))).astype(np.float32)


def _freeze_layers(bundle: FineTunedBundle, num_layers: int | None) -> None:
    """Freeze the embeddings and the first ``num_layers`` layers; None freezes nothing.

    Raises:
        SettingsError: If the model has fewer layers, or a frozen encoder below a BiLSTM.
    """
    is_frozen = isinstance(bundle.model, BertWithBiLSTM) and bundle.model.features.frozen
    if num_layers is not None and is_frozen:
        raise SettingsError(
            f"run.num_frozen_layers is {num_layers}, but features.frozen already freezes "
            "the whole encoder; leave run.num_frozen_layers out"
        )
    freeze_layers(bundle.model.bert, num_layers)
