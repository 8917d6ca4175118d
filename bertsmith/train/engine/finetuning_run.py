"""Parts of a run that all kinds of fine-tuning share: opening, machine, length and result."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from bertsmith.compatibility import upgrade_finetuning_result
from bertsmith.errors import RunError, SettingsError
from bertsmith.files import parse_json, restore_nan, write_json
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.settings import Settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.engine import checkpoint, metrics_log, schedule
from bertsmith.train.engine.data_files import DataFiles, SettingsType, check_files_unchanged
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.finetuning_settings import FinetuneRunSettings
from bertsmith.train.engine.loop import LoopOptions, TrainingOutcome
from bertsmith.train.engine.run_device import needs_machine, record_machine
from bertsmith.train.engine.run_directory import load_run_settings
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, OptimSettings
from bertsmith.train.engine.threads import count_free_cores

MODEL_DIR, RESULT_FILE = "model", "result.json"
RunSettingsType = TypeVar("RunSettingsType", bound=Settings)


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


def open_run(
    run: Path,
    settings: SettingsType,
    overrides: Mapping[str, Any],
    progress: Progress,
    get_data_files: Callable[[SettingsType], DataFiles],
) -> tuple[SettingsType | None, FinetuneResult | None]:
    """Return the stored settings of a run, and its result if it is finished.

    Args:
        run: Run directory.
        settings: Settings of the current command.
        overrides: The settings that the user has set.
        progress: Receives log messages.
        get_data_files: Returns the part of the settings with the data files.

    Raises:
        RunError: If the data files, or settings that affect the weights, have changed.
    """
    check_files_unchanged(run, settings, get_data_files)
    is_finished = is_run_finished(run)
    stored_settings = load_run_settings(
        run,
        settings,
        overrides,
        progress,
        # A finished run needs no device.
        is_device_available=lambda name: is_finished or device.is_device_available(name),
    )
    if stored_settings is None or not is_finished:
        return stored_settings, None
    progress.log(
        f"{run}: this run is already finished; give --out another directory to start a new one"
    )
    return stored_settings, load_result(run)


def create_result(
    run: Path,
    outcome: TrainingOutcome,
    num_steps: int,
    metric_names: list[str],
    metrics: dict[str, float],
    counts: Mapping[str, ExampleCounts],
) -> FinetuneResult:
    """Return the result of a run whose model is not written yet."""
    return FinetuneResult(
        run=run,
        model=None,
        signal=outcome.signal,
        step=outcome.state.step,
        steps=num_steps,
        metric_names=metric_names,
        metrics=metrics,
        counts={name: file_counts.as_dict() for name, file_counts in counts.items()},
        seconds=outcome.state.seconds,
    )


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


def load_best_weights(
    run: Path, outcome: TrainingOutcome, options: FinetuneRunSettings, model: nn.Module
) -> dict[str, float]:
    """Load the weights that the settings select, and return their held-out metrics.

    The weights of a run that was stopped by a signal are not changed.
    """
    best_step = outcome.state.best_step
    use_best = options.model_selection == "best" or options.patience is not None
    if outcome.signal is None and use_best and best_step is not None:
        checkpoint.load_best(run, best_step, model)
        return _read_heldout_metrics(run, best_step)
    return _read_heldout_metrics(run)


def _read_heldout_metrics(run: Path, step: int | None = None) -> dict[str, float]:
    """Return the held-out metrics in the metrics log at ``step``; None: the last ones."""
    lines = [line for line in metrics_log.read_metrics(run) if line["kind"] == "heldout"]
    if step is not None:
        lines = [line for line in lines if line["step"] == step]
    if not lines:
        return {}
    return {name: value for name, value in lines[-1].items() if name not in ("step", "kind")}


def resolve_run_machine(
    options: FinetuneRunSettings,
    config: ModelConfig,
    batch_tokens: int,
    progress: Progress,
    *,
    processes: ProcessGroup = SINGLE_PROCESS,
    is_encoder_frozen: bool = False,
) -> device.Machine:
    """Return the device, precision, attention kernel and threads of the run.

    Args:
        options: Settings of the run.
        config: Sizes of the model.
        batch_tokens: Number of tokens per step of all processes.
        progress: Receives log messages.
        processes: The processes of the run.
        is_encoder_frozen: Whether no weights of the encoder are trained.

    Raises:
        RunError: If the model does not fit into memory.
    """
    machine = device.resolve_machine(
        options.device,
        options.precision,
        options.attention_kernel,
        attention_dropout=config.attention_dropout,
        head_dim=config.head_dim,
        threads=_choose_thread_count(options, progress),
        processes=processes,
    )
    # The check assumes that all weights are trained, which needs memory for gradients and moments.
    if options.num_frozen_layers is None and not is_encoder_frozen:
        device.check_memory(machine, config, batch_tokens, options.micro_batch_tokens)
    return machine


def _choose_thread_count(options: FinetuneRunSettings, progress: Progress) -> int | None:
    """Return the number of threads: ``run.threads`` or, on a busy machine, the free CPU cores.

    None for PyTorch's default, which several processes use.
    """
    if options.threads is not None:
        return options.threads
    available = torch.get_num_threads()
    is_parallel = options.world_size is not None
    if available == 1 or is_parallel or not device.resolves_to_cpu(options.device):
        return None
    threads = count_free_cores(device.measure_cpu_load(), available)
    if threads == available:
        return None
    progress.log(
        f"this machine is busy: training with {threads} of {available} threads "
        "(set run.threads to change it)"
    )
    return threads


def select_on_machine(
    settings: RunSettingsType, machine: device.Machine, steps_per_epoch: int, *, is_new: bool
) -> RunSettingsType:
    """Return the settings with the values that a run selects; the same object if it selects none.

    These are the device, precision, attention kernel and threads, unless they are already selected,
    and for a new run the number of steps and the checkpoint interval.
    """
    if is_new or needs_machine(settings):
        settings = record_machine(settings, machine)
    if is_new:
        values: Any = settings
        budget, checkpoints = resolve_steps(values.schedule, values.checkpoint, steps_per_epoch)
        settings = settings.model_copy(update={"schedule": budget, "checkpoint": checkpoints})
    return settings


def finish_run(
    run: Path,
    outcome: TrainingOutcome,
    settings: Any,
    model: nn.Module,
    metric_names: list[str],
    counts: Mapping[str, ExampleCounts],
    progress: Progress,
    save_model: Callable[[dict[str, float]], None],
) -> FinetuneResult:
    """Return the result of a run; write it and the model, unless a signal stopped training.

    Args:
        run: Run directory.
        outcome: How training ended.
        settings: Settings of the run, with the tables ``run``, ``schedule`` and ``checkpoint``.
        model: The trained model, which gets the weights that the settings select.
        metric_names: Names of the metrics; the first one selects the best epoch.
        counts: For each file, how many examples were read, skipped and truncated.
        progress: Receives log messages.
        save_model: Writes the model, given its held-out metrics.
    """
    metrics = load_best_weights(run, outcome, settings.run, model)
    num_steps = settings.schedule.total_steps()
    result = create_result(run, outcome, num_steps, metric_names, metrics, counts)
    if outcome.signal is not None:
        return result
    save_model(metrics)
    if not settings.checkpoint.keep_optimizer:
        checkpoint.remove_optimizer_state(run, progress)
    return write_result(result, outcome)


def resolve_steps(
    budget: ScheduleSettings, checkpoints: CheckpointSettings, steps_per_epoch: int
) -> tuple[ScheduleSettings, CheckpointSettings]:
    """Return the settings with the number of steps and the checkpoint interval.

    Raises:
        SettingsError: If the settings have a time budget.
    """
    if budget.minutes is not None:
        raise SettingsError(
            f"schedule.minutes is {budget.minutes:g}, but fine-tuning has no time budget; set "
            "schedule.epochs or schedule.steps"
        )
    assert budget.steps or budget.epochs
    steps = budget.steps or max(1, round((budget.epochs or 0) * steps_per_epoch))
    checkpoint_every = checkpoints.every or steps_per_epoch
    return (
        budget.model_copy(update={"steps": steps}),
        checkpoints.model_copy(update={"every": checkpoint_every}),
    )


def build_loop_options(
    options: FinetuneRunSettings,
    optim: OptimSettings,
    budget: ScheduleSettings,
    checkpoints: CheckpointSettings,
    *,
    machine: device.Machine,
    steps_per_epoch: int,
    selection_metric: str,
    higher_is_better: bool,
) -> LoopOptions:
    """Return the options of the training loop for these settings."""
    assert checkpoints.every is not None
    total_steps = budget.total_steps()
    return LoopOptions(
        duration=StepDuration(total_steps, 60 * checkpoints.minutes),
        seed=options.seed,
        max_grad_norm=optim.max_grad_norm,
        lr_at_step=lambda step: optim.lr * schedule.compute_lr_factor(step, budget),
        log_every=options.log_every,
        eval_every=steps_per_epoch if options.eval_strategy == "epoch" else total_steps,
        checkpoint_every=checkpoints.every,
        keep_checkpoints=checkpoints.keep,
        has_asynchronous_checkpoints=checkpoints.is_asynchronous(machine.device.type),
        selection_metric=selection_metric,
        higher_is_better=higher_is_better,
        patience=options.patience,
        average_fraction=optim.average_fraction,
        measure_peak_macs_per_second=lambda: device.measure_peak_macs_per_second(machine),
    )


def freeze_layers(bert: BertModel, num_layers: int | None) -> None:
    """Freeze the embeddings and the first ``num_layers`` layers; None freezes nothing.

    Raises:
        SettingsError: If the model has fewer layers.
    """
    if num_layers is None:
        return
    if num_layers > bert.config.layers:
        raise SettingsError(
            f"run.num_frozen_layers is {num_layers}, but the model has {bert.config.layers} "
            "layers; give at most that many"
        )
    bert.embeddings.requires_grad_(False)
    for layer in list(bert.encoder.layers)[:num_layers]:
        layer.requires_grad_(False)
