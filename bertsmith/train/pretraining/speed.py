"""Measures how long the steps and evaluations of a pre-training run take on this machine.

Measured steps have a learning rate of 0, but change the state of the optimizer, which is reset with
the weights at the end.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from bertsmith.model.bert import count_parameters
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad, Machine
from bertsmith.runtime.process_group import SINGLE_PROCESS
from bertsmith.train.engine import probe, threads
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.step import take_step
from bertsmith.train.engine.threads import ThreadChoice
from bertsmith.train.pretraining.micro_batches import add_neighbor_bias
from bertsmith.train.pretraining.objective import PretrainingObjective
from bertsmith.train.pretraining.schedule import Phase
from bertsmith.train.pretraining.session import NOMINAL_STEPS, Session
from bertsmith.train.pretraining.training_batches import compute_masking_rate

#: Maximum number of held-out sequences for timing an evaluation.
_TIMED_SEQUENCES = 128
#: An evaluation of a few sequences is timed first. If one of _TIMED_SEQUENCES would exceed this
#: duration in seconds, it is skipped.
_FIRST_TIMED_SEQUENCES, _MAX_EVALUATION_SECONDS = 8, 4.0
#: One timing of a thread count ends after this many seconds or steps, whichever comes first.
THREAD_TIMING_SECONDS, _THREAD_TIMING_STEPS = 0.7, 8


def measure_cost(
    session: Session, seconds: float = probe.PROBE_SECONDS, *, should_reset: bool = True
) -> Cost:
    """Measure the cost of steps and of an evaluation, then reset weights and optimizer.

    With several processes, each of them must call this method at the same time. It measures its
    share of the steps, and the time of summing the gradients is added.

    Args:
        session: The run.
        seconds: Maximum duration of the steps of a phase.
        should_reset: Whether the model is trained afterwards. A reset of a base model takes
            seconds.
    """
    machine = session.machine
    processes = machine.processes
    sum_seconds = processes.time_gradient_sum(count_parameters(session.model), machine.device)
    step_seconds = mfu = tokens_per_step = 0.0
    is_noisy = is_extrapolated = False
    peak_macs_per_second = device.measure_peak_macs_per_second(machine)
    for phase in session.list_phases():
        objective = _build_phase_objective(session, phase)
        times, batches, is_partial = _measure_steps(session, objective, phase, seconds)
        is_extrapolated = is_extrapolated or is_partial
        # Not the median, because the run will also have occasional slow steps.
        mean_seconds = sum(times) / len(times) + sum_seconds
        fraction = (phase.end_step - phase.start_step) / NOMINAL_STEPS
        batch_share = session.compute_batch_share(phase)
        step_seconds += batch_share * mean_seconds
        macs = sum(map(objective.count_macs, batches))
        mfu += fraction * macs / len(batches) / mean_seconds / peak_macs_per_second
        num_tokens = sum(map(objective.count_tokens, batches)) / len(batches)
        tokens_per_step += batch_share * num_tokens * processes.world_size
        is_noisy = is_noisy or probe.is_noisy(times)
    evaluation_seconds, num_eval_sequences = time_evaluation(session)
    peak_memory_bytes = device.get_peak_memory_bytes(machine)
    if should_reset:
        session.reset()
    return Cost(
        step_seconds=step_seconds,
        evaluation_seconds=evaluation_seconds,
        peak_memory_bytes=peak_memory_bytes,
        peak_macs_per_second=peak_macs_per_second,
        mfu=mfu,
        tokens_per_step=tokens_per_step,
        num_eval_sequences=num_eval_sequences,
        is_noisy=is_noisy,
        is_extrapolated=is_extrapolated,
    )


def _build_phase_objective(
    session: Session,
    phase: Phase,
    *,
    masking_rate: float | None = None,
    micro_batch_tokens: int | None = None,
) -> PretrainingObjective:
    """Return the objective of a run that has only this phase and no bias of the attention.

    Args:
        session: The run.
        phase: The phase.
        masking_rate: Constant masking rate; None: the mean rate of the phase.
        micro_batch_tokens: Maximum tokens of a micro-batch; None: that of the settings.
    """
    settings = session.settings
    if masking_rate is None:
        masking_rate = sum(_list_extreme_masking_rates(session, phase)) / 2
    updates: dict[str, dict[str, Any]] = {
        "data": {
            "max_seqlen": phase.max_seqlen,
            "masking_rate": masking_rate,
            "final_masking_rate": None,
            "initial_batch_size": None,
        },
        "schedule": {
            "phase2_max_seqlen": None,
            "causal_fraction": float(phase.is_causal),
            "neighbor_bias_steps": 0,
        },
    }
    if micro_batch_tokens is not None:
        updates["run"] = {"micro_batch_tokens": micro_batch_tokens}
    sections = {
        name: getattr(settings, name).model_copy(update=update) for name, update in updates.items()
    }
    return session.build_objective(
        StepDuration(NOMINAL_STEPS), settings.model_copy(update=sections)
    )


def _list_extreme_masking_rates(session: Session, phase: Phase) -> list[float]:
    """Return the masking rates at the start and at the end of a phase."""
    return [
        compute_masking_rate(step / NOMINAL_STEPS, session.settings.data)
        for step in (phase.start_step, phase.end_step)
    ]


def _measure_steps(
    session: Session, objective: PretrainingObjective, phase: Phase, seconds: float
) -> tuple[list[float], list[list[Any]], bool]:
    """Measure steps, or a part of a step if it takes longer than ``seconds``.

    Returns:
        Duration of each measured step and its micro-batches in this process, and whether only a
        part of a step was measured.
    """
    session.model.train()
    if session.machine.device.type == "cpu":
        step_seconds, batch = _measure_slow_step(session, phase, seconds)
        if step_seconds is not None:
            return [step_seconds], [batch], True
    step_function = partial(_take_step, session, objective)
    batches = _iter_assigned_batches(session, objective)
    first_rate, last_rate = _list_extreme_masking_rates(session, phase)
    has_bias = session.settings.schedule.neighbor_bias_steps > 0 and phase.start_step == 0
    if session.has_static_shapes and has_bias:
        # Compiles the graph of the first steps, which would otherwise delay the schedule. It
        # depends on the number of predictions.
        first = _build_phase_objective(session, phase, masking_rate=first_rate)
        step_function(0, add_neighbor_bias(next(_iter_assigned_batches(session, first))))
    if first_rate != last_rate and not phase.is_causal:
        # The steps with the most predictions determine the peak memory.
        rate = max(first_rate, last_rate)
        largest = _build_phase_objective(session, phase, masking_rate=rate)
        step_function(0, next(_iter_assigned_batches(session, largest)))
    return (*probe.measure_steps(batches, step_function, seconds), False)


def _measure_slow_step(
    session: Session, phase: Phase, seconds: float
) -> tuple[float | None, list[Any]]:
    """Estimate the duration of a slow step, split into small micro-batches.

    Returns:
        The duration in seconds, None if a step takes at most ``seconds``; and its micro-batches
        in this process.
    """
    objective = _build_slow_step_objective(session, phase)
    batch = next(_iter_assigned_batches(session, objective))
    shortest = _build_phase_objective(session, phase, micro_batch_tokens=phase.max_seqlen)
    warmup_micro_batch = next(_iter_assigned_batches(session, shortest))[0]
    step_function = partial(_take_step, session, objective)
    return probe.measure_slow_step(warmup_micro_batch, batch, step_function, seconds), batch


def _iter_assigned_batches(
    session: Session, objective: PretrainingObjective
) -> Iterator[list[Any]]:
    """Yield the micro-batches of each step that this process computes."""
    for micro_batches in objective.iter_batches(0):
        indices = session.machine.processes.assign_indices(len(micro_batches))
        yield [micro_batches[index] for index in indices]


def _build_slow_step_objective(session: Session, phase: Phase) -> PretrainingObjective:
    """Return the objective with micro-batches so small that slow steps can be measured."""
    max_tokens = session.settings.run.micro_batch_tokens
    assert max_tokens is not None
    num_tokens = min(max_tokens, max(probe.SLOW_STEP_TOKENS, phase.max_seqlen))
    return _build_phase_objective(session, phase, micro_batch_tokens=num_tokens)


def choose_thread_count(
    session: Session,
    load: CpuLoad,
    seconds: float,
    max_seconds: float,
) -> ThreadChoice:
    """Time steps with all threads and with fewer, choose the best number and use it.

    The weights and the optimizer are reset at the end.

    Args:
        session: The run.
        load: CPU load of other processes.
        seconds: Maximum duration of one timing of a thread count.
        max_seconds: Maximum duration of all timings. Each thread count is timed at least once.
    """
    session.model.train()
    candidates = threads.list_candidate_thread_counts(torch.get_num_threads(), load)
    # The first step is the slowest; on a busy machine, few threads are the fastest.
    torch.set_num_threads(min(candidates))
    phase = session.list_phases()[0]
    slow_seconds, _ = _measure_slow_step(session, phase, max_seconds / 4)
    is_slow = slow_seconds is not None
    time_step = _build_step_timer(session, phase, seconds, is_slow=is_slow)
    choice = threads.choose_thread_count(time_step, candidates, max_seconds)
    torch.set_num_threads(choice.num_threads)
    session.reset()
    return choice


def _build_step_timer(
    session: Session, phase: Phase, seconds: float, *, is_slow: bool
) -> Callable[[int], float]:
    """Return a function that measures the seconds of a step with a given number of threads.

    Args:
        session: The run.
        phase: The phase of the step.
        seconds: Maximum duration of a timing.
        is_slow: Whether to measure one small micro-batch of a step that takes longer.
    """
    if is_slow:
        slow_objective = _build_slow_step_objective(session, phase)
        batch = next(slow_objective.iter_batches(0))

        def time_slow_step(num_threads: int) -> float:
            """Return the time of one micro-batch, times the number of micro-batches."""
            torch.set_num_threads(num_threads)
            start_time = time.perf_counter()
            _take_step(session, slow_objective, 0, batch[:1])
            return (time.perf_counter() - start_time) * len(batch)

        return time_slow_step
    objective = _build_phase_objective(session, phase)
    batches = list(islice(objective.iter_batches(0), _THREAD_TIMING_STEPS))

    def time_step(num_threads: int) -> float:
        """Return the mean time of a step in seconds, after one step that is not measured."""
        torch.set_num_threads(num_threads)
        _take_step(session, objective, 0, batches[0])
        start_time = time.perf_counter()
        for step, micro_batches in enumerate(batches):
            _take_step(session, objective, step, micro_batches)
            elapsed_seconds = time.perf_counter() - start_time
            if elapsed_seconds >= seconds:
                break
        return elapsed_seconds / (step + 1)

    return time_step


def time_evaluation(session: Session) -> tuple[float, int]:
    """Return the estimated seconds of an evaluation, and its number of held-out sequences."""
    evaluator = session.build_evaluator()
    num_sequences = evaluator.num_sequences
    session.model.eval()
    sequence_seconds = 0.0
    for max_timed in (_FIRST_TIMED_SEQUENCES, _TIMED_SEQUENCES):
        num_timed = min(num_sequences, max_timed)
        if sequence_seconds * num_timed > _MAX_EVALUATION_SECONDS:
            break
        start_time = time.perf_counter()
        evaluator.evaluate(session.model, _get_local_machine(session), num_timed)
        sequence_seconds = (time.perf_counter() - start_time) / num_timed
    world_size = session.machine.processes.world_size
    return sequence_seconds * num_sequences / world_size, num_sequences


def _take_step(
    session: Session, objective: PretrainingObjective, step: int, micro_batches: list[Any]
) -> None:
    """Take a step with a learning rate of 0 and wait for the device.

    The step has the given micro-batches, and is taken in this process only.
    """
    take_step(
        objective.compute_losses,
        micro_batches,
        session.model,
        session.optimizer,
        _get_local_machine(session),
        step=step,
        seed=session.settings.run.seed,
        lr=0.0,
        max_grad_norm=session.settings.optim.max_grad_norm,
    )
    device.synchronize(session.machine)


def _get_local_machine(session: Session) -> Machine:
    """Return the machine without the other processes."""
    return replace(session.machine, processes=SINGLE_PROCESS)
