"""Time budgets of pre-training: measures what happens after the last step of a run."""

from time import perf_counter

from bertsmith.errors import MissingExtraError
from bertsmith.model.bert import count_parameters
from bertsmith.plurals import count_noun
from bertsmith.train.engine import curve
from bertsmith.train.engine.duration import EVALUATION_SHARE, TimeDuration
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.run_clock import RunClock
from bertsmith.train.pretraining import recipes
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.session import Session

#: Size of a checkpoint in bytes per parameter: the weights and Adam's two moments in fp32.
_CHECKPOINT_BYTES = 12
#: Estimated speed of writing the first checkpoint, in bytes per second.
_WRITE_SPEED = 1e8
#: Initial estimate of the step time of a resumed run, until its first checkpoint is read.
_UNKNOWN_STEP_SECONDS = 1.0


def get_budget_seconds(settings: PretrainSettings) -> float | None:
    """Return the time budget in seconds, or None if the run has a length in steps or epochs."""
    timing = settings.schedule
    return None if timing.steps or timing.minutes is None else timing.minutes * 60


def build_time_duration(session: Session, clock: RunClock, cost: Cost | None) -> TimeDuration:
    """Return the duration of a run with a time budget.

    Args:
        session: The run.
        clock: Measures the time used by the run.
        cost: Measured cost; None in a resumed run.
    """
    settings = session.settings
    seconds = get_budget_seconds(settings)
    assert seconds is not None
    if cost is None:
        step_seconds, (evaluation_seconds, _) = _UNKNOWN_STEP_SECONDS, session.time_evaluation()
    else:
        step_seconds = cost.step_seconds
        evaluation_seconds = cost.estimate_evaluation_seconds(settings.run.max_eval_sequences)
    return TimeDuration(
        seconds,
        clock,
        step_seconds=step_seconds,
        evaluation_seconds=evaluation_seconds,
        checkpoint_seconds=_CHECKPOINT_BYTES * count_parameters(session.model) / _WRITE_SPEED,
        curve_seconds=_time_curve(),
        min_steps=settings.schedule.min_steps,
    )


def _time_curve() -> float:
    """Return the seconds of drawing a loss curve after matplotlib has been imported."""
    try:
        curve.render([], "")
        start_time = perf_counter()
        curve.render([], "")
    except MissingExtraError:
        return 0.0
    return perf_counter() - start_time


def describe_budget(
    settings: PretrainSettings, resolved: PretrainSettings, cost: Cost, seconds: float
) -> str:
    """Return a log message about the expected length of a run, and about limited evaluations.

    Args:
        settings: Settings of the run.
        resolved: Settings with limited evaluations.
        cost: Measured cost.
        seconds: Time for steps and evaluations.
    """
    steps, num_evaluations = recipes.estimate_length(resolved, cost, seconds)
    text = f"about {count_noun(steps, 'step')} in {resolved.schedule.minutes:g} minutes"
    num_sequences = min(resolved.run.max_eval_sequences, cost.num_eval_sequences)
    default_evaluations = recipes.estimate_length(settings, cost.without_evaluations(), seconds)[1]
    if (num_evaluations, num_sequences) == (default_evaluations, cost.num_eval_sequences):
        return text
    return (
        f"{text}; evaluations are limited to {EVALUATION_SHARE:.0%} of the time: about "
        f"{num_evaluations} of {count_noun(num_sequences, 'sequence')}"
    )
