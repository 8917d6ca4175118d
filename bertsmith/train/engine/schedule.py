"""Length of a run, sequence length of each step, and the learning rate schedule."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from bertsmith.errors import RunError
from bertsmith.settings import SettingsTable


class ScheduleSettings(SettingsTable):
    """Length and phases of a run. The user sets at most one of steps, epochs and minutes.

    A run converts epochs and minutes to ``steps``, which it stores. If ``steps`` is set, the other
    two have no effect.
    """

    table: ClassVar[str] = "schedule"

    #: Number of optimizer steps.
    steps: Annotated[int, Field(gt=0)] | None = None
    #: Passes over the training data; converted to steps.
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    #: Time budget; converted to steps by measuring the speed before the run.
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    #: Minimum number of steps of a run with a time budget.
    min_steps: Annotated[int, Field(ge=1)] = 1
    #: Step at which the number of steps was revised to meet the time budget; set by the run.
    replanned_at: Annotated[int, Field(ge=1)] | None = None
    #: Number of steps before the revision; set by the run.
    planned_steps: Annotated[int, Field(gt=0)] | None = None
    #: Number of steps in which the learning rate rises from 0, at most a tenth of the run.
    warmup_steps: Annotated[int, Field(ge=0)] = 10_000
    #: Maximum sequence length in a second phase of longer sequences; None: a single phase.
    phase2_max_seqlen: Annotated[int, Field(ge=8)] | None = None
    #: Fraction of the steps in the second phase.
    phase2_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1

    @model_validator(mode="after")
    def _check_single_length(self) -> Self:
        if self.epochs is not None and self.minutes is not None:
            raise ValueError("epochs and minutes exclude each other; set only one of them")
        return self

    def total_steps(self) -> int:
        """Return the number of steps.

        Raises:
            RunError: If ``steps`` is not set yet.
        """
        if self.steps is None:
            raise RunError("schedule.steps is not set: the number of steps is not resolved yet")
        return self.steps


@dataclass(frozen=True)
class Phase:
    """The steps [start_step, end_step), which have the same maximum sequence length."""

    start_step: int
    end_step: int
    max_seqlen: int


def build_phases(settings: ScheduleSettings, max_seqlen: int) -> list[Phase]:
    """Split a run into a phase with ``max_seqlen`` and one with the longer ``phase2_max_seqlen``.

    In the paper, the phases have 90 % and 10 % of the steps (appendix A.2).
    """
    total_steps = settings.total_steps()
    if settings.phase2_max_seqlen is None:
        return [Phase(0, total_steps, max_seqlen)]
    phase2_start = _compute_phase2_start(settings, total_steps)
    if settings.replanned_at is not None and settings.planned_steps is not None:
        # Completed steps keep their sequence length.
        old_phase2_start = _compute_phase2_start(settings, settings.planned_steps)
        if old_phase2_start <= settings.replanned_at:
            phase2_start = old_phase2_start
        else:
            phase2_start = max(settings.replanned_at, phase2_start)
    phases = [
        Phase(0, phase2_start, max_seqlen),
        Phase(phase2_start, total_steps, settings.phase2_max_seqlen),
    ]
    return [phase for phase in phases if phase.start_step < phase.end_step]


def _compute_phase2_start(settings: ScheduleSettings, total_steps: int) -> int:
    """Return the first step of the second phase in a run of ``total_steps``."""
    return total_steps - round(total_steps * settings.phase2_fraction)


def revise_schedule(settings: ScheduleSettings, step: int, steps: int) -> ScheduleSettings:
    """Return the settings with a new total number of steps.

    Args:
        settings: Current schedule.
        step: Number of completed steps.
        steps: New total number of steps.
    """
    return settings.model_copy(
        update={"steps": steps, "replanned_at": step, "planned_steps": settings.total_steps()}
    )


def count_epochs(steps: int, batch_size: int, phase_shares: list[tuple[float, int]]) -> float:
    """Return the number of epochs in ``steps``.

    Args:
        steps: Number of steps.
        batch_size: Examples per step.
        phase_shares: See ``convert_epochs_to_steps``.
    """
    epochs_per_step = sum(
        batch_size * fraction / num_examples for fraction, num_examples in phase_shares
    )
    return steps * epochs_per_step


def convert_epochs_to_steps(
    epochs: float, batch_size: int, phase_shares: list[tuple[float, int]]
) -> int:
    """Return the number of steps in ``epochs`` epochs, rounded up.

    Args:
        epochs: Passes over the training data.
        batch_size: Examples per step.
        phase_shares: For each phase, its fraction of the steps, and the number of examples in an
            epoch at its sequence length.
    """
    # The small constant keeps rounding errors from adding a step.
    return max(1, math.ceil(epochs / count_epochs(1, batch_size, phase_shares) - 1e-9))


def count_warmup_steps(settings: ScheduleSettings) -> int:
    """Return the number of warm-up steps of a run: ``warmup_steps``, but at most a tenth of it."""
    return _limit_warmup_steps(settings, settings.total_steps())


def _limit_warmup_steps(settings: ScheduleSettings, total_steps: int) -> int:
    """Return the number of warm-up steps in a run of ``total_steps``."""
    return min(settings.warmup_steps, total_steps // 10)


def compute_lr_factor(step: int, settings: ScheduleSettings) -> float:
    """Return the learning rate of ``step`` (from 0) as a fraction of the peak.

    Linear warm-up from 0, then linear decay to 0 at the end of the run. As in the original code,
    the decay line starts at 1 in step 0, so the rate drops slightly at the end of the warm-up.
    If the number of steps was revised during the run, the rate continues without a jump.
    """
    if settings.replanned_at is None or settings.planned_steps is None:
        return _compute_planned_lr_factor(
            step, settings.total_steps(), count_warmup_steps(settings)
        )
    if step < settings.replanned_at:
        warmup_steps = _limit_warmup_steps(settings, settings.planned_steps)
        return _compute_planned_lr_factor(step, settings.planned_steps, warmup_steps)
    return _compute_revised_lr_factor(step, settings.replanned_at, settings.planned_steps, settings)


def _compute_planned_lr_factor(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate factor of a step if the number of steps is not revised."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 1.0 - step / total_steps


def _compute_revised_lr_factor(
    step: int, revision_step: int, planned_steps: int, settings: ScheduleSettings
) -> float:
    """Return the learning rate factor of a step after the number of steps was revised.

    If the revision interrupts the warm-up, the warm-up continues for at most a tenth of the
    remaining steps, until the factor reaches the decay line of the new length. If the warm-up was
    complete or the factor is already above that line, the factor decays linearly to 0.
    """
    total_steps = settings.total_steps()
    old_warmup_steps = _limit_warmup_steps(settings, planned_steps)
    start = _compute_planned_lr_factor(revision_step, planned_steps, old_warmup_steps)
    warmup_steps = min(settings.warmup_steps, (total_steps - revision_step) // 10)
    peak = 1.0 - (revision_step + warmup_steps) / total_steps
    if revision_step >= old_warmup_steps or start >= peak or warmup_steps == 0:
        return start * (total_steps - step) / (total_steps - revision_step)
    if step < revision_step + warmup_steps:
        return start + (peak - start) * (step - revision_step) / warmup_steps
    return 1.0 - step / total_steps
