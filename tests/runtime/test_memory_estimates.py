"""Memory estimates are lower bounds, and models that need too much memory are rejected."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bertsmith import memory
from bertsmith.bundle import weights
from bertsmith.errors import ModelError, RunError
from bertsmith.memory import get_total_memory_bytes
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.runtime import device
from bertsmith.runtime.memory_estimates import estimate_num_parameters, estimate_training_bytes
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.train.engine.optimizer import build_optimizer, iter_moment_names
from bertsmith.train.engine.settings import OptimizerName, OptimSettings


def make_config(**changes: int) -> ModelConfig:
    """Return the config of a small model, with changed fields."""
    sizes = {"vocab_size": 101, "layers": 3, "width": 22, "heads": 2, "feed_forward": 31}
    return ModelConfig.parse(sizes | changes, "test")


def test_estimated_parameters_are_a_lower_bound() -> None:
    """The estimated number of parameters is 80 % to 100 % of the actual number."""
    model = BertForPreTraining(make_config())
    actual = sum(parameter.numel() for parameter in model.parameters())
    assert 0.8 * actual < estimate_num_parameters(make_config()) <= actual
    assert get_total_memory_bytes() > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_estimated_training_bytes_are_a_lower_bound(
    optimizer: OptimizerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is 80 % to 100 % of the weights, gradients and moments of the optimizer."""
    config = make_config()
    moments = iter_moment_names(
        build_optimizer(BertForPreTraining(config), OptimSettings(optimizer=optimizer))
    )
    actual = sum(4 * (2 + len(names)) * parameter.numel() for parameter, names in moments)
    assert 0.8 * actual < estimate_training_bytes(config, 0, optimizer) <= actual
    machine = device.Machine(torch.device("cpu"), "fp32", "padded")
    monkeypatch.setattr(device, "get_total_memory_bytes", lambda: actual)
    device.check_memory(machine, config, 1, 1, optimizer)


def test_training_that_needs_too_much_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with too large a model, batch or micro-batch for the memory is an error."""
    config = make_config()
    machine = device.Machine(torch.device("cpu"), "fp32", "padded")
    # The memory suffices for the weights and 2 MB of activations and token ids.
    limit = estimate_training_bytes(config, 0) + 2_000_000
    monkeypatch.setattr(device, "get_total_memory_bytes", lambda: limit)
    device.check_memory(machine, config, batch_tokens=1000, micro_batch_tokens=1000)
    for changes, batch_tokens, micro_batch_tokens in (
        ({"layers": 60}, 10, 10), ({}, 100_000, 10), ({}, 5000, 5000),
    ):  # fmt: skip
        with pytest.raises(RunError, match="use a smaller model"):
            device.check_memory(machine, make_config(**changes), batch_tokens, micro_batch_tokens)


def test_processes_divide_the_batch_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes have half of a batch each; on one machine, also half of its memory each."""
    config = make_config()
    weight_bytes = estimate_training_bytes(config, 0)
    activation_bytes = estimate_training_bytes(config, 5000) - weight_bytes
    limit = weight_bytes + activation_bytes + 24 * 10_000
    for local_world_size, available in ((1, limit), (2, 2 * limit)):
        processes = ProcessGroup(0, 2, local_world_size)
        machine = device.Machine(torch.device("cpu"), "fp32", "padded", processes)
        monkeypatch.setattr(device, "get_total_memory_bytes", lambda value=available: value)
        device.check_memory(machine, config, batch_tokens=10_000, micro_batch_tokens=10_000)
        monkeypatch.setattr(device, "get_total_memory_bytes", lambda value=available: value - 2)
        with pytest.raises(RunError, match="not enough memory"):
            device.check_memory(machine, config, batch_tokens=10_000, micro_batch_tokens=10_000)


def test_model_larger_than_the_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model that is larger than the memory is an error."""
    # The weights need 4 MB.
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    monkeypatch.setattr(weights, "get_total_memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match="this model needs"):
        weights.allocate_on_cpu(model, Path("model"))


def test_limits_of_a_container_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is that of the container, with as much swap as it may use."""
    limit, swap_limit = tmp_path / "memory.max", tmp_path / "memory.swap.max"
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1 kB\nSwapTotal: 64 kB\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (limit,))
    monkeypatch.setattr(memory, "_CGROUP_SWAP_LIMIT", swap_limit)
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    limit.write_text("1000\n")
    assert get_total_memory_bytes() == 1000 + 64 * 1024
    for text, swap in (("max", 64 * 1024), ("500", 500), ("0", 0)):
        swap_limit.write_text(f"{text}\n")
        assert get_total_memory_bytes() == 1000 + swap
