"""The probe before a run: how many steps it takes."""

from itertools import repeat
from types import SimpleNamespace

import pytest

from bertsmith.train.engine import probe


@pytest.mark.parametrize(
    ("step_seconds", "num_steps", "num_measured"), [(0.1, 22, 20), (3.0, 2, 1), (0.01, 32, 30)]
)
def test_slow_steps_have_a_short_probe(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, num_steps: int, num_measured: int
) -> None:
    """A probe of 2 s has two warm-up steps, or one if a step is slower, and at most 30 steps."""
    now = 0.0
    steps: list[int] = []

    def take_step(step: int, _micro_batches: object) -> None:
        nonlocal now
        now += step_seconds
        steps.append(step)

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))
    times, batches = probe.measure_steps(repeat([]), take_step, 2.0)
    assert (len(steps), len(times)) == (num_steps, num_measured)
    assert len(batches) == len(times)
    assert times == pytest.approx([step_seconds] * num_measured)


@pytest.mark.parametrize(
    ("micro_batch_seconds", "expected", "sizes"),
    [(1.0, 20.0, [1, 1, 8]), (30.0, 600.0, [1, 1]), (0.375, None, [1, 1])],
)
def test_slow_step_is_estimated_from_a_part(
    monkeypatch: pytest.MonkeyPatch,
    micro_batch_seconds: float,
    expected: float | None,
    sizes: list[int],
) -> None:
    """Of a step of 20 micro-batches, those that fit into 8 s are measured, but at least one.

    The warm-up step takes 100 s more and is not measured.
    """
    now = 0.0
    measured_sizes: list[int] = []

    def take_step(_step: int, micro_batches: list[int]) -> None:
        nonlocal now
        now += micro_batch_seconds * len(micro_batches) + 100.0 * sum(micro_batches)
        measured_sizes.append(len(micro_batches))

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))
    assert probe.measure_slow_step(1, [0] * 20, take_step, 8.0) == pytest.approx(expected)
    assert measured_sizes == sizes
