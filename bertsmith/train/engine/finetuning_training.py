"""Training of a fine-tuning run and its model, which all kinds of fine-tuning share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bertsmith.errors import SettingsError
from bertsmith.files import write_atomic
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.settings import SettingsType
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.engine import checkpoint, loop, metrics_log
from bertsmith.train.engine.duration import MIN_DEFAULT_INTERVAL, StepDuration
from bertsmith.train.engine.finetuning_run import FinetuneResult, RunContext, write_result
from bertsmith.train.engine.loop import LoopOptions, TrainingOutcome
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.run_device import needs_machine, record_machine
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.engine.schedule import ScheduleSettings, compute_lr_factor
from bertsmith.train.engine.settings import FinetuneRunSettings, OptimizerName
from bertsmith.train.engine.threads import count_free_cores


class EpochObjective(loop.Objective, Protocol):
    """An objective whose data have epochs."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""


def resolve_run_machine(
    options: FinetuneRunSettings,
    config: ModelConfig,
    batch_tokens: int,
    context: RunContext,
    optimizer: OptimizerName,
    *,
    is_encoder_frozen: bool = False,
) -> device.Machine:
    """Return the device, precision, attention kernel and threads of the run.

    Args:
        options: Settings of the run.
        config: Sizes of the model.
        batch_tokens: Number of tokens per step of all processes.
        context: Processes and progress of the run.
        optimizer: Optimizer of the run.
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
        threads=_choose_thread_count(options, context.progress),
        processes=context.processes,
    )
    # The check assumes that all weights are trained, which needs memory for gradients and moments.
    if options.num_frozen_layers is None and not is_encoder_frozen:
        device.check_memory(machine, config, batch_tokens, options.micro_batch_tokens, optimizer)
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


def _check_is_trainable(model: nn.Module) -> None:
    """Raise SettingsError if all parameters are frozen."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingsError(
            "run.num_frozen_layers: all layers are frozen, and this model has no other weights to "
            "train; give a smaller number"
        )


def train_and_save(
    settings: SettingsType,
    model: nn.Module,
    objective: EpochObjective,
    machine: device.Machine,
    context: RunContext,
    *,
    metric_names: list[str],
    higher_is_better: bool,
    counts: Mapping[str, ExampleCounts],
    save_model: Callable[[SettingsType, dict[str, float]], None],
) -> FinetuneResult:
    """Train or resume a run; if no signal stops it, write its model and result.

    Args:
        settings: Settings of the run, with the tables ``run``, ``optim``, ``schedule`` and
            ``checkpoint``.
        model: The model to train, on the device of ``machine``.
        objective: Computes the losses and the held-out metrics.
        machine: Device, precision, attention kernel and threads.
        context: Directory, processes and progress of the run, and whether it is new.
        metric_names: Names of the held-out metrics; the first one selects the best epoch.
        higher_is_better: Whether a higher value of the first metric is better.
        counts: For each file, how many examples were read, skipped and truncated.
        save_model: Writes the model, given the settings of the run and its held-out metrics.
    """
    run, processes, progress = context.run, context.processes, context.progress
    _check_is_trainable(model)
    resolved = _select_on_machine(
        settings, machine, objective.steps_per_epoch, is_new=context.is_new
    )
    must_write_settings = resolved is not settings
    settings = processes.broadcast(resolved)
    if must_write_settings and processes.is_main:
        write_atomic(run / SETTINGS_FILE, settings.to_toml())
    options = _build_loop_options(
        settings, machine, objective.steps_per_epoch, metric_names[0], higher_is_better
    )
    values: Any = settings
    optimizer = build_optimizer(model, values.optim, machine.dtype)
    outcome = loop.train(objective, model, optimizer, machine, options, run, progress)

    metrics = processes.run_on_main(lambda: _load_selected_weights(run, outcome, values.run, model))
    if not metrics and outcome.signal is None:
        # The user has removed the metrics log, which an error message suggests if it is damaged.
        metrics = _evaluate_model(model, objective, processes)

    def finish() -> FinetuneResult:
        result = FinetuneResult(
            run=run,
            model=None,
            signal=outcome.signal,
            step=outcome.state.step,
            steps=values.schedule.total_steps(),
            metric_names=metric_names,
            metrics=metrics,
            counts={name: file_counts.as_dict() for name, file_counts in counts.items()},
            seconds=outcome.state.seconds,
        )
        if outcome.signal is not None:
            return result
        save_model(settings, metrics)
        if not values.checkpoint.keep_optimizer:
            checkpoint.remove_optimizer_state(run, progress)
        return write_result(result, outcome)

    return processes.run_on_main(finish)


def _select_on_machine(
    settings: SettingsType, machine: device.Machine, steps_per_epoch: int, *, is_new: bool
) -> SettingsType:
    """Return the settings with the values that a run selects; the same object if it selects none.

    These are the device, precision, attention kernel and threads, unless they are already selected,
    and for a new run the number of steps.
    """
    if is_new or needs_machine(settings):
        settings = record_machine(settings, machine)
    if is_new:
        values: Any = settings
        schedule = _resolve_steps(values.schedule, steps_per_epoch)
        settings = settings.model_copy(update={"schedule": schedule})
    return settings


def _resolve_steps(schedule: ScheduleSettings, steps_per_epoch: int) -> ScheduleSettings:
    """Return the schedule with the number of steps."""
    assert schedule.steps or schedule.epochs
    steps = schedule.steps or max(
        schedule.min_steps, round((schedule.epochs or 0) * steps_per_epoch)
    )
    return schedule.model_copy(update={"steps": steps})


def _build_loop_options(
    settings: Any,
    machine: device.Machine,
    steps_per_epoch: int,
    selection_metric: str,
    higher_is_better: bool,
) -> LoopOptions:
    """Return the options of the training loop for these settings."""
    options, optim = settings.run, settings.optim
    schedule, checkpoints = settings.schedule, settings.checkpoint
    total_steps = schedule.total_steps()
    return LoopOptions(
        duration=StepDuration(total_steps, 60 * checkpoints.minutes),
        seed=options.seed,
        max_grad_norm=optim.max_grad_norm,
        lr_at_step=lambda step: optim.lr * compute_lr_factor(step, schedule),
        log_every=options.log_every,
        eval_every=steps_per_epoch if options.eval_strategy == "epoch" else total_steps,
        checkpoint_every=checkpoints.steps or max(steps_per_epoch, MIN_DEFAULT_INTERVAL),
        keep_checkpoints=checkpoints.keep,
        has_asynchronous_checkpoints=checkpoints.is_asynchronous(machine.device.type),
        selection_metric=selection_metric,
        higher_is_better=higher_is_better,
        patience=options.patience,
        average_fraction=optim.average_fraction,
        measure_peak_macs_per_second=lambda: device.measure_peak_macs_per_second(machine),
    )


def _load_selected_weights(
    run: Path, outcome: TrainingOutcome, options: FinetuneRunSettings, model: nn.Module
) -> dict[str, float]:
    """Load the weights that the settings select, and return their held-out metrics.

    The metrics are empty if they are missing in the metrics log. The weights of a run that was
    stopped by a signal are not changed.
    """
    best_step = outcome.state.best_step
    use_best = options.model_selection == "best" or options.patience is not None
    if outcome.signal is None and use_best and best_step is not None:
        checkpoint.load_best(run, best_step, model)
        return metrics_log.read_heldout_metrics(run, best_step)
    return metrics_log.read_heldout_metrics(run)


def _evaluate_model(
    model: nn.Module, objective: EpochObjective, processes: ProcessGroup
) -> dict[str, float]:
    """Return the held-out metrics of the main process's weights, computed in all processes."""
    processes.broadcast_tensors(list(model.state_dict().values()))
    model.eval()
    return processes.broadcast(objective.evaluate())
