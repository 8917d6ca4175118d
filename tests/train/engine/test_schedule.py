"""The schedule: warm-up, learning rate, phases and epochs."""

import pytest

from bertsmith.errors import RunError, SettingsError
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.schedule import (
    Phase,
    ScheduleSettings,
    build_phases,
    compute_lr_factor,
    convert_epochs_to_steps,
    count_epochs,
)


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


@pytest.mark.parametrize(
    ("steps", "phase2_fraction", "expected"),
    [
        (1000, 0.1, [Phase(0, 900, 128), Phase(900, 1000, 512)]),
        (15, 0.1, [Phase(0, 13, 128), Phase(13, 15, 512)]),
        (4, 0.1, [Phase(0, 4, 128)]),
        (1, 0.9, [Phase(0, 1, 512)]),
        (10, 0.0, [Phase(0, 10, 128)]),
    ],
)
def test_run_has_two_phases(steps: int, phase2_fraction: float, expected: list[Phase]) -> None:
    """The last fraction of the steps has longer sequences; phases without steps are not listed."""
    settings = ScheduleSettings(steps=steps, phase2_max_seqlen=512, phase2_fraction=phase2_fraction)
    assert build_phases(settings, 128) == expected


@pytest.mark.parametrize(
    ("causal_fraction", "phase2_fraction", "expected"),
    [
        (0.25, 0.0, [Phase(0, 5, 128, is_causal=True), Phase(5, 20, 128)]),
        (0.5, 0.1, [Phase(0, 10, 128, is_causal=True), Phase(10, 18, 128), Phase(18, 20, 512)]),
        (0.5, 0.5, [Phase(0, 10, 128, is_causal=True), Phase(10, 20, 512)]),
        (
            0.95,
            0.1,
            [
                Phase(0, 18, 128, is_causal=True),
                Phase(18, 19, 512, is_causal=True),
                Phase(19, 20, 512),
            ],
        ),
        (0.01, 0.0, [Phase(0, 20, 128)]),
    ],
)
def test_run_starts_left_to_right(
    causal_fraction: float, phase2_fraction: float, expected: list[Phase]
) -> None:
    """The first fraction of the steps is left to right, whatever its sequence length.

    These are the steps that are in the first fraction of a ``StepDuration``.
    """
    settings = ScheduleSettings(
        steps=20,
        causal_fraction=causal_fraction,
        phase2_max_seqlen=512 if phase2_fraction else None,
        phase2_fraction=phase2_fraction,
    )
    phases = build_phases(settings, 128)
    assert phases == expected
    duration = StepDuration(20)
    for phase in phases:
        for step in range(phase.start_step, phase.end_step):
            assert duration.is_in_first(step, causal_fraction) == phase.is_causal


def test_run_without_phase2_has_one_phase() -> None:
    """If phase2_max_seqlen is not set, phase2_fraction has no effect."""
    assert build_phases(ScheduleSettings(steps=7, phase2_fraction=0.5), 64) == [Phase(0, 7, 64)]


@pytest.mark.parametrize(
    ("epochs", "batch_size", "phase_shares", "steps"),
    [
        (1.0, 10, [(1.0, 100)], 10),
        (1.0, 10, [(1.0, 101)], 11),
        (2.5, 10, [(1.0, 100)], 25),
        (0.001, 10, [(1.0, 100)], 1),
        # A step has 0.9 * 10 / 100 + 0.1 * 10 / 50 = 0.11 epochs.
        (1.1, 10, [(0.9, 100), (0.1, 50)], 10),
    ],
)
def test_epochs_become_steps(
    epochs: float, batch_size: int, phase_shares: list[tuple[float, int]], steps: int
) -> None:
    """Epochs are converted to the smallest number of steps that covers them, in all phases."""
    assert convert_epochs_to_steps(epochs, batch_size, phase_shares) == steps
    assert count_epochs(steps, batch_size, phase_shares) >= epochs
    assert count_epochs(steps - 1, batch_size, phase_shares) < epochs


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
