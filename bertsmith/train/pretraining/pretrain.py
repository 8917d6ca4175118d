"""Pre-trains a BERT on a store and writes a model directory."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bertsmith import bundle
from bertsmith.data.store import SPLITS, Store
from bertsmith.data.unknown_shares import format_unknown_shares
from bertsmith.errors import MissingExtraError, StoreError
from bertsmith.files import write_atomic
from bertsmith.plurals import count_noun
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup, join_process_group
from bertsmith.settings import load_user_settings
from bertsmith.train.engine import checkpoint, curve, loop, metrics_log, probe
from bertsmith.train.engine.duration import Duration, StepDuration
from bertsmith.train.engine.loop import LoopOptions, TrainingOutcome
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.run_clock import RunClock
from bertsmith.train.engine.run_device import (
    check_same_settings,
    needs_machine,
    record_machine,
    set_world_size,
)
from bertsmith.train.engine.run_directory import (
    MODEL_DIR,
    SETTINGS_FILE,
    check_run_directory,
    create_and_lock_run,
    load_run_settings,
)
from bertsmith.train.engine.schedule import compute_lr_factor
from bertsmith.train.engine.tensorboard_log import import_summary_writer
from bertsmith.train.engine.threads import (
    MAX_CHOICE_SECONDS,
    MAX_CHOICE_SHARE,
    is_machine_busy,
    restore_torch_settings,
)
from bertsmith.train.pretraining import recipes, speed
from bertsmith.train.pretraining.finished_run import is_pretraining_finished, load_finished_result
from bertsmith.train.pretraining.provenance import build_checkpoint_provenance, build_provenance
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import Overrides, resolve_run_settings
from bertsmith.train.pretraining.result import PretrainResult
from bertsmith.train.pretraining.schedule import convert_epochs_to_steps
from bertsmith.train.pretraining.session import (
    Session,
    build_grad_norm_groups,
    describe_session,
)
from bertsmith.train.pretraining.time_budget import (
    build_time_duration,
    describe_budget,
    get_budget_seconds,
)


def pretrain(
    data: Path | str,
    out: Path | str,
    *,
    size: str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    progress: Progress | None = None,
    start_time: float | None = None,
    **overrides: Any,
) -> PretrainResult:
    """Pre-train a BERT on the store ``data`` and write the run and its model to ``out``.

    If the run was interrupted, a call with the same arguments resumes it.

    In processes started by torchrun, the function trains in all of them. Only process 0 writes
    ``out`` and reports progress; all return the same result.

    At most one of steps, epochs and minutes can be set. The default is one million steps for the
    recipe "paper", and one epoch for the recipe "fast".

    Args:
        data: Token store.
        out: Run directory.
        size: Model size, such as "tiny" or "base".
        steps: Number of steps.
        epochs: Number of passes over the training data.
        minutes: Time budget of the run, from ``start_time`` to the end of this call.
        progress: Receives log messages and progress.
        start_time: Value of ``time.perf_counter()`` at the start of the time budget; None: now.
        overrides: Other fields of ``Overrides``.

    Raises:
        BertsmithError: If the arguments or the store are invalid, or training diverges.
    """
    start_time = perf_counter() if start_time is None else start_time
    budget = {"steps": steps, "epochs": epochs, "minutes": minutes}
    with join_process_group() as processes:
        if progress is None or not processes.is_main:
            progress = NullProgress()
        return _pretrain(
            Path(data), Path(out), budget, {"size": size, **overrides}, processes, progress,
            start_time,
        )  # fmt: skip


def _pretrain(
    data: Path,
    run: Path,
    budget: Mapping[str, float | None],
    overrides: Mapping[str, Any],
    processes: ProcessGroup,
    progress: Progress,
    start_time: float,
) -> PretrainResult:
    """Run ``pretrain`` in this process of the run."""
    if processes.is_main:
        check_run_directory(run)
    store = Store.open(data)
    settings = resolve_arguments(store, data, budget, {"out": run, **overrides}, processes)
    if settings.run.tensorboard:
        # If the package is missing, fail before the run directory is created.
        import_summary_writer()
    with (
        create_and_lock_run(run, is_main=processes.is_main),
        restore_torch_settings(settings.run.threads),
    ):
        user_values = load_user_settings(
            overrides.get("config"), overrides.get("values"), overrides.get("assignments", ())
        )
        is_finished = processes.run_on_main(lambda: is_pretraining_finished(run))
        stored_settings = processes.run_on_main(
            lambda: load_run_settings(
                run,
                settings,
                user_values,
                progress,
                # A finished run needs no device.
                is_device_available=lambda name: is_finished or device.is_device_available(name),
                accepted_defaults=recipes.get_accepted_defaults(settings),
            )
        )
        if is_finished and stored_settings is not None:
            return _finish(run, stored_settings, processes, progress)
        if stored_settings is None and processes.is_main:
            # Only a new run verifies the checksums, which requires reading the whole store.
            store.verify(progress)
        if stored_settings is None or needs_machine(stored_settings):
            settings = resolve_thread_count(stored_settings or settings, store, progress)
        else:
            settings = stored_settings
        has_checkpoint = processes.run_on_main(
            lambda: stored_settings is not None and bool(checkpoint.list_checkpoints(run))
        )
        session = Session(settings, store, processes, needs_weights=not has_checkpoint)
        progress.log(f"{run}: {describe_session(session)}")
        for note in session.notes:
            progress.log(note)
        _log_unknown_tokens(session, progress)
        cost = None
        if stored_settings is None:
            session.check_heldout_split()
            session.settings, cost = resolve_on_machine(session, progress, start_time)
        elif needs_machine(stored_settings):
            session.settings = record_machine(session.settings, session.machine)
        session.settings = processes.broadcast(session.settings)
        if session.settings != stored_settings and processes.is_main:
            write_atomic(run / SETTINGS_FILE, session.settings.to_toml())
        return _train_for_duration(session, run, cost, start_time, progress)


def _finish(
    run: Path, settings: PretrainSettings, processes: ProcessGroup, progress: Progress
) -> PretrainResult:
    """Return the result of a finished run, draw its curve and remove its optimizer state."""

    def load_result() -> PretrainResult:
        curve_file = _draw_curve(run, settings, progress, is_finished=True)
        if not settings.checkpoint.keep_optimizer:
            checkpoint.remove_optimizer_state(run, progress)
        return load_finished_result(run, settings, curve_file, progress)

    return processes.run_on_main(load_result)


def _train_for_duration(
    session: Session, run: Path, cost: Cost | None, start_time: float, progress: Progress
) -> PretrainResult:
    """Train for the steps or the time budget of the settings, and write the model."""
    processes, settings = session.machine.processes, session.settings
    if get_budget_seconds(settings) is None:
        duration: Duration = StepDuration(
            settings.schedule.total_steps(), 60 * settings.checkpoint.minutes
        )
        result = _train_and_save_model(session, run, progress, duration)
    else:
        clock = RunClock(run, start_time)
        with clock if processes.is_main else nullcontext():
            duration = build_time_duration(session, clock, cost)
            result = _train_and_save_model(session, run, progress, duration)
    if result.model is not None and processes.is_main and not settings.checkpoint.keep_optimizer:
        checkpoint.remove_optimizer_state(run, progress)
    return result


def _log_unknown_tokens(session: Session, progress: Progress) -> None:
    """Log the fraction of [UNK] among the tokens of the training and the held-out split.

    Raises:
        StoreError: If all tokens of a split are [UNK].
    """
    store = session.store
    counts = {name: store.token_counts(name, session.tokenizer.unk_id) for name in SPLITS}
    for name, split_counts in counts.items():
        if split_counts.num_tokens and split_counts.num_unknown == split_counts.num_tokens:
            raise StoreError(
                f"{store.path}: all {split_counts.num_tokens:,} tokens of the split {name!r} are "
                "[UNK]; learn a vocabulary from this text (bertsmith vocab) and prepare it again"
            )
    for line in format_unknown_shares(dict(counts)):
        progress.log(line)


def write_initial_model(data: Path | str, out: Path | str, **overrides: Any) -> None:
    """Write the initial model of a run, before the first step, to the directory ``out``.

    Args:
        data: Token store.
        out: Model directory.
        overrides: Fields of ``Overrides`` except ``data``.

    Raises:
        BertsmithError: If the arguments or the store are invalid.
    """
    store = Store.open(data)
    # The number of steps does not affect the initial model.
    settings = resolve_arguments(store, Path(data), {"steps": 1}, overrides)
    session = Session(settings, store)
    info = build_checkpoint_provenance(settings, 0)
    bundle.save(Path(out), session.model.cpu(), session.tokenizer, info)


def resolve_arguments(
    store: Store,
    data: Path,
    budget: Mapping[str, float | None],
    overrides: Mapping[str, Any],
    processes: ProcessGroup = SINGLE_PROCESS,
) -> PretrainSettings:
    """Return the settings of a run from the arguments of ``pretrain``.

    Args:
        store: Token store at ``data``.
        data: Path of the store.
        budget: The values of steps, epochs and minutes.
        overrides: Other fields of ``Overrides``.
        processes: The processes of the run.

    Raises:
        SettingsError: If the processes have different settings.
    """
    arguments = Overrides(data=data, cuda=torch.cuda.is_available(), **overrides)
    settings = resolve_run_settings(arguments, store, budget, is_main=processes.is_main)
    settings = set_world_size(settings, processes)
    check_same_settings(settings, processes)
    return settings


def resolve_thread_count(
    settings: PretrainSettings, store: Store, progress: Progress
) -> PretrainSettings:
    """Return the settings with run.threads chosen by timing steps on a busy CPU.

    The settings are returned unchanged if the user has set run.threads, with several processes, on
    a GPU, and on a machine that is not busy. Fewer threads can be faster: threads synchronize after
    each matrix multiplication, so all of them wait for a thread that shares its core with another
    process.
    """
    run = settings.run
    if (
        run.threads is not None
        or torch.get_num_threads() == 1
        or run.world_size is not None
        or not device.resolves_to_cpu(run.device)
    ):
        return settings
    load = device.measure_cpu_load()
    if not is_machine_busy(load):
        return settings
    progress.log("choosing the number of threads …")
    # Time steps without torch.compile, whose graphs depend on the number of threads.
    eager = settings.model_copy(update={"run": run.model_copy(update={"compile": False})})
    session = Session(eager, store, needs_weights=False)
    choice = speed.choose_thread_count(session, load, *_get_timing_seconds(settings))
    progress.log(choice.describe())
    return _set_threads(settings, choice.num_threads)


def _get_timing_seconds(settings: PretrainSettings) -> tuple[float, float]:
    """Return the maximum duration of one timing of a thread count and of all, in seconds."""
    budget_seconds = get_budget_seconds(settings)
    if budget_seconds is None:
        return speed.THREAD_TIMING_SECONDS, MAX_CHOICE_SECONDS
    return (
        min(speed.THREAD_TIMING_SECONDS, probe.MAX_BUDGET_SHARE * budget_seconds / 10),
        min(MAX_CHOICE_SECONDS, MAX_CHOICE_SHARE * budget_seconds),
    )


def _set_threads(settings: PretrainSettings, threads: int) -> PretrainSettings:
    """Return the settings with this value of run.threads."""
    run = settings.run.model_copy(update={"threads": threads})
    return settings.model_copy(update={"run": run})


def resolve_on_machine(
    session: Session, progress: Progress, start_time: float
) -> tuple[PretrainSettings, Cost | None]:
    """Resolve the settings that depend on the machine, and the number of steps or evaluation size.

    The device, precision, attention kernel and threads depend on the machine; they are also changed
    in the settings of ``session``. Without a time budget, the number of steps and the intervals are
    set; with one, the number of sequences per evaluation is limited.

    Args:
        session: The run.
        progress: Receives log messages.
        start_time: Value of ``perf_counter`` when the run was started.

    Returns:
        The settings, and the measured cost of a run with a time budget.
    """
    machine = session.machine
    cost = None
    budget_seconds = get_budget_seconds(session.settings)
    if budget_seconds is not None:
        progress.log("measuring the speed of this machine …")
        cost = speed.measure_cost(session, _get_probe_seconds(budget_seconds))
        if cost.is_noisy:
            cost = _retry_with_fewer_threads(session, cost, progress, budget_seconds)
    session.settings = record_machine(session.settings, machine)
    if budget_seconds is None or cost is None:
        return resolve_num_steps(session), None
    resolved = recipes.limit_evaluation(session.settings, cost, budget_seconds)
    remaining_seconds = max(budget_seconds - (perf_counter() - start_time), 0.0)
    progress.log(describe_budget(session.settings, resolved, cost, remaining_seconds))
    return resolved, cost


def _retry_with_fewer_threads(
    session: Session, cost: Cost, progress: Progress, budget_seconds: float
) -> Cost:
    """Return the cost with fewer threads and set run.threads, if that is faster; else ``cost``.

    Noisy step times are a sign of a load that the operating system does not report, for example
    from other containers.
    """
    settings = session.settings
    run = settings.run
    previous = torch.get_num_threads()
    if (
        run.threads is not None
        or run.compile
        or previous == 1
        or run.world_size is not None
        or session.machine.device.type != "cpu"
    ):
        return cost
    unknown_load = CpuLoad(0.0, 0.0)
    progress.log("choosing the number of threads …")
    choice = speed.choose_thread_count(session, unknown_load, *_get_timing_seconds(settings))
    if choice.num_threads == previous:
        return cost
    progress.log(choice.describe())
    session.settings = _set_threads(settings, choice.num_threads)
    return speed.measure_cost(session, _get_probe_seconds(budget_seconds))


def _get_probe_seconds(budget_seconds: float) -> float:
    """Return the maximum duration of a probe before a run with a time budget, in seconds."""
    return min(probe.MAX_BUDGET_SECONDS, probe.MAX_BUDGET_SHARE * budget_seconds)


def resolve_num_steps(session: Session) -> PretrainSettings:
    """Return the settings of a run without a time budget, with steps and intervals."""
    settings = session.settings
    steps = settings.schedule.steps
    if steps is None:
        epochs = settings.schedule.epochs
        assert epochs is not None
        phase_shares = session.list_phase_shares()
        steps = convert_epochs_to_steps(epochs, settings.data.batch_size, phase_shares)
        steps = max(settings.schedule.min_steps, steps)
    return recipes.resolve_steps(settings, steps)


def _train_and_save_model(
    session: Session, run: Path, progress: Progress, duration: Duration
) -> PretrainResult:
    """Train, write the model directory unless a signal stopped training, and draw the curve."""
    outcome = _train(session, run, progress, duration)
    processes = session.machine.processes
    if outcome.signal is None and duration.total_steps is None:
        # From now on, the run has a fixed number of steps, all of which are completed.
        session.settings = recipes.resolve_steps(session.settings, outcome.state.step)
        if processes.is_main:
            write_atomic(run / SETTINGS_FILE, session.settings.to_toml())
    return processes.run_on_main(lambda: _save_model(session, run, progress, outcome))


def _save_model(
    session: Session, run: Path, progress: Progress, outcome: TrainingOutcome
) -> PretrainResult:
    """Write the model directory unless a signal stopped training, and draw the curve."""
    settings = session.settings
    heldout = metrics_log.read_heldout_metrics(run)
    model = None
    if outcome.signal is None:
        model = run / MODEL_DIR
        bundle.save(model, session.model, session.tokenizer, build_provenance(session, heldout))
    return PretrainResult(
        run=run,
        model=model,
        settings=settings,
        outcome=outcome,
        heldout=heldout,
        start_heldout=metrics_log.read_heldout_metrics(run, step=0),
        curve=_draw_curve(run, settings, progress, is_finished=model is not None),
    )


def _train(session: Session, run: Path, progress: Progress, duration: Duration) -> TrainingOutcome:
    """Train or resume the run of ``session`` in the directory ``run``."""
    settings = session.settings
    log_grad_norms = settings.run.log_grad_norms
    options = LoopOptions(
        duration=duration,
        seed=settings.run.seed,
        max_grad_norm=settings.optim.max_grad_norm,
        lr_at_step=lambda step: (
            settings.optim.lr * compute_lr_factor(step, settings.schedule, duration)
        ),
        log_every=settings.run.log_every,
        eval_every=settings.run.eval_every,
        checkpoint_every=settings.checkpoint.steps,
        keep_checkpoints=settings.checkpoint.keep,
        has_asynchronous_checkpoints=settings.checkpoint.is_asynchronous(
            session.machine.device.type
        ),
        selection_metric="mlm_loss",
        measure_peak_macs_per_second=lambda: device.measure_peak_macs_per_second(session.machine),
        grad_norm_groups=build_grad_norm_groups(session.model) if log_grad_norms else {},
        use_tensorboard=settings.run.tensorboard,
        average_fraction=settings.optim.average_fraction,
        evaluates_start=settings.run.start_from is not None,
    )
    return loop.train(
        session.build_objective(duration),
        session.model,
        session.optimizer,
        session.machine,
        options,
        run,
        progress,
    )


def _draw_curve(
    run: Path, settings: PretrainSettings, progress: Progress, *, is_finished: bool
) -> Path | None:
    """Draw the loss curve of a run; return None without matplotlib.

    When the run is finished, log how to install matplotlib.
    """
    config = settings.model
    title = f"{run.name}: {count_noun(config.layers, 'layer')}, width {config.width}"
    try:
        return curve.draw(run, title, is_masked_lm=settings.data.objective == "masked")
    except MissingExtraError as error:
        if is_finished:
            progress.log(str(error))
        return None
