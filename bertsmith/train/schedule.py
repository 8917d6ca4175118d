"""How long a run is, which sequence length each step has, and the course of the learning rate.

It never knows of tensors or of data.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from bertsmith.errors import RunError
from bertsmith.settings import Settings


class ScheduleSettings(Settings):
    """The length of a run and its phases. At most one of steps, epochs and minutes is asked for.

    A run resolved from epochs or minutes carries its ``steps`` too, and those count.
    """

    steps: Annotated[int, Field(gt=0)] | None = None
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    #: Steps that a budget of minutes may not go below.
    least_steps: Annotated[int, Field(ge=1)] = 1
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

    def total(self) -> int:
        """Return the number of steps; RunError while it is not resolved."""
        if self.steps is None:
            raise RunError("the run has no number of steps yet")
        return self.steps


@dataclass(frozen=True)
class Phase:
    """Steps [first, last) at one sequence length."""

    first: int
    last: int
    length: int


def phases(settings: ScheduleSettings, length: int) -> list[Phase]:
    """Split a run by steps: ``length``, then the long length (appendix A.2: 90 % and 10 %)."""
    total = settings.total()
    if settings.long_length is None:
        return [Phase(0, total, length)]
    turn = total - round(total * settings.long_share)
    both = [Phase(0, turn, length), Phase(turn, total, settings.long_length)]
    return [phase for phase in both if phase.first < phase.last]


def epochs_in(steps: int, batch: int, examples: list[tuple[float, int]]) -> float:
    """Return how often ``steps`` walk the data; ``examples`` as for ``steps_for_epochs``."""
    return steps * sum(batch * share / count for share, count in examples)


def steps_for_epochs(epochs: float, batch: int, examples: list[tuple[float, int]]) -> int:
    """Return the steps that walk the data ``epochs`` times.

    ``examples``: for each phase its share of the steps and the examples of one of its epochs.
    """
    return max(1, math.ceil(epochs / epochs_in(1, batch, examples) - 1e-9))


def warmup(settings: ScheduleSettings) -> int:
    """Return the steps of warm-up: as set, but never more than a tenth of the run."""
    return min(settings.warmup_steps, settings.total() // 10)


def lr_factor(step: int, settings: ScheduleSettings) -> float:
    """Return the share of the peak learning rate in step ``step`` (from 0).

    Linear from 0 over the warm-up, then linear down to 0 at the end of the run. As in the
    original, decay is measured from step 0, so the line points at the peak of step 0.
    """
    rising = warmup(settings)
    if step < rising:
        return (step + 1) / rising
    return 1.0 - step / settings.total()
