"""Pre-training from a store to a model directory, in one process.

It never knows of the command line; what it has to say goes to a ``Progress``.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bertsmith import bundle
from bertsmith.data.store import SPLITS, Store, format_unknown_shares
from bertsmith.errors import MissingExtraError, StoreError
from bertsmith.files import write_atomic
from bertsmith.model.bert import count_parameters
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad
from bertsmith.train.engine import checkpoint, curve, loop, metrics_log, probe, schedule
from bertsmith.train.engine.budget import RevisedSchedule, TimeBudget
from bertsmith.train.engine.loop import LoopOptions, Outcome
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.run_directory import (
    SETTINGS_FILE,
    check_run_directory,
    load_run_settings,
    lock_run,
)
from bertsmith.train.engine.threads import is_machine_busy, restore_num_threads
from bertsmith.train.pretraining import recipes
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import Overrides, resolve_run_settings
from bertsmith.train.pretraining.session import (
    ROUND_SECONDS,
    Session,
    build_checkpoint_provenance,
    build_grad_norm_groups,
    build_provenance,
    describe_session,
)

MODEL_DIR = "model"


@dataclass(frozen=True)
class PretrainResult:
    """What became of a run. ``heldout`` holds the last held-out figures of the journal.

    is_masked_lm: whether the model learnt to fill in masks, not to tell the next word.
    """

    run: Path
    model: Path | None
    outcome: Outcome
    steps: int
    heldout: dict[str, float]
    curve: Path | None
    is_masked_lm: bool


def pretrain(
    data: Path | str,
    out: Path | str,
    *,
    size: str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    progress: Progress | None = None,
    **wishes: Any,
) -> PretrainResult:
    """Pre-train a BERT on the store ``data`` and write the run, with its model, to ``out``.

    Called again with the same arguments it goes on where the last call stopped. Further
    keywords are those of ``Overrides``. At most one of steps, epochs and minutes is given; none
    means the paper's million steps with recipe "paper", and one epoch with "fast".
    Raises BertsmithError.
    """
    run, progress = Path(out), progress or NullProgress()
    began = perf_counter()
    check_run_directory(run)
    store = Store.open(data)
    wished = _wished(store, Path(data), size, steps, epochs, minutes, wishes)
    run.mkdir(parents=True, exist_ok=True)
    with lock_run(run), restore_num_threads(wished.run.threads):
        stored = load_run_settings(run, wished)
        if stored is None:
            # A resumed run trusts the ids, so that a restart does not read all of a large store.
            store.verify(progress)
            wished = with_thread_count(wished, store, progress)
        session = Session(stored or wished, store)
        progress.log(f"{run}: {describe_session(session)}")
        for note in session.notes:
            progress.log(note)
        _report_unknown(session, progress)
        if stored is None:
            session.require_heldout()
            session.settings = resolve_on_machine(session, progress, began)
            write_atomic(run / SETTINGS_FILE, session.settings.to_toml())
        result = _run(session, run, progress, began)
        if result.model is not None and not wished.checkpoint.keep_optimizer:
            checkpoint.remove_optimizer_state(run, progress)
        return result


def _report_unknown(session: Session, progress: Progress) -> None:
    """Note the share of [UNK] in both splits; StoreError where there is nothing else to learn."""
    store = session.store
    counts = {name: store.token_counts(name, session.tokenizer.unk_id) for name in SPLITS}
    for name, split in counts.items():
        if split.num_tokens and split.num_unknown == split.num_tokens:
            raise StoreError(
                f"{store.path}: all {split.num_tokens:,} tokens of the split {name!r} are [UNK]; "
                "learn a vocabulary from this text (bertsmith vocab) and prepare it again"
            )
    for line in format_unknown_shares(dict(counts)):
        progress.log(line)


def write_initial_model(data: Path | str, out: Path | str, **wishes: Any) -> None:
    """Write the model that ``pretrain`` has before its first step, to the directory ``out``.

    ``wishes`` are those of ``Overrides``. Raises BertsmithError.
    """
    store = Store.open(data)
    settings = _wished(store, Path(data), None, 1, None, None, wishes)
    session = Session(settings, store)
    facts = build_checkpoint_provenance(settings, 0)
    bundle.save(Path(out), session.model.cpu(), session.tokenizer, facts)


def estimate_run(
    data: Path | str,
    *,
    size: str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    **wishes: Any,
) -> dict[str, Any]:
    """Return what the same call of ``pretrain`` would do, from a short probe; write nothing."""
    store = Store.open(data)
    store.verify()
    wished = _wished(store, Path(data), size, steps, epochs, minutes, wishes)
    budget = _budget(wished)
    with restore_num_threads(wished.run.threads):
        session = Session(with_thread_count(wished, store, NullProgress()), store)
        cost = session.measure_cost(_probe_seconds(budget))
        machine = device.describe_machine(session.machine)
    resolved = resolve_length(session, cost, budget)
    total, every = resolved.schedule.total_steps(), resolved.run.eval_every
    assert every is not None
    tokens = total * cost.tokens_per_step
    return {
        "machine": machine,
        "parameters": count_parameters(session.model),
        "steps": total,
        "batch": wished.data.batch,
        "tokens": round(tokens),
        "epochs": schedule.count_epochs(total, wished.data.batch, session.phase_epochs()),
        "minutes": cost.estimate_seconds(total, every, resolved.run.eval_sequences) / 60,
        "evaluations": math.ceil(total / every),
        "eval_sequences": min(resolved.run.eval_sequences, cost.eval_sequences),
        "tokens_per_second": round(cost.tokens_per_step / cost.step_seconds),
        "memory_bytes": cost.peak_memory_bytes,
        "mfu": cost.mfu,
        "ceiling_flops": 2 * cost.peak_macs,
    }


def _wished(
    store: Store,
    data: Path,
    size: str | None,
    steps: int | None,
    epochs: float | None,
    minutes: float | None,
    wishes: dict[str, Any],
) -> PretrainSettings:
    wished = Overrides(data=data, size=size, cuda=torch.cuda.is_available(), **wishes)
    return resolve_run_settings(
        wished, store, {"steps": steps, "epochs": epochs, "minutes": minutes}
    )


def with_thread_count(
    settings: PretrainSettings, store: Store, progress: Progress
) -> PretrainSettings:
    """Return the settings with a number of threads, if nobody set one and the machine is busy.

    Threads that wait for each other at every product are slowed down by all that any of them
    shares its core with.
    """
    run = settings.run
    if run.threads is not None or torch.get_num_threads() == 1 or not device.is_cpu(run.device):
        return settings
    load = device.measure_load()
    if not is_machine_busy(load):
        return settings
    # Steps are timed as they are computed without torch.compile, which is for a number of threads.
    eager = settings.model_copy(update={"run": run.model_copy(update={"compile": False})})
    choice = Session(eager, store).choose_thread_count(load, *_round_seconds(settings))
    progress.log(choice.describe())
    return _set_threads(settings, choice.num_threads)


def _round_seconds(settings: PretrainSettings) -> list[float]:
    budget = _budget(settings)
    return [] if budget is None else [min(ROUND_SECONDS, probe.MAX_BUDGET_SHARE * budget / 10)]


def _set_threads(settings: PretrainSettings, threads: int) -> PretrainSettings:
    run = settings.run.model_copy(update={"threads": threads})
    return settings.model_copy(update={"run": run})


def resolve_on_machine(session: Session, progress: Progress, began: float) -> PretrainSettings:
    """Resolve what only this machine and this data tell: device, precision, steps, intervals."""
    machine, budget, cost = session.machine, _budget(session.settings), None
    if budget is not None:
        progress.log("probing the speed of this machine …")
        cost = session.measure_cost(_probe_seconds(budget))
        if cost.is_noisy:
            cost = _steadier(session, cost, progress)
        # However long the start-up took, half of the time is for training.
        budget = max(budget - (perf_counter() - began), budget / 2)
    settings = session.settings
    run = settings.run.model_copy(
        update={
            "device": str(machine.device),
            "precision": machine.precision,
            "kernel": machine.kernel,
            "threads": torch.get_num_threads(),
        }
    )
    session.settings = settings.model_copy(update={"run": run})
    resolved = resolve_length(session, cost, budget)
    if cost is not None:
        progress.log(_describe_fit(settings, resolved, cost))
    return resolved


def _steadier(session: Session, cost: Cost, progress: Progress) -> Cost:
    """Return the cost with fewer threads, if steps took unlike times and these are faster.

    A load that does not show in the machine's figures, such as a container's share, does here.
    """
    settings = session.settings
    run = settings.run
    if run.threads is not None or run.compile or torch.get_num_threads() == 1:
        return cost
    if session.machine.device.type != "cpu":
        return cost
    before = torch.get_num_threads()
    choice = session.choose_thread_count(CpuLoad(0.0, 0.0), *_round_seconds(settings))
    if choice.num_threads == before:
        return cost
    progress.log(choice.describe())
    session.settings = _set_threads(settings, choice.num_threads)
    return session.measure_cost(_probe_seconds(_budget(settings)))


def _describe_fit(before: PretrainSettings, settings: PretrainSettings, cost: Cost) -> str:
    total, every = settings.schedule.total_steps(), settings.run.eval_every
    assert every is not None
    text = f"{total:,} steps fit into {settings.schedule.minutes:g} minutes"
    sequences = min(settings.run.eval_sequences, cost.eval_sequences)
    usual = (before.run.eval_every or recipes.default_interval(total), cost.eval_sequences)
    if (every, sequences) == usual:
        return text
    return (
        f"{text}; evaluations are limited to {recipes.EVALUATION_SHARE:.0%} of the time: "
        f"{math.ceil(total / every)} of {sequences:,} sequences"
    )


def _budget(settings: PretrainSettings) -> float | None:
    """Return the seconds that a run may take; None if its length is given otherwise."""
    timing = settings.schedule
    return None if timing.steps or timing.minutes is None else timing.minutes * 60


def _probe_seconds(budget: float | None) -> float:
    return (
        probe.PROBE_SECONDS
        if budget is None
        else min(probe.PROBE_SECONDS, probe.MAX_BUDGET_SHARE * budget)
    )


def resolve_length(session: Session, cost: Cost | None, budget: float | None) -> PretrainSettings:
    """Return the settings with the number of steps and the intervals that follow from it.

    budget: the seconds that are left for a run of so many minutes; it needs ``cost``.
    """
    settings = session.settings
    timing = settings.schedule
    if budget is not None:
        assert cost is not None
        return recipes.with_budget(settings, cost, budget)
    steps = timing.steps
    if steps is None:
        assert timing.epochs is not None
        shares = session.phase_epochs()
        steps = schedule.steps_for_epochs(timing.epochs, settings.data.batch, shares)
        steps = max(timing.min_steps, steps)
    return recipes.with_steps(settings, steps)


def _run(session: Session, run: Path, progress: Progress, began: float) -> PretrainResult:
    outcome = _train(session, run, progress, began)
    if outcome.revised_schedule is not None:
        _replan(session, run, progress, outcome.revised_schedule)
        outcome = _train(session, run, progress, began)
    settings = session.settings
    figures = [line for line in metrics_log.read_metrics(run) if line["kind"] == "heldout"]
    heldout = {k: v for k, v in figures[-1].items() if k not in ("step", "kind")} if figures else {}
    model = None
    if outcome.signal is None:
        model = run / MODEL_DIR
        bundle.save(model, session.model, session.tokenizer, build_provenance(session, heldout))
    picture = _picture(run, settings, progress)
    masks = settings.data.objective != "left-to-right"
    return PretrainResult(
        run, model, outcome, settings.schedule.total_steps(), heldout, picture, masks
    )


def _replan(session: Session, run: Path, progress: Progress, replan: RevisedSchedule) -> None:
    """Record a new plan in the run's settings, where a resumed run finds it."""
    settings = session.settings
    timing = settings.schedule
    progress.log(
        f"step {replan.step:,}: at {replan.step_seconds:.3g} s per step, {timing.total_steps():,} steps "
        f"would take {replan.expected_seconds / 60:.1f} minutes instead of {timing.minutes:g}; continuing "
        f"with {replan.steps:,} steps"
    )
    timing = schedule.revise_schedule(timing, replan.step, replan.steps)
    session.settings = settings.model_copy(update={"schedule": timing})
    write_atomic(run / SETTINGS_FILE, session.settings.to_toml())


def _train(session: Session, run: Path, progress: Progress, began: float) -> Outcome:
    settings = session.settings
    timing = settings.schedule
    phases = schedule.build_phases(timing, settings.data.length)
    assert settings.run.eval_every is not None
    assert settings.checkpoint.every is not None
    order = LoopOptions(
        steps=timing.total_steps(),
        seed=settings.run.seed,
        max_grad_norm=settings.optim.max_grad_norm,
        lr_at_step=lambda step: settings.optim.lr * schedule.lr_factor(step, timing),
        log_every=settings.run.log_every,
        eval_every=settings.run.eval_every,
        checkpoint_every=settings.checkpoint.every,
        keep_checkpoints=settings.checkpoint.keep,
        selection_metric="masked_lm",
        measure_peak_macs=lambda: device.measure_peak_macs(session.machine),
        grad_norm_groups=build_grad_norm_groups(session.model)
        if settings.run.log_gradients
        else {},
    )
    budget = None
    if timing.minutes is not None and timing.replanned_at is None:
        budget = TimeBudget(timing.minutes * 60, began, timing.min_steps)
    return loop.train(
        session.build_objective(phases), session.model, session.optimizer, session.machine,
        order, run, progress, budget,
    )  # fmt: skip


def _picture(run: Path, settings: PretrainSettings, progress: Progress) -> Path | None:
    config = settings.model
    try:
        return curve.draw(run, f"{run.name}: {config.layers} layers, width {config.width}")
    except MissingExtraError as error:
        progress.log(str(error))
        return None
