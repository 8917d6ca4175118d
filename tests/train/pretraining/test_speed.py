"""The measured cost of a run: phases, left-to-right steps and a changing masking rate."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.sentence_pairs import PairSampler
from bertsmith.data.store import Store
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.pretraining import speed
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.schedule import Phase
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import make_assignments


def _build_session(store: Path, **changes: Any) -> Session:
    """Return a session with the small settings and these changes."""
    opened_store = Store.open(store)
    overrides = Overrides(data=store, assignments=make_assignments(**changes))
    return Session(resolve_settings(overrides, opened_store), opened_store)


def test_cost_includes_left_to_right_steps(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured cost of a step is the mean of both parts, weighted by their fractions."""
    session = _build_session(store, schedule__causal_fraction=0.25)
    macs: dict[bool, float] = {}

    def measure_steps(
        _session: Session, objective: Any, phase: Phase, _seconds: float
    ) -> tuple[list[float], list[list[PretrainingMicroBatch]], bool]:
        batch = next(objective.iter_batches(0))
        assert all(part.is_causal == phase.is_causal for part in batch)
        macs[phase.is_causal] = objective.count_macs(batch)
        return [4.0 if phase.is_causal else 1.0], [batch], False

    monkeypatch.setattr(speed, "_measure_steps", measure_steps)
    assert speed.measure_cost(session).step_seconds == pytest.approx(0.25 * 4 + 0.75)
    assert macs[True] > macs[False]


@pytest.mark.parametrize("rates", [(0.6, 0.2), (0.2, 0.6)], ids=["falling", "rising"])
def test_steps_are_measured_at_the_mean_masking_rate(
    store: Path, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float]
) -> None:
    """One step with the highest rate, for the peak memory, precedes steps with the mean rate."""
    initial_rate, final_rate = rates
    session = _build_session(
        store, data__masking_rate=initial_rate, data__final_masking_rate=final_rate
    )
    measured_rates: list[float] = []

    def record(_session: Session, _objective: Any, _step: int, batch: list[Any]) -> None:
        num_predictions = sum(part.num_predictions for part in batch)
        measured_rates.append(num_predictions / sum(part.num_tokens for part in batch))

    monkeypatch.setattr(speed, "_take_step", record)
    # Slow steps are estimated from micro-batches.
    monkeypatch.setattr(speed, "_measure_slow_step", lambda *_: (None, []))
    speed.measure_cost(session, 0.1)
    # Special tokens are not masked.
    assert measured_rates[0] == pytest.approx(0.55, abs=0.05)
    assert measured_rates[1:] == pytest.approx([0.37] * len(measured_rates[1:]), abs=0.04)
    assert len(measured_rates) > 3


def test_training_examples_are_counted_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe and the run count the examples of the first epoch of each phase once."""
    num_counts = 0
    find_chunk_starts = PairSampler.find_chunk_starts

    def count(sampler: PairSampler, chunk_length: int) -> Any:
        nonlocal num_counts
        num_counts += sampler._split is session.train_split
        return find_chunk_starts(sampler, chunk_length)

    session = _build_session(store, data__final_masking_rate=0.5, schedule__phase2_max_seqlen=64)
    monkeypatch.setattr(PairSampler, "find_chunk_starts", count)
    speed.measure_cost(session, 0.1)
    session.list_phase_shares()
    next(session.build_objective(StepDuration(4)).iter_batches(0))
    assert num_counts == len(session.list_phases()) == 2
