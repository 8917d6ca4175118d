"""How long a run is, which sequence length each step has, and the course of the learning rate.

It never knows of tensors or of data.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from bertsmith.errors import RunError
from bertsmith.settings import SettingsTable


class ScheduleSettings(SettingsTable):
    """The length of a run and its phases. At most one of steps, epochs and minutes is asked for.

    A run resolved from epochs or minutes carries its ``steps`` too, and those count.
    """

    table: ClassVar[str] = "schedule"

    steps: Annotated[int, Field(gt=0)] | None = None
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    #: Steps that a budget of minutes may not go below.
    min_steps: Annotated[int, Field(ge=1)] = 1
    #: A run that was planned anew to meet its minutes: after which step, and how many steps it had.
    replanned_at: Annotated[int, Field(ge=1)] | None = None
    planned_steps: Annotated[int, Field(gt=0)] | None = None
    #: Steps over which the learning rate rises from 0, but never more than a tenth of the run.
    warmup_steps: Annotated[int, Field(ge=0)] = 10_000
    #: The length of the last phase, and its share of the steps; None: one length throughout.
    long_length: Annotated[int, Field(ge=8)] | None = None
    long_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.epochs is not None and self.minutes is not None:
            raise ValueError("epochs and minutes exclude each other")
        return self

    def total_steps(self) -> int:
        """Return the number of steps; RunError while it is not resolved."""
        if self.steps is None:
            raise RunError("the run has no number of steps yet")
        return self.steps


@dataclass(frozen=True)
class Phase:
    """Steps [first, last) at one sequence length."""

    start_step: int
    end_step: int
    length: int


def build_phases(settings: ScheduleSettings, length: int) -> list[Phase]:
    """Split a run by steps: ``length``, then the long length (appendix A.2: 90 % and 10 %)."""
    total = settings.total_steps()
    if settings.long_length is None:
        return [Phase(0, total, length)]
    turn = _turn(settings, total)
    if settings.replanned_at is not None and settings.planned_steps is not None:
        # Steps that were taken keep their length.
        before = _turn(settings, settings.planned_steps)
        turn = before if before <= settings.replanned_at else max(settings.replanned_at, turn)
    both = [Phase(0, turn, length), Phase(turn, total, settings.long_length)]
    return [phase for phase in both if phase.start_step < phase.end_step]


def _turn(settings: ScheduleSettings, total: int) -> int:
    return total - round(total * settings.long_share)


def revise_schedule(settings: ScheduleSettings, step: int, steps: int) -> ScheduleSettings:
    """Return the schedule of a run that has ``steps`` steps from now on, after step ``step``."""
    return settings.model_copy(
        update={"steps": steps, "replanned_at": step, "planned_steps": settings.total_steps()}
    )


def count_epochs(steps: int, batch: int, examples: list[tuple[float, int]]) -> float:
    """Return how often ``steps`` walk the data; ``examples`` as for ``steps_for_epochs``."""
    return steps * sum(batch * share / count for share, count in examples)


def steps_for_epochs(epochs: float, batch: int, examples: list[tuple[float, int]]) -> int:
    """Return the steps that walk the data ``epochs`` times.

    ``examples``: for each phase its share of the steps and the examples of one of its epochs.
    """
    return max(1, math.ceil(epochs / count_epochs(1, batch, examples) - 1e-9))


def num_warmup_steps(settings: ScheduleSettings) -> int:
    """Return the steps of warm-up: as set, but never more than a tenth of the run."""
    return _warmup(settings, settings.total_steps())


def _warmup(settings: ScheduleSettings, steps: int) -> int:
    return min(settings.warmup_steps, steps // 10)


def lr_factor(step: int, settings: ScheduleSettings) -> float:
    """Return the share of the peak learning rate in step ``step`` (from 0).

    Linear from 0 over the warm-up, then linear down to 0 at the end of the run. As in the
    original, decay is measured from step 0, so the line points at the peak of step 0.
    A run that was planned anew goes on from the rate that it had.
    """
    if settings.replanned_at is None or settings.planned_steps is None:
        return _factor(step, settings.total_steps(), num_warmup_steps(settings))
    if step < settings.replanned_at:
        return _factor(step, settings.planned_steps, _warmup(settings, settings.planned_steps))
    return _replanned_factor(step, settings.replanned_at, settings.planned_steps, settings)


def _factor(step: int, steps: int, rising: int) -> float:
    return (step + 1) / rising if step < rising else 1.0 - step / steps


def _replanned_factor(step: int, first: int, planned: int, settings: ScheduleSettings) -> float:
    """Return the factor of a step from ``first`` on, the first one of the new plan.

    A warm-up that is not over goes on, over a tenth of what remains, up to the line of a run of
    the new length; a rate that is falling, or above that line, falls linearly to 0.
    """
    steps, before = settings.total_steps(), _warmup(settings, planned)
    start = _factor(first, planned, before)
    rising = min(settings.warmup_steps, (steps - first) // 10)
    peak = 1.0 - (first + rising) / steps
    if first >= before or start >= peak or rising == 0:
        return start * (steps - step) / (steps - first)
    if step < first + rising:
        return start + (peak - start) * (step - first) / rising
    return 1.0 - step / steps
