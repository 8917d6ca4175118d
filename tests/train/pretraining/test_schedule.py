"""The schedule of a pre-training run: phases and epochs."""

import pytest

from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.pretraining.schedule import (
    Phase,
    PretrainScheduleSettings,
    build_phases,
    convert_epochs_to_steps,
    count_epochs,
)


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
    settings = PretrainScheduleSettings(
        steps=steps, phase2_max_seqlen=512, phase2_fraction=phase2_fraction
    )
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
    settings = PretrainScheduleSettings(
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
    assert build_phases(PretrainScheduleSettings(steps=7, phase2_fraction=0.5), 64) == [
        Phase(0, 7, 64)
    ]


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
