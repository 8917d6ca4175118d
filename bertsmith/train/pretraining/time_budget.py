"""Time budgets of pre-training: estimates the time for everything except training steps."""

from dataclasses import replace
from time import perf_counter

from bertsmith.errors import MissingExtraError
from bertsmith.plurals import count_noun, format_minutes
from bertsmith.train.engine import curve
from bertsmith.train.engine.duration import EVALUATION_SHARE
from bertsmith.train.engine.optimizer import iter_moment_names
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.run_clock import RunClock
from bertsmith.train.engine.time_duration import TimeDuration
from bertsmith.train.pretraining import recipes, speed
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.session import Session

#: Estimated speed of writing the first checkpoint, in bytes per second.
_WRITE_SPEED = 1e8


def count_checkpoint_bytes(session: Session) -> int:
    """Return the size of a checkpoint in bytes.

    It has the weights, the moments of the optimizer and, if they are averaged, the averaged
    weights, all in float32.
    """
    has_average = session.settings.optim.average_fraction > 0
    return sum(
        4 * (1 + len(moments) + has_average) * parameter.numel()
        for parameter, moments in iter_moment_names(session.optimizer)
    )


def get_budget_seconds(settings: PretrainSettings) -> float | None:
    """Return the time budget in seconds; None if the run has a number of steps or epochs."""
    schedule = settings.schedule
    if schedule.steps or schedule.minutes is None:
        return None
    return schedule.minutes * 60


def build_time_duration(session: Session, clock: RunClock, cost: Cost | None) -> TimeDuration:
    """Return the duration of a run with a time budget.

    The measurements of the main process apply to all processes.

    Args:
        session: The run.
        clock: Measures the time used by the run.
        cost: Measured cost; None in a resumed run.
    """
    settings = session.settings
    processes = session.machine.processes
    seconds = get_budget_seconds(settings)
    assert seconds is not None
    if cost is None:
        # The checkpoint has the step time. Without a checkpoint, the first step is measured.
        step_seconds = 0.0
        evaluation_seconds, _ = speed.time_evaluation(session)
    else:
        step_seconds = cost.step_seconds
        evaluation_seconds = cost.estimate_evaluation_seconds(settings.run.max_eval_sequences)
    return TimeDuration(
        seconds,
        clock,
        step_seconds=step_seconds,
        evaluation_seconds=evaluation_seconds,
        checkpoint_seconds=count_checkpoint_bytes(session) / _WRITE_SPEED,
        curve_seconds=_time_curve() if processes.is_main else 0.0,
        min_steps=settings.schedule.min_steps,
        max_checkpoint_seconds=60 * settings.checkpoint.minutes,
        share_numbers=processes.broadcast_numbers if processes.world_size > 1 else None,
    )


def _time_curve() -> float:
    """Return the time for drawing a loss curve in seconds; 0 if matplotlib is not installed."""
    try:
        # The first call imports matplotlib, which is not measured.
        curve.render([], "")
        start_time = perf_counter()
        curve.render([], "")
    except MissingExtraError:
        return 0.0
    return perf_counter() - start_time


def describe_budget(
    settings: PretrainSettings, resolved: PretrainSettings, cost: Cost, seconds: float
) -> str:
    """Return a log message about the expected steps of a run, and about limited evaluations.

    Args:
        settings: Settings of the run.
        resolved: Settings with limited evaluations.
        cost: Measured cost.
        seconds: Time for steps and evaluations.
    """
    steps, num_evaluations = recipes.estimate_num_steps(resolved, cost, seconds)
    assert resolved.schedule.minutes is not None
    text = f"about {count_noun(steps, 'step')} in {format_minutes(resolved.schedule.minutes)}"
    num_sequences = min(resolved.run.max_eval_sequences, cost.num_eval_sequences)
    without_evaluations = replace(cost, evaluation_seconds=0.0)
    _, unlimited_evaluations = recipes.estimate_num_steps(settings, without_evaluations, seconds)
    if (num_evaluations, num_sequences) == (unlimited_evaluations, cost.num_eval_sequences):
        return text
    evaluations = count_noun(num_evaluations, "evaluation")
    sequences = count_noun(num_sequences, "sequence")
    return (
        f"{text}; evaluations are limited to {EVALUATION_SHARE:.0%} of the time: about "
        f"{evaluations} with {sequences} each"
    )
