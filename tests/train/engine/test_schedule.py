"""The schedule as a table: length, phases, warm-up and the course of the learning rate."""

from itertools import pairwise

import pytest

from bertsmith.errors import RunError, SettingsError
from bertsmith.train.engine.schedule import (
    Phase,
    ScheduleSettings,
    build_phases,
    count_epochs,
    lr_factor,
    num_warmup_steps,
    revise_schedule,
    steps_for_epochs,
)


@pytest.mark.parametrize(
    ("steps", "asked", "taken"),
    [
        (1_000_000, 10_000, 10_000),
        (100_001, 10_000, 10_000),
        (50_000, 10_000, 5_000),
        (1000, 10_000, 100),
        (999, 10_000, 99),
        (1000, 30, 30),
        (1000, 0, 0),
        (9, 10_000, 0),
        (1, 10_000, 0),
    ],
)
def test_warm_up_is_never_more_than_a_tenth(steps: int, asked: int, taken: int) -> None:
    """Warm-up takes the steps asked for, but never more than a tenth of the run."""
    settings = ScheduleSettings(steps=steps, warmup_steps=asked)
    assert num_warmup_steps(settings) == taken
    assert num_warmup_steps(settings) * 10 <= steps


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 0.1), (1, 0.2), (4, 0.5), (9, 1.0), (10, 0.9), (11, 0.89), (55, 0.45), (99, 0.01)],
)
def test_the_learning_rate_as_a_table(step: int, factor: float) -> None:
    """It rises in a line over the warm-up, and falls in a line that would meet 0 at the end."""
    settings = ScheduleSettings(steps=100, warmup_steps=10)
    assert lr_factor(step, settings) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 1000])
def test_every_step_learns_and_the_end_is_zero(steps: int) -> None:
    """No step of a run has a rate of 0 or above 1; the step after the last would have 0."""
    settings = ScheduleSettings(steps=steps)
    factors = [lr_factor(step, settings) for step in range(steps)]
    assert 0 < min(factors) <= max(factors) <= 1
    assert factors[-1] == pytest.approx(1 / steps)
    assert lr_factor(steps, settings) == 0


@pytest.mark.parametrize(
    ("steps", "share", "expected"),
    [
        (1000, 0.1, [Phase(0, 900, 128), Phase(900, 1000, 512)]),
        (15, 0.1, [Phase(0, 13, 128), Phase(13, 15, 512)]),
        (4, 0.1, [Phase(0, 4, 128)]),
        (1, 0.9, [Phase(0, 1, 512)]),
        (10, 0.0, [Phase(0, 10, 128)]),
    ],
)
def test_two_phases_split_the_steps(steps: int, share: float, expected: list[Phase]) -> None:
    """The last share of the steps has the long length; a phase of no step is left out."""
    settings = ScheduleSettings(steps=steps, long_length=512, long_share=share)
    assert build_phases(settings, 128) == expected


def test_one_phase_without_a_long_length() -> None:
    """Without a long length the share counts for nothing."""
    assert build_phases(ScheduleSettings(steps=7, long_share=0.5), 64) == [Phase(0, 7, 64)]


@pytest.mark.parametrize(
    ("epochs", "batch", "examples", "steps"),
    [
        (1.0, 10, [(1.0, 100)], 10),
        (1.0, 10, [(1.0, 101)], 11),
        (2.5, 10, [(1.0, 100)], 25),
        (0.001, 10, [(1.0, 100)], 1),
        # 0.9 n 10 / 100 + 0.1 n 10 / 50 = 0.11 n
        (1.1, 10, [(0.9, 100), (0.1, 50)], 10),
    ],
)
def test_epochs_become_steps(
    epochs: float, batch: int, examples: list[tuple[float, int]], steps: int
) -> None:
    """The steps are the fewest that walk the data so often, over both phases together."""
    assert steps_for_epochs(epochs, batch, examples) == steps
    assert count_epochs(steps, batch, examples) >= epochs
    assert count_epochs(steps - 1, batch, examples) < epochs


@pytest.mark.parametrize("name", ["steps", "epochs", "minutes"])
def test_no_run_of_nothing(name: str) -> None:
    """Zero and less are refused as a number of steps, of epochs and of minutes."""
    for value in (0, -1):
        with pytest.raises(SettingsError, match=f"{name}: Input should be greater than 0"):
            ScheduleSettings.parse({name: value}, "here")


def test_two_measures_are_refused() -> None:
    """Epochs and minutes together are a contradiction; unresolved steps are an error."""
    with pytest.raises(SettingsError, match="exclude each other"):
        ScheduleSettings.parse({"epochs": 1.0, "minutes": 1.0}, "here")
    with pytest.raises(RunError, match="no number of steps"):
        ScheduleSettings(epochs=1.0).total_steps()


@pytest.mark.parametrize("name", ["epochs", "minutes"])
def test_a_run_without_end_is_refused(name: str) -> None:
    """No end is no number of steps."""
    with pytest.raises(ValueError, match="finite number"):
        ScheduleSettings.model_validate({name: float("inf")})


@pytest.mark.parametrize(
    ("first", "new"),
    [(1, 20), (3, 60), (20, 200), (99, 300), (100, 150), (300, 500), (300, 5000), (990, 991),
     (20, 10_000)],
)  # fmt: skip
def test_a_new_plan_keeps_the_rate_continuous(first: int, new: int) -> None:
    """Up to the new plan nothing changes; from there the rate has no jump, and ends near 0."""
    before = ScheduleSettings(steps=1000, minutes=1.0)
    after = revise_schedule(before, first, new)
    assert after.total_steps() == new
    factors = [lr_factor(step, after) for step in range(new)]
    assert factors[:first] == [lr_factor(step, before) for step in range(first)]
    assert factors[first] == pytest.approx(lr_factor(first, before))
    # As steep as a warm-up over a tenth of the steps that remain, or as the end of a short run.
    steepest = 1 / max(1, (new - first) // 10) + 1e-9
    assert all(abs(one - two) <= steepest for one, two in pairwise(factors[first:]))
    assert lr_factor(new, after) == pytest.approx(0)
    assert all(0 < factor <= 1 for factor in factors)


def test_a_warm_up_goes_on_in_a_new_plan() -> None:
    """A run that is planned anew in its warm-up still comes near the peak."""
    settings = revise_schedule(ScheduleSettings(steps=1000, minutes=1.0), 20, 200)
    assert max(lr_factor(step, settings) for step in range(200)) > 0.8


@pytest.mark.parametrize(
    ("first", "new", "turn"),
    [(100, 500, 450), (100, 2000, 1800), (460, 500, 460), (950, 960, 900), (950, 1500, 900)],
)
def test_a_new_plan_changes_no_step_that_was_taken(first: int, new: int, turn: int) -> None:
    """Phases keep their share of the new run, but steps that were taken keep their length."""
    before = ScheduleSettings(steps=1000, minutes=1.0, long_length=512)
    after = revise_schedule(before, first, new)
    assert build_phases(after, 128) == [Phase(0, turn, 128), Phase(turn, new, 512)]
