"""Batches whose settings change during a run, and the positions from which runs are resumed."""

from typing import Any

import numpy as np
import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.data.stream import EpochStreams, ExampleStream
from bertsmith.errors import SettingsError
from bertsmith.model.config import ModelConfig
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.recipes import PretrainSettings, RunSettings
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings, convert_epochs_to_steps
from bertsmith.train.pretraining.session import Session
from bertsmith.train.pretraining.training_batches import DataPosition, TrainingBatches

STEPS = 20


@pytest.fixture(scope="module")
def opened_store(store: Any) -> Store:
    """The opened store of the fixture ``store``."""
    return Store.open(store)


def _make_batches(store: Store, schedule: Any = None, **data: Any) -> TrainingBatches:
    """Return the batches of a run of STEPS steps; keywords are data settings."""
    settings = DataSettings(max_seqlen=32, **{"batch_size": 8, **data})
    vocabulary = VocabularyInfo.from_tokenizer(store.load_tokenizer())
    epochs = EpochStreams(store.load_split("train"), vocabulary, settings, seed=0)
    schedule_settings = PretrainScheduleSettings(**(schedule or {}))
    return TrainingBatches(epochs, settings, schedule_settings, StepDuration(STEPS))


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
    """The rate of step n of 20 is 0.6 - 0.5 n / 20, up to rounding in short sequences."""
    batches = _make_batches(opened_store, masking_rate=0.6, final_masking_rate=0.1)
    rates = [len(batch.masked_labels) / len(batch.ids) for batch in _read(batches)]
    assert rates == pytest.approx([0.6 - 0.025 * step for step in range(STEPS)], abs=0.025)


@pytest.mark.parametrize(
    ("schedule", "data"),
    [
        ({}, {"masking_rate": 0.6, "final_masking_rate": 0.1}),
        ({"phase2_max_seqlen": 64, "phase2_fraction": 0.3}, {"final_masking_rate": 0.3}),
        ({"batch_ramp_fraction": 0.5}, {"initial_batch_size": 2}),
        ({"phase2_max_seqlen": 64, "phase2_fraction": 0.6}, {"initial_batch_size": 1}),
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


def test_position_continues_without_counting_past_epochs(
    opened_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each position, the next batches are the same, and no earlier epoch is counted.

    The run has several epochs, and batches that cross epochs, in each of its two phases.
    """
    schedule = {"phase2_max_seqlen": 64, "phase2_fraction": 0.5}

    def make_batches() -> TrainingBatches:
        return _make_batches(opened_store, schedule, batch_size=120)

    steps = list(make_batches().iter_batches(0, DataPosition()))
    num_epochs = [position.num_epochs for _, position in steps]
    assert max(num_epochs[:10]) >= 2
    assert max(num_epochs[10:]) >= 2
    epochs: list[int] = []
    make_stream = ExampleStream.__init__

    def record_epoch(self: Any, *arguments: Any, **keywords: Any) -> None:
        epochs.append(keywords["epoch"])
        make_stream(self, *arguments, **keywords)

    monkeypatch.setattr(ExampleStream, "__init__", record_epoch)
    for step, (_, position) in enumerate(steps[:-1]):
        assert make_batches().find_position(step + 1) == position
        epochs.clear()
        batch, next_position = next(make_batches().iter_batches(step + 1, position))
        assert _is_equal(batch, steps[step + 1][0])
        assert next_position == steps[step + 1][1]
        assert min(epochs) >= position.first_epoch + position.num_epochs


def test_batch_grows_and_uses_every_example_once(opened_store: Store) -> None:
    """Batches of 2, 3, 3, 4, ... 8 sequences are the consecutive examples of the epoch."""
    schedule = {"batch_ramp_fraction": 0.5}
    batches = _make_batches(opened_store, schedule, initial_batch_size=2)
    grown = _read(batches)
    sizes = [2, 3, 3, 4, 4, 5, 6, 6, 7, 7, *[8] * 10]
    assert [len(batch) for batch in grown] == sizes
    assert batches.find_position(STEPS).example == sum(sizes)
    single_examples = _read(_make_batches(opened_store, batch_size=1))
    first_ids = np.concatenate([batch.ids for batch in single_examples])
    grown_ids = np.concatenate([batch.ids for batch in grown])
    assert np.array_equal(grown_ids[: len(first_ids)], first_ids)


@pytest.mark.parametrize(("initial_batch_size", "steps"), [(None, 100), (1, 108), (8, 100)])
def test_epochs_are_converted_with_the_mean_batch_size(
    opened_store: Store, initial_batch_size: int | None, steps: int
) -> None:
    """A batch that grows from 1/8 over the first 15 % of the run takes 7 % more steps.

    The number of steps is rounded up.
    """
    data = DataSettings(batch_size=8, initial_batch_size=initial_batch_size)
    schedule = PretrainScheduleSettings(batch_ramp_fraction=0.15)
    settings = PretrainSettings(
        model=ModelConfig(vocab_size=opened_store.manifest.vocab_size, layers=1, width=8, heads=1),
        data=data,
        schedule=schedule,
        run=RunSettings(device="cpu", precision="fp32"),
    )
    session = Session(settings, opened_store)
    ((share, num_examples),) = session.list_phase_shares()
    epochs = 100 * 8 / num_examples
    assert convert_epochs_to_steps(epochs, 8, [(share, num_examples)]) == steps


def test_batch_can_only_grow() -> None:
    """An initial batch size above the batch size is rejected."""
    with pytest.raises(SettingsError, match="initial_batch_size is 9, which is above"):
        DataSettings.parse({"initial_batch_size": 9, "batch_size": 8}, "here")


def test_constant_masking_rate_is_that_of_the_stream(opened_store: Store) -> None:
    """Without a final masking rate, batches are those of a final rate equal to the initial one."""
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
