"""Batches whose settings change during a run, and the positions from which runs are resumed."""

from typing import Any

import numpy as np
import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.errors import SettingsError
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.training_batches import TrainingBatches

STEPS = 20


@pytest.fixture(scope="module")
def opened_store(store: Any) -> Store:
    """The opened store."""
    return Store.open(store)


def _make_batches(store: Store, schedule: Any = None, **data: Any) -> TrainingBatches:
    """Return the batches of a run of STEPS steps; keywords are data settings."""
    settings = DataSettings(max_seqlen=32, **{"batch_size": 8, **data})
    vocabulary = VocabularyInfo.from_tokenizer(store.load_tokenizer())
    return TrainingBatches(
        store.load_split("train"),
        vocabulary,
        settings,
        ScheduleSettings(**(schedule or {})),
        StepDuration(STEPS),
        seed=0,
    )


def _read(batches: TrainingBatches, first_step: int = 0) -> list[ExampleBatch]:
    """Return the batches from ``first_step`` on."""
    position = batches.find_position(first_step)
    return [batch for batch, _ in batches.iter_batches(first_step, position)]


def _is_equal(first: ExampleBatch, second: ExampleBatch) -> bool:
    """Return whether two batches have the same tokens and masks."""
    return np.array_equal(first.ids, second.ids) and np.array_equal(
        first.masked_positions, second.masked_positions
    )


def test_masking_rate_moves_to_its_final_value(opened_store: Store) -> None:
    """The rate of step n of 20 is 0.6 - 0.5 n / 20; short sequences are rounded."""
    batches = _make_batches(opened_store, masking_rate=0.6, final_masking_rate=0.1)
    rates = [len(batch.masked_labels) / len(batch.ids) for batch in _read(batches)]
    assert rates == pytest.approx([0.6 - 0.025 * step for step in range(STEPS)], abs=0.025)


@pytest.mark.parametrize(
    ("schedule", "data"),
    [
        ({}, {"masking_rate": 0.6, "final_masking_rate": 0.1}),
        ({"phase2_max_seqlen": 64, "phase2_fraction": 0.3}, {"final_masking_rate": 0.3}),
    ],
)
@pytest.mark.parametrize("first_step", [1, 7, 14, 19])
def test_resumed_run_has_the_same_batches(
    opened_store: Store, schedule: Any, data: Any, first_step: int
) -> None:
    """Batches from any step on are those of an uninterrupted run."""
    expected = _read(_make_batches(opened_store, schedule, **data))[first_step:]
    resumed = _read(_make_batches(opened_store, schedule, **data), first_step)
    assert len(resumed) == STEPS - first_step
    assert all(map(_is_equal, resumed, expected))


def test_constant_masking_rate_is_that_of_the_stream(opened_store: Store) -> None:
    """Without a final rate, batches are those of a final rate equal to the first one."""
    constant = _read(_make_batches(opened_store, masking_rate=0.3))
    changed = _read(_make_batches(opened_store, masking_rate=0.3, final_masking_rate=0.3))
    assert all(map(_is_equal, constant, changed))


def test_evaluations_use_the_final_masking_rate(opened_store: Store) -> None:
    """All evaluations of a run mask the share of tokens that the run ends with."""
    vocabulary = VocabularyInfo.from_tokenizer(opened_store.load_tokenizer())
    settings = DataSettings(max_seqlen=32, masking_rate=0.6, final_masking_rate=0.2)
    stream = build_heldout_stream(opened_store.load_split("heldout"), vocabulary, settings)
    batch = stream.batch(0, len(stream))
    assert len(batch.masked_labels) / len(batch.ids) == pytest.approx(0.2, abs=0.02)


def test_final_masking_rate_needs_masks() -> None:
    """The left-to-right objective rejects a final masking rate."""
    with pytest.raises(SettingsError, match=r"final_masking_rate is 0\.2, but the objective"):
        DataSettings.parse(
            {"objective": "left-to-right", "nsp": False, "final_masking_rate": 0.2}, "here"
        )
