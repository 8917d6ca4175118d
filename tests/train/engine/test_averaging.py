"""The average of the weights: its values, its place in checkpoints, and its use in runs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bertsmith import bundle
from bertsmith.errors import RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.averaging import WeightAverage
from bertsmith.train.engine.checkpoint import AVERAGE_FILE, TrainingState
from bertsmith.train.engine.metrics_log import read_metrics
from tests.train.conftest import TrainFunction


def _compute_shares(fraction: float, steps: int) -> torch.Tensor:
    """Return the share of the weights after each step in the average after ``steps`` steps."""
    model = nn.Linear(steps, 1, bias=False)
    average = WeightAverage(model, fraction)
    for step in range(steps):
        with torch.no_grad():
            model.weight.copy_(torch.eye(steps)[step : step + 1])
        average.update(step + 1)
    return average.weights["weight"][0]


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 1.0])
def test_average_covers_the_last_fraction_of_the_steps(fraction: float) -> None:
    """The shares add up to 1, the initial weights have none, and the mean age is that of a window.

    A uniform average over the last fraction f of t steps has a mean age of f t / 2.
    """
    steps = 400
    shares = _compute_shares(fraction, steps)
    assert shares.sum().item() == pytest.approx(1.0, abs=1e-5)
    mean_age = (shares * torch.arange(steps - 1, -1, -1)).sum().item()
    assert mean_age == pytest.approx(fraction * steps / 2, abs=1.0)
    assert (shares.diff() >= -1e-7).all()


def test_fraction_of_one_is_the_uniform_average() -> None:
    """With a fraction of 1, all steps have the same share."""
    torch.testing.assert_close(_compute_shares(1.0, 20), torch.full((20,), 0.05))


def test_applied_average_is_replaced_by_the_weights() -> None:
    """Inside the block the model has the average; after it, even after an error, the weights."""
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    values = []

    def fail_with_the_average() -> None:
        with average.applied():
            values.append(model.weight.detach().clone())
            raise KeyError

    with pytest.raises(KeyError):
        fail_with_the_average()
    assert torch.equal(values[0], start)
    assert torch.equal(model.weight, start + 1.0)


def test_frozen_parameters_have_no_average() -> None:
    """Only trainable parameters are averaged."""
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert list(WeightAverage(model, 0.5).weights) == ["weight"]


def test_checkpoint_stores_weights_and_average(tmp_path: Path) -> None:
    """A checkpoint restores weights and average; a damaged average is an error.

    ``load_weights`` loads the average.
    """
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    average = WeightAverage(model, 0.5)
    start = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights = model.weight.detach().clone()
    directory = checkpoint.save(tmp_path, TrainingState(step=1), model, optimizer, 1, average)
    restored = nn.Linear(3, 2)
    restored_average = WeightAverage(restored, 0.5)
    new_optimizer = torch.optim.AdamW(restored.parameters())
    checkpoint.restore(directory, restored, new_optimizer, average=restored_average)
    assert torch.equal(restored.weight, weights)
    assert torch.equal(restored_average.weights["weight"], start)
    checkpoint.load_weights(directory, restored)
    assert torch.equal(restored.weight, start)
    content = bytearray((directory / AVERAGE_FILE).read_bytes())
    content[-1] ^= 1
    (directory / AVERAGE_FILE).write_bytes(content)
    with pytest.raises(RunError, match=r"average\.safetensors does not match its checksum"):
        checkpoint.load_weights(directory, restored)
    with pytest.raises(RunError, match=r"average\.safetensors does not match its checksum"):
        checkpoint.restore(directory, restored, new_optimizer, average=restored_average)


def test_run_evaluates_and_writes_the_average(train: TrainFunction) -> None:
    """Training takes the same steps with averaging; metrics and model are those of the average."""
    plain = train("plain", steps=6, run__eval_every=3)
    averaged = train("averaged", steps=6, run__eval_every=3, optim__average_fraction=0.9)
    assert plain.model is not None
    assert averaged.model is not None
    lines = [read_metrics(result.run) for result in (plain, averaged)]
    for line, other in zip(*lines, strict=True):
        if line["kind"] == "train":
            assert line["loss"] == other["loss"]
        else:
            assert line["mlm_loss"] != other["mlm_loss"]
    directory = averaged.run / "checkpoints" / "step-6"
    model = bundle.load(averaged.model).model
    expected = load_file(directory / AVERAGE_FILE)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    weights = load_file(directory / "weights.safetensors")
    plain_model = BertForPreTraining(model.config)
    plain_model.load_state_dict(bundle.load(plain.model).model.state_dict())
    assert all(torch.equal(p, weights[name]) for name, p in plain_model.named_parameters())
