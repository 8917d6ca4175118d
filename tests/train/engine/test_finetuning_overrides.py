"""Settings that all kinds of fine-tuning resolve in the same way."""

import pytest

from bertsmith.errors import SettingsError
from bertsmith.train.engine.finetuning_overrides import get_model_overrides, resolve_epochs


@pytest.mark.parametrize(
    ("schedule", "epochs"),
    [({}, 3.0), ({"epochs": 1.5}, 1.5), ({"steps": 7}, None), ({"decay": "linear"}, 3.0)],
)
def test_steps_replace_the_default_epochs(schedule: dict[str, object], epochs: float) -> None:
    """A number of steps unsets the default number of epochs, and only that."""
    assert resolve_epochs({"schedule": schedule}, default=3.0) == epochs


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"steps": 7, "epochs": 2}, "schedule.steps is 7 and schedule.epochs is 2; set only one"),
        ({"minutes": 5}, "fine-tuning has no time budget; set schedule.epochs or schedule.steps"),
    ],
)
def test_contradictory_and_unsupported_lengths_are_rejected(
    schedule: dict[str, object], message: str
) -> None:
    """Two lengths, or a time budget, which only pre-training has, are errors."""
    with pytest.raises(SettingsError, match=message):
        resolve_epochs({"schedule": schedule}, default=3.0)


def test_only_the_dropout_rates_of_the_model_can_be_set() -> None:
    """The sizes of the model are those of the start model."""
    assert get_model_overrides({"model": {"dropout": 0.2}}) == {"dropout": 0.2}
    with pytest.raises(SettingsError, match=r"model\.width cannot be set"):
        get_model_overrides({"model": {"dropout": 0.2, "width": 64}})
