"""Length of a run, and the learning rate schedule."""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bertsmith.compatibility import PRETRAINING_SCHEDULE_SETTINGS
from bertsmith.errors import RunError
from bertsmith.settings import SettingsTable
from bertsmith.train.engine.duration import Duration, StepDuration

#: The settings with the length of a run. The user sets at most one of them.
LENGTH_SETTINGS: Final = ("steps", "epochs", "minutes")


class ScheduleSettings(SettingsTable):
    """Duration and learning rate of a run.

    The user sets at most one of steps, epochs and minutes.
    A run converts epochs to ``steps``, which it stores. If ``steps`` is set, the other two have no
    effect. With minutes, the run has no fixed number of steps; a finished run stores the number of
    its steps.
    """

    table: ClassVar[str] = "schedule"

    #: Number of optimizer steps.
    steps: Annotated[int, Field(gt=0)] | None = None
    #: Passes over the training data; converted to steps.
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    #: Time budget of the run in wall-clock minutes, from the start of the command to its end.
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    #: Minimum number of steps of a run with a time budget or with epochs.
    min_steps: Annotated[int, Field(ge=1)] = 1
    #: Number of steps in which the learning rate rises from 0, at most a tenth of the run.
    warmup_steps: Annotated[int, Field(ge=0)] = 10_000
    #: Learning rate after the warm-up: `linear` falls to 0 at the end of the run, `trapezoidal`
    #: stays constant and falls to 0 over the last `decay_fraction` of the run.
    decay: Literal["linear", "trapezoidal"] = "linear"
    #: Fraction of the run in which the trapezoidal learning rate falls.
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2

    @model_validator(mode="before")
    @classmethod
    def _reject_pretraining_settings(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in sorted(PRETRAINING_SCHEDULE_SETTINGS & values.keys()):
                if key not in cls.model_fields:
                    raise ValueError(f"{key} has an effect only in pre-training; leave it out")
        return values

    @model_validator(mode="after")
    def _check_epochs_or_minutes(self) -> Self:
        if self.epochs is not None and self.minutes is not None:
            raise ValueError("epochs and minutes are mutually exclusive; set only one of them")
        return self

    def total_steps(self) -> int:
        """Return the number of steps.

        Raises:
            RunError: If ``steps`` is not set yet.
        """
        if self.steps is None:
            raise RunError("schedule.steps is not set: the number of steps is not resolved yet")
        return self.steps


def compute_lr_factor(
    step: int, settings: ScheduleSettings, duration: Duration | None = None
) -> float:
    """Return the learning rate of ``step`` (from 0) as a fraction of the peak.

    Linear warm-up from 0, then linear decay to 0 at the end of the run. As in the original code,
    the decay line starts at 1 in step 0, so the rate drops slightly at the end of the warm-up.

    The trapezoidal schedule is constant until the decay (Hu et al. 2024, arXiv:2404.06395; Hägele
    et al. 2024, arXiv:2405.18392).

    Args:
        step: Number of the step.
        settings: The schedule.
        duration: Length of the run; None: ``settings.steps``.
    """
    duration = duration or StepDuration(settings.total_steps())
    factor = duration.compute_warmup_factor(step, settings.warmup_steps)
    if factor is not None:
        return factor
    remaining_fraction = 1.0 - duration.compute_completed_fraction(step)
    if settings.decay == "trapezoidal":
        return min(1.0, remaining_fraction / settings.decay_fraction)
    return remaining_fraction
