"""Estimates of memory: below what is really needed, and refused before anything is allocated."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bertsmith.bundle import weights
from bertsmith.errors import ModelError, RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.memory import num_parameters, total_memory_bytes, training_bytes
from bertsmith.runtime import device


def _config(**changes: int) -> ModelConfig:
    sizes = {"vocab_size": 101, "layers": 3, "width": 22, "heads": 2, "feed_forward": 31}
    return ModelConfig.parse(sizes | changes, "test")


def test_estimate_is_a_lower_bound() -> None:
    """The counted weights are nearly all of a model's, and never more."""
    real = sum(own.numel() for own in BertForPreTraining(_config()).parameters())
    assert 0.8 * real < num_parameters(_config()) <= real
    assert total_memory_bytes() > 0


def test_training_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, a batch, or what is computed at once can each be too large."""
    config = _config()
    machine = device.Machine(torch.device("cpu"), "fp32", "padded")
    limit = training_bytes(config, 0) + 2_000_000
    monkeypatch.setattr(device, "machine_bytes", lambda: limit)
    device.check_memory(machine, config, 1000, 1000)
    for changes, batch, at_once in (({"layers": 60}, 10, 10), ({}, 100_000, 10), ({}, 5000, 5000)):
        with pytest.raises(RunError, match="take a smaller model"):
            device.check_memory(machine, _config(**changes), batch, at_once)


def test_model_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model directory larger than the memory is refused before any of it is allocated."""
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    monkeypatch.setattr(weights, "total_memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match="this model needs"):
        weights.allocate_on_cpu(model, Path("model"))
