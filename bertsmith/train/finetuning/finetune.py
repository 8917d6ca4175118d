"""Fine-tuning from a model directory and a task's files to a fine-tuned model directory.

It never knows of the command line; what it has to say goes to a ``Progress``.
"""

import json
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
from bertsmith.errors import SettingsError
from bertsmith.files import restore_nan, write_atomic, write_json
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime import device
from bertsmith.settings import user_settings
from bertsmith.tasks.families import get_family, resolve_metrics
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.metrics import LOWER_IS_BETTER
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.engine import checkpoint, loop, metrics_log, optimizer, schedule
from bertsmith.train.engine.loop import LoopOptions
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
    model_overrides,
)
from bertsmith.train.finetuning.summary import log_run_summary, warn_below_majority_class
from bertsmith.train.finetuning.task_data import (
    TaskData,
    build_head,
    check_files_unchanged,
    find_unseen_labels,
    hash_task_files,
    read_task_data,
    resolve_task_settings,
    with_model,
    with_task,
)

MODEL_DIR, RESULT_FILE = "model", "result.json"


@dataclass(frozen=True)
class FinetuneResult:
    """What became of a fine-tuning run; of a finished one it stands in RUN/result.json.

    model: None where a signal stopped the run after ``step`` of ``steps``. metrics: the names of
    the task's metrics, the first one decides. figures: the evaluation of the weights that were
    chosen. counts: what became of the rows of each file, and the known labels that no training
    example has. seconds: spent training.
    """

    run: Path
    model: Path | None
    signal: int | None
    step: int
    steps: int
    metrics: list[str]
    figures: dict[str, float]
    counts: dict[str, dict[str, Any]]
    seconds: float
    #: A signal that came when there was nothing left to stop.
    late: int | None = None


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
    """Fine-tune the encoder of ``model`` on a task and write the run, with its model, to ``out``.

    task: the name of a public task, with ``data`` its folder; or a family, such as "classify",
    with ``data`` a file. values: nested settings, as of ``FinetuneSettings``; assignments: "a.b=v"
    over them.
    Called again with the same arguments it goes on where the last call stopped.
    Raises BertsmithError.
    """
    run, progress, model = Path(out), progress or NullProgress(), pin_model_path(model)
    check_run_directory(run)
    said = user_settings(config, values, assignments)
    settings = resolve_task_settings(task, model, Path(data) if data else None, said)
    check_files_exist(settings.task)
    examples = read_task_data(settings.task, allow_numeric="kind" in said.get("task", {}))
    head = build_head(settings.task, examples)
    examples.counts["train"].unseen_labels = find_unseen_labels(settings.task, head, examples)
    facts = {"labels": list(head.labels), "fingerprint": hash_task_files(settings.task)}
    settings = with_task(settings, facts)
    # Some metrics are for some numbers of labels only, and these are known now.
    resolve_metrics(settings.task)
    torch.manual_seed(settings.run.seed)
    start = load_for_fine_tuning(model, head, model_overrides(said), settings.features)
    settings = with_model(settings, start)
    run.mkdir(parents=True, exist_ok=True)
    with lock_run(run), restore_num_threads(settings.run.threads):
        check_files_unchanged(run, settings.task)
        stored = load_run_settings(run, settings)
        # A model that is gone is written again, as long as there is what it was written from.
        gone = not (run / MODEL_DIR).exists() and checkpoint.list_checkpoints(run)
        if stored is not None and (run / RESULT_FILE).exists() and not gone:
            progress.log(f"{run}: this run is finished; give --out another directory for a new one")
            return _finished(run)
        result = _train(
            stored or settings, start, head, examples, run, progress, new=stored is None
        )
        if result.model is not None and not settings.checkpoint.keep_optimizer:
            checkpoint.remove_optimizer_state(run, progress)
        return result


def _train(
    settings: FinetuneSettings,
    start: FineTunedBundle,
    head: HeadConfig,
    data: TaskData,
    run: Path,
    progress: Progress,
    *,
    new: bool,
) -> FinetuneResult:
    task, options = settings.task, settings.run
    machine = device.resolve_machine(
        options.device, options.precision, options.kernel,
        attention_dropout=settings.model.attention_dropout,
        threads=options.threads or _threads(options, progress),
    )  # fmt: skip
    longest = task.length or settings.model.max_positions
    tokens = min(task.batch, len(data.train)) * longest
    # A frozen encoder has no gradients and no moments.
    if options.freeze is None and not (settings.features and settings.features.frozen):
        device.check_memory(machine, settings.model, tokens, options.micro_batch_tokens)
    model = start.model.to(machine.device)
    work = _work(settings, start, head, data, machine)
    _freeze(start, options.freeze)
    if new:
        settings = _settled(settings, machine, work.steps_per_epoch)
        write_atomic(run / SETTINGS_FILE, settings.to_toml())
    log_run_summary(progress, run, task, start, data, machine)
    adam = optimizer.build_optimizer(model, settings.optim)
    plan = _plan(settings, machine, work.steps_per_epoch)
    outcome = loop.train(work, model, adam, machine, plan, run, progress)
    state, figures = outcome.state, _last_figures(run)
    best = options.choose == "best" or options.patience is not None
    if outcome.signal is None and best and state.best_step is not None:
        checkpoint.load_best(run, state.best_step, model)
        figures = _last_figures(run, state.best_step)
    counts = {name: one.as_dict() for name, one in data.counts.items()}
    result = FinetuneResult(
        run, None, outcome.signal, state.step, plan.steps, task.metrics, figures, counts,
        state.seconds,
    )  # fmt: skip
    if outcome.signal is not None:
        return result
    warn_below_majority_class(progress, task, data, figures)
    info = {"task": task.name, "provenance": settings.model_dump(mode="json"),
            "heldout": figures}  # fmt: skip
    save_fine_tuned(run / MODEL_DIR, model, start.tokenizer, head, info)
    write_json(run / RESULT_FILE, {key: value for key, value in asdict(result).items()
                              if key not in ("run", "model", "late")})  # fmt: skip
    return replace(result, model=run / MODEL_DIR, late=outcome.late_signal)


def _threads(options: FinetuneRunSettings, progress: Progress) -> int | None:
    """Return fewer threads than usual if other processes use the cores; None for the usual."""
    available = torch.get_num_threads()
    if available == 1 or not device.is_cpu(options.device):
        return None
    threads = count_free_cores(device.measure_load(), available)
    if threads == available:
        return None
    progress.log(
        f"this machine is busy: training with {threads} of {available} threads (run.threads)"
    )
    return threads


def _finished(run: Path) -> FinetuneResult:
    """Return the result of a run that is finished."""
    said = json.loads((run / RESULT_FILE).read_text(encoding="utf-8"))
    said["figures"] = restore_nan(said["figures"])
    return FinetuneResult(run=run, model=run / MODEL_DIR, **said)


def _work(
    settings: FinetuneSettings,
    start: FineTunedBundle,
    head: HeadConfig,
    data: TaskData,
    machine: device.Machine,
) -> FinetuningObjective:
    task, family = settings.task, get_family(settings.task.kind)
    start.model.bert.kernel = machine.kernel

    def encoded(name: str, examples: list[Any]) -> ModelInputs:
        # A share that is held out was read from the training table, and is counted with it.
        counts = data.counts.get(name, data.counts["train"])
        return family.encode_examples(examples, start.tokenizer, head, task, counts)

    train = encoded("train", data.train)
    data.counts["train"].num_without_target = len(train) - len(train.indices_with_target())
    heldout = {name: HeldoutSet(own, encoded(name, own)) for name, own in data.heldout.items()}
    return FinetuningObjective(
        start.model, head, task, train, heldout, machine,
        micro_batch_tokens=settings.run.micro_batch_tokens, seed=settings.run.seed,
        class_weights=_class_weights(task, head, train),
    )  # fmt: skip


def _class_weights(
    task: TaskSettings, head: HeadConfig, train: ModelInputs
) -> NDArray[np.float32] | None:
    """Return what a target of each class counts, float32 [C], or None where all count 1."""
    if task.class_weights == "none":
        return None
    if head.kind not in ("single", "entities", "tags"):
        raise SettingsError("task.class_weights 'balanced' is for one label a text, or a word")
    assert train.targets is not None
    targets = np.concatenate(train.targets)
    occurs = np.bincount(targets, minlength=head.num_outputs)
    return (len(targets) / (head.num_outputs * occurs.clip(min=1))).astype(np.float32)


def _settled(settings: FinetuneSettings, machine: device.Machine, epoch: int) -> FinetuneSettings:
    timing = settings.schedule
    if timing.minutes is not None:
        raise SettingsError("schedule.minutes: fine-tuning takes schedule.epochs or .steps")
    assert timing.steps or timing.epochs
    steps = timing.steps or max(1, round((timing.epochs or 0) * epoch))
    run = settings.run.model_copy(
        update={"device": str(machine.device), "precision": machine.precision,
                "kernel": machine.kernel, "threads": torch.get_num_threads()}
    )  # fmt: skip
    every = settings.checkpoint.every or epoch
    return settings.model_copy(
        update={
            "run": run,
            "schedule": timing.model_copy(update={"steps": steps}),
            "checkpoint": settings.checkpoint.model_copy(update={"every": every}),
        }
    )


def _plan(settings: FinetuneSettings, machine: device.Machine, epoch: int) -> LoopOptions:
    timing = settings.schedule
    assert settings.checkpoint.every is not None
    return LoopOptions(
        steps=timing.total_steps(),
        seed=settings.run.seed,
        max_grad_norm=settings.optim.max_grad_norm,
        lr_at_step=lambda step: settings.optim.lr * schedule.lr_factor(step, timing),
        log_every=settings.run.log_every,
        eval_every=epoch if settings.run.evaluate == "epoch" else timing.total_steps(),
        checkpoint_every=settings.checkpoint.every,
        keep_checkpoints=settings.checkpoint.keep,
        selection_metric=settings.task.metrics[0],
        higher_is_better=settings.task.metrics[0] not in LOWER_IS_BETTER,
        patience=settings.run.patience,
        measure_peak_macs=lambda: device.measure_peak_macs(machine),
    )


def _freeze(start: FineTunedBundle, layers: int | None) -> None:
    """Leave the embeddings and so many layers from below as they are."""
    if layers is None:
        return
    if isinstance(start.model, BertWithBiLSTM) and start.model.features.frozen:
        raise SettingsError("run.freeze: with features the whole encoder stays as it is anyway")
    if layers > start.config.layers:
        raise SettingsError(
            f"run.freeze is {layers}, but the model has {start.config.layers} layers"
        )
    start.model.bert.embeddings.requires_grad_(False)
    for layer in list(start.model.bert.encoder.layers)[:layers]:
        layer.requires_grad_(False)


def _last_figures(run: Path, step: int | None = None) -> dict[str, float]:
    lines = [line for line in metrics_log.read_metrics(run) if line["kind"] == "heldout"]
    lines = [line for line in lines if step is None or line["step"] == step]
    return {k: v for k, v in lines[-1].items() if k not in ("step", "kind")} if lines else {}
