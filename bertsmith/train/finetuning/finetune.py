"""Fine-tunes a model directory on a task and writes a fine-tuned model directory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from bertsmith.compatibility import upgrade_finetuning_result
from bertsmith.errors import RunError, SettingsError
from bertsmith.files import parse_json, restore_nan, write_atomic, write_json
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime import device
from bertsmith.tasks.families import get_family, resolve_metrics
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.metrics import LOWER_IS_BETTER
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.engine import checkpoint, loop, metrics_log, optimizer, schedule
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.loop import LoopOptions
from bertsmith.train.engine.run_device import needs_machine, record_machine
from bertsmith.train.engine.run_directory import (
    SETTINGS_FILE,
    check_run_directory,
    load_run_settings,
    lock_run,
)
from bertsmith.train.engine.threads import count_free_cores, restore_num_threads
from bertsmith.train.finetuning.objective import FinetuningObjective, HeldoutSet
from bertsmith.train.finetuning.settings import (
    FinetuneRunSettings,
    FinetuneSettings,
    check_files_exist,
    get_model_overrides,
    read_overrides,
)
from bertsmith.train.finetuning.summary import log_run_summary, warn_below_majority_class
from bertsmith.train.finetuning.task_data import (
    TaskData,
    build_head,
    check_files_unchanged,
    find_unseen_labels,
    hash_task_files,
    read_task_data,
    resolve_model_settings,
    resolve_task_settings,
    update_task_settings,
)

MODEL_DIR, RESULT_FILE = "model", "result.json"


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


def finetune(
    task: str,
    model: Path | str,
    out: Path | str,
    *,
    data: Path | str | None = None,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Fine-tune the encoder of ``model`` on a task, and write the run and its model to ``out``.

    If the run was interrupted, a call with the same arguments resumes it.

    Args:
        task: Name of a public task, such as "rte", or of a task family, such as "classify".
        model: Model directory, run directory or hub id to start from.
        out: Run directory.
        data: The folder of a public task, or the training file of a task family.
        config: TOML file with settings.
        assignments: Settings as "section.name=value"; override ``values`` and ``config``.
        values: Nested settings as in ``FinetuneSettings``; override ``config``.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    run = Path(out)
    progress = progress or NullProgress()
    model = pin_model_path(model)
    check_run_directory(run)
    data = Path(data) if data else None
    overrides = read_overrides(task, data, config, values, assignments)
    settings = resolve_task_settings(task, model, data, overrides)
    check_files_exist(settings.task)
    examples = read_task_data(settings.task, allow_numeric="kind" in overrides.get("task", {}))
    head = build_head(settings.task, examples)
    examples.counts["train"].unseen_labels = find_unseen_labels(settings.task, head, examples)
    changes = {"labels": list(head.labels), "fingerprint": hash_task_files(settings.task)}
    settings = update_task_settings(settings, changes)
    # Check the metrics again, because some of them need a certain number of labels.
    resolve_metrics(settings.task)
    torch.manual_seed(settings.run.seed)
    bundle = load_for_fine_tuning(model, head, get_model_overrides(overrides), settings.features)
    settings = resolve_model_settings(settings, bundle)
    run.mkdir(parents=True, exist_ok=True)
    with lock_run(run), restore_num_threads(settings.run.threads):
        check_files_unchanged(run, settings.task)
        # If the model directory was deleted, it is written again from a checkpoint.
        must_rewrite_model = not (run / MODEL_DIR).exists() and checkpoint.list_checkpoints(run)
        is_finished = (run / RESULT_FILE).exists() and not must_rewrite_model
        stored_settings = load_run_settings(
            run,
            settings,
            overrides,
            progress,
            # A finished run needs no device.
            is_device_available=lambda name: is_finished or device.is_device_available(name),
        )
        is_new = stored_settings is None
        if not is_new and is_finished:
            progress.log(
                f"{run}: this run is already finished; give --out another directory to start a "
                "new one"
            )
            return _load_result(run)
        settings = stored_settings or settings
        result = _train(settings, bundle, head, examples, run, progress, is_new=is_new)
        if result.model is not None and not settings.checkpoint.keep_optimizer:
            checkpoint.remove_optimizer_state(run, progress)
        return result


def _train(
    settings: FinetuneSettings,
    bundle: FineTunedBundle,
    head: HeadConfig,
    data: TaskData,
    run: Path,
    progress: Progress,
    *,
    is_new: bool,
) -> FinetuneResult:
    """Train or resume a run; if no signal stops it, write its model and result."""
    machine = _resolve_machine(settings, len(data.train), progress)
    model = bundle.model.to(machine.device)
    model.bert.kernel = machine.kernel
    objective = _build_objective(settings, bundle, head, data, machine)
    _freeze_layers(bundle, settings.run.num_frozen_layers)
    if is_new:
        settings = _resolve_on_machine(settings, machine, objective.steps_per_epoch)
        write_atomic(run / SETTINGS_FILE, settings.to_toml())
    elif needs_machine(settings):
        settings = record_machine(settings, machine)
        write_atomic(run / SETTINGS_FILE, settings.to_toml())
    log_run_summary(progress, run, settings.task, bundle, data, machine)
    adam = optimizer.build_optimizer(model, settings.optim)
    loop_options = _build_loop_options(settings, machine, objective.steps_per_epoch)
    outcome = loop.train(objective, model, adam, machine, loop_options, run, progress)
    state = outcome.state
    metrics = _read_heldout_metrics(run)
    use_best = settings.run.model_selection == "best" or settings.run.patience is not None
    if outcome.signal is None and use_best and state.best_step is not None:
        checkpoint.load_best(run, state.best_step, model)
        metrics = _read_heldout_metrics(run, state.best_step)
    result = FinetuneResult(
        run=run,
        model=None,
        signal=outcome.signal,
        step=state.step,
        steps=settings.schedule.total_steps(),
        metric_names=settings.task.metrics,
        metrics=metrics,
        counts={name: file_counts.as_dict() for name, file_counts in data.counts.items()},
        seconds=state.seconds,
    )
    if outcome.signal is not None:
        return result
    warn_below_majority_class(progress, settings.task, data, metrics)
    info = {
        "task": settings.task.name,
        "provenance": settings.model_dump(mode="json"),
        "heldout_metrics": metrics,
    }
    save_fine_tuned(run / MODEL_DIR, model, bundle.tokenizer, head, info)
    write_json(
        run / RESULT_FILE,
        {
            key: value
            for key, value in asdict(result).items()
            if key not in ("run", "model", "late_signal")
        },
    )
    return replace(result, model=run / MODEL_DIR, late_signal=outcome.late_signal)


def _resolve_machine(
    settings: FinetuneSettings, num_train_examples: int, progress: Progress
) -> device.Machine:
    """Return the device, precision, attention kernel and threads of the run.

    Raises:
        RunError: If the model does not fit into memory.
    """
    options = settings.run
    machine = device.resolve_machine(
        options.device,
        options.precision,
        options.attention_kernel,
        attention_dropout=settings.model.attention_dropout,
        head_dim=settings.model.head_dim,
        threads=options.threads or _choose_thread_count(options, progress),
    )
    max_seqlen = settings.task.max_seqlen or settings.model.max_positions
    batch_tokens = min(settings.task.batch_size, num_train_examples) * max_seqlen
    # The check assumes that all weights are trained, which needs memory for gradients and moments.
    if options.num_frozen_layers is None and not (settings.features and settings.features.frozen):
        device.check_memory(machine, settings.model, batch_tokens, options.micro_batch_tokens)
    return machine


def _choose_thread_count(options: FinetuneRunSettings, progress: Progress) -> int | None:
    """Return and log the number of free CPU cores if other processes use some, else None."""
    available = torch.get_num_threads()
    if available == 1 or not device.resolves_to_cpu(options.device):
        return None
    threads = count_free_cores(device.measure_cpu_load(), available)
    if threads == available:
        return None
    progress.log(
        f"this machine is busy: training with {threads} of {available} threads "
        "(set run.threads to change it)"
    )
    return threads


def _load_result(run: Path) -> FinetuneResult:
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


def _build_objective(
    settings: FinetuneSettings,
    bundle: FineTunedBundle,
    head: HeadConfig,
    data: TaskData,
    machine: device.Machine,
) -> FinetuningObjective:
    """Encode the examples, and return the objective of the training loop.

    Sets ``num_without_target`` in the counts of the training file.
    """
    task = settings.task
    family = get_family(task.kind)

    def encode(name: str, examples: list[Any]) -> ModelInputs:
        # Examples held out from the training file are counted as part of that file.
        counts = data.counts.get(name, data.counts["train"])
        return family.encode_examples(examples, bundle.tokenizer, head, task, counts)

    train = encode("train", data.train)
    data.counts["train"].num_without_target = len(train) - len(train.find_units_with_target())
    heldout = {
        name: HeldoutSet(examples, encode(name, examples))
        for name, examples in data.heldout.items()
    }
    return FinetuningObjective(
        bundle.model,
        head,
        task,
        train,
        heldout,
        machine,
        micro_batch_tokens=settings.run.micro_batch_tokens,
        seed=settings.run.seed,
        class_weights=_compute_class_weights(task, head, train),
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


def _resolve_on_machine(
    settings: FinetuneSettings, machine: device.Machine, steps_per_epoch: int
) -> FinetuneSettings:
    """Return the settings with the values that depend on the machine and the data.

    These are the device, precision, attention kernel, threads, steps and checkpoint interval.
    """
    budget = settings.schedule
    if budget.minutes is not None:
        raise SettingsError(
            f"schedule.minutes is {budget.minutes:g}, but fine-tuning has no time budget; set "
            "schedule.epochs or schedule.steps"
        )
    assert budget.steps or budget.epochs
    steps = budget.steps or max(1, round((budget.epochs or 0) * steps_per_epoch))
    settings = record_machine(settings, machine)
    checkpoint_every = settings.checkpoint.every or steps_per_epoch
    return settings.model_copy(
        update={
            "schedule": settings.schedule.model_copy(update={"steps": steps}),
            "checkpoint": settings.checkpoint.model_copy(update={"every": checkpoint_every}),
        }
    )


def _build_loop_options(
    settings: FinetuneSettings, machine: device.Machine, steps_per_epoch: int
) -> LoopOptions:
    """Return the options of the training loop for these settings."""
    assert settings.checkpoint.every is not None
    total_steps = settings.schedule.total_steps()
    evaluates_every_epoch = settings.run.eval_strategy == "epoch"
    return LoopOptions(
        duration=StepDuration(total_steps),
        seed=settings.run.seed,
        max_grad_norm=settings.optim.max_grad_norm,
        lr_at_step=lambda step: (
            settings.optim.lr * schedule.compute_lr_factor(step, settings.schedule)
        ),
        log_every=settings.run.log_every,
        eval_every=steps_per_epoch if evaluates_every_epoch else total_steps,
        checkpoint_every=settings.checkpoint.every,
        keep_checkpoints=settings.checkpoint.keep,
        selection_metric=settings.task.metrics[0],
        higher_is_better=settings.task.metrics[0] not in LOWER_IS_BETTER,
        patience=settings.run.patience,
        average_fraction=settings.optim.average_fraction,
        measure_peak_macs_per_second=lambda: device.measure_peak_macs_per_second(machine),
    )


def _freeze_layers(bundle: FineTunedBundle, num_layers: int | None) -> None:
    """Freeze the embeddings and the first ``num_layers`` layers; None freezes nothing.

    Raises:
        SettingsError: If the model has fewer layers, or a frozen encoder below a BiLSTM.
    """
    if num_layers is None:
        return
    if isinstance(bundle.model, BertWithBiLSTM) and bundle.model.features.frozen:
        raise SettingsError(
            f"run.num_frozen_layers is {num_layers}, but features.frozen already freezes "
            "the whole encoder; leave run.num_frozen_layers out"
        )
    if num_layers > bundle.config.layers:
        raise SettingsError(
            f"run.num_frozen_layers is {num_layers}, but the model has {bundle.config.layers} "
            "layers; give at most that many"
        )
    bundle.model.bert.embeddings.requires_grad_(False)
    for layer in list(bundle.model.bert.encoder.layers)[:num_layers]:
        layer.requires_grad_(False)


def _read_heldout_metrics(run: Path, step: int | None = None) -> dict[str, float]:
    """Return the held-out metrics in the metrics log at ``step``; None: the last ones."""
    lines = [line for line in metrics_log.read_metrics(run) if line["kind"] == "heldout"]
    if step is not None:
        lines = [line for line in lines if line["step"] == step]
    if not lines:
        return {}
    return {name: value for name, value in lines[-1].items() if name not in ("step", "kind")}
