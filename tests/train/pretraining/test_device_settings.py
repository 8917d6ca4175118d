"""Settings of a pre-training run that depend on the precision of the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.data.store import Store
from bertsmith.errors import SettingsError
from bertsmith.runtime import device
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import TrainFunction, make_assignments


def test_residual_dtype_is_set_in_the_model(store: Path) -> None:
    """The residual stream is float32 by default, and bf16 with run.residual_dtype."""
    for dtype, expected in ((None, None), ("bf16", torch.bfloat16)):
        options = make_assignments(run__precision="bf16", run__residual_dtype=dtype)
        settings = resolve_settings(Overrides(data=store, assignments=options), Store.open(store))
        session = Session(settings, Store.open(store))
        assert session.model.bert.residual_dtype == expected


def test_bf16_residual_stream_is_trained_and_needs_bf16(train: TrainFunction) -> None:
    """A run with a bf16 residual stream ends; with precision fp32 it is rejected."""
    result = train("run", steps=2, run__precision="bf16", run__residual_dtype="bf16")
    assert result.model is not None
    with pytest.raises(SettingsError, match=r"residual_dtype is 'bf16', but .* set run.precision"):
        train("rejected", steps=2, run__precision="fp32", run__residual_dtype="bf16")


def test_micro_batches_have_room_for_a_rising_masking_rate(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default micro-batch of a GPU depends on the highest masking rate of the run."""
    rates = []

    def choose(*_: Any, predictions_per_token: float) -> int:
        rates.append(predictions_per_token)
        return 4096

    monkeypatch.setattr(device, "choose_micro_batch_tokens", choose)
    for options in (
        make_assignments(data__masking_rate=0.15, data__final_masking_rate=0.6),
        make_assignments(data__masking_rate=0.3, data__final_masking_rate=0.15),
    ):
        settings = resolve_settings(Overrides(data=store, assignments=options), Store.open(store))
        Session(settings, Store.open(store))
    assert rates == [0.6, 0.3]
