"""The schedule of any run: its length, warm-up and learning rate."""

import pytest

from bertsmith.errors import RunError, SettingsError
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.schedule import ScheduleSettings, compute_lr_factor


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "expected"),
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
def test_warmup_is_at_most_a_tenth_of_the_run(steps: int, warmup_steps: int, expected: int) -> None:
    """The warm-up has ``warmup_steps`` steps, but at most a tenth of the run."""
    duration = StepDuration(steps)
    if expected:
        assert duration.compute_warmup_factor(0, warmup_steps) == 1 / expected
        assert duration.compute_warmup_factor(expected - 1, warmup_steps) == 1.0
    assert duration.compute_warmup_factor(expected, warmup_steps) is None
    assert expected * 10 <= steps


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 0.1), (1, 0.2), (4, 0.5), (9, 1.0), (10, 0.9), (11, 0.89), (55, 0.45), (99, 0.01)],
)
def test_learning_rate_rises_and_decays_linearly(step: int, factor: float) -> None:
    """After a linear warm-up, the factor follows the line from 1 in step 0 to 0 at the end."""
    settings = ScheduleSettings(steps=100, warmup_steps=10)
    assert compute_lr_factor(step, settings) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "factor"), [(0, 0.1), (9, 1.0), (10, 1.0), (75, 1.0), (76, 0.96), (99, 0.04)]
)
def test_trapezoidal_learning_rate_is_constant_before_its_decay(step: int, factor: float) -> None:
    """The factor is 1 between the warm-up and the last quarter, and then falls to 0."""
    settings = ScheduleSettings(
        steps=100, warmup_steps=10, decay="trapezoidal", decay_fraction=0.25
    )
    assert compute_lr_factor(step, settings) == pytest.approx(factor, abs=1e-12)
    assert compute_lr_factor(100, settings) == 0


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 1000])
def test_learning_rate_is_positive_in_every_step(steps: int) -> None:
    """The factor is above 0 and at most 1 in every step, and 0 after the last one."""
    settings = ScheduleSettings(steps=steps)
    factors = [compute_lr_factor(step, settings) for step in range(steps)]
    assert 0 < min(factors) <= max(factors) <= 1
    assert factors[-1] == pytest.approx(1 / steps)
    assert compute_lr_factor(steps, settings) == 0


@pytest.mark.parametrize("name", ["steps", "epochs", "minutes"])
def test_steps_epochs_and_minutes_must_be_positive(name: str) -> None:
    """Steps, epochs and minutes must be above 0."""
    for value in (0, -1):
        with pytest.raises(SettingsError, match=f"{name}: Input should be greater than 0"):
            ScheduleSettings.parse({name: value}, "here")


def test_epochs_and_minutes_are_mutually_exclusive() -> None:
    """Setting both epochs and minutes is an error, as is ``total_steps()`` before steps is set."""
    with pytest.raises(SettingsError, match="are mutually exclusive"):
        ScheduleSettings.parse({"epochs": 1.0, "minutes": 1.0}, "here")
    with pytest.raises(RunError, match="not resolved yet"):
        ScheduleSettings(epochs=1.0).total_steps()


@pytest.mark.parametrize("name", ["epochs", "minutes"])
def test_epochs_and_minutes_must_be_finite(name: str) -> None:
    """Infinite epochs and minutes are rejected."""
    with pytest.raises(ValueError, match="finite number"):
        ScheduleSettings.model_validate({name: float("inf")})
