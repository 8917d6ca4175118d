"""Estimates the steps, time and memory of a pre-training run (``bertsmith pretrain --plan``)."""

import math
from pathlib import Path
from typing import Any

from bertsmith.data.store import Store
from bertsmith.model.bert import count_parameters
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime import device
from bertsmith.runtime.process_group import join_process_group
from bertsmith.train.engine.threads import restore_torch_settings
from bertsmith.train.pretraining import recipes, speed
from bertsmith.train.pretraining.pretrain import (
    resolve_arguments,
    resolve_num_steps,
    resolve_thread_count,
)
from bertsmith.train.pretraining.schedule import count_epochs
from bertsmith.train.pretraining.session import Session
from bertsmith.train.pretraining.time_budget import count_checkpoint_bytes, get_budget_seconds


def estimate_run(
    data: Path | str,
    *,
    size: str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Estimate the steps, time and memory of a run with a short probe, without writing anything.

    The arguments are those of ``pretrain``. ``bertsmith pretrain --plan`` prints the result. In
    processes started by torchrun, the estimate is that of a run with all of them.
    """
    store = Store.open(data)
    budget = {"steps": steps, "epochs": epochs, "minutes": minutes}
    with join_process_group() as processes:
        if progress is None or not processes.is_main:
            progress = NullProgress()
        settings = resolve_arguments(
            store, Path(data), budget, {"size": size, **overrides}, processes
        )
        if processes.is_main:
            store.verify(progress)
        with restore_torch_settings(settings.run.threads):
            settings = resolve_thread_count(settings, store, progress)
            session = Session(settings, store, processes)
            return processes.broadcast(_estimate(session))


def _estimate(session: Session) -> dict[str, Any]:
    """Measure the cost of a run, and return the fields of ``estimate_run``."""
    settings = session.settings
    budget_seconds = get_budget_seconds(settings)
    cost = speed.measure_cost(session, should_reset=False)
    if budget_seconds is None:
        resolved = resolve_num_steps(session)
        total_steps = resolved.schedule.total_steps()
        eval_every = resolved.run.eval_every
        assert eval_every is not None
        num_evaluations = math.ceil(total_steps / eval_every)
        seconds = cost.estimate_seconds(total_steps, eval_every, resolved.run.max_eval_sequences)
        if settings.run.start_from is not None:
            # The start model is evaluated, too.
            num_evaluations += 1
            seconds += cost.estimate_evaluation_seconds(resolved.run.max_eval_sequences)
    else:
        resolved = recipes.limit_evaluation(settings, cost, budget_seconds)
        seconds = budget_seconds
        total_steps, num_evaluations = recipes.estimate_num_steps(resolved, cost, seconds)
    return {
        "machine": device.describe_machine(session.machine),
        "parameters": count_parameters(session.model),
        "steps": total_steps,
        "batch_size": settings.data.batch_size,
        "tokens": round(total_steps * cost.tokens_per_step),
        "epochs": count_epochs(total_steps, settings.data.batch_size, session.list_phase_shares()),
        "minutes": seconds / 60,
        "evaluations": num_evaluations,
        "num_eval_sequences": min(resolved.run.max_eval_sequences, cost.num_eval_sequences),
        "tokens_per_second": round(cost.tokens_per_step / cost.step_seconds),
        "memory_bytes": cost.peak_memory_bytes + _count_copied_weight_bytes(session),
        "mfu": cost.mfu,
        "peak_flops": 2 * cost.peak_macs_per_second * session.machine.processes.world_size,
        "is_extrapolated": cost.is_extrapolated,
    }


def _count_copied_weight_bytes(session: Session) -> int:
    """Return the bytes of copies of weights that the measured steps do not have.

    These are the copy for asynchronous checkpoints on the CPU, the averaged weights, and the copy
    of the other weights while the averages are evaluated.
    """
    num_bytes = 0
    device_type = session.machine.device.type
    if device_type == "cpu" and session.settings.checkpoint.is_asynchronous(device_type):
        num_bytes += count_checkpoint_bytes(session)
    if session.settings.optim.average_fraction:
        num_bytes += 2 * sum(p.nbytes for p in session.model.parameters() if p.requires_grad)
    return num_bytes
