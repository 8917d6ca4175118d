"""The optimizer: which parameters decay, and a step against plain numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bertsmith.errors import RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.optimizer import build_optimizer, has_weight_decay
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import step_seed, take_step
from tests.model.examples import prime_config

CPU = Machine(torch.device("cpu"), "fp32", "padded")


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_decay_groups_by_name(norm: Any) -> None:
    """All weights of Linear and Embedding decay; no bias and no LayerNorm does; none is left out.

    The masked-LM decoder's weight is the word table, and stands in one group once.
    """
    config = ModelConfig(
        vocab_size=31, layers=2, width=14, heads=2, feed_forward=17, max_positions=19, norm=norm
    )
    model = BertForPreTraining(config)
    spared = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or name == "bias"
    }
    optimizer = build_optimizer(model, OptimSettings(weight_decay=0.03))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.03, 0.0]
    with_decay, without = ([id(p) for p in group["params"]] for group in optimizer.param_groups)
    assert set(without) == spared
    assert sorted(with_decay + without) == sorted(id(p) for p in model.parameters())
    names = {name for name, _ in model.named_parameters() if not has_weight_decay(name)}
    assert {"mlm.decoder.bias", "mlm.norm.weight", "pooler.dense.bias"} <= names
    assert not {"bert.embeddings.words.weight", "nsp.classifier.weight"} & names


def test_a_fixed_position_table_is_not_trained() -> None:
    """Sinusoidal positions belong to no group."""
    config = ModelConfig(
        vocab_size=31, layers=1, width=14, heads=2, feed_forward=17, positions="sinusoidal"
    )
    model = BertForPreTraining(config)
    held = [
        p for group in build_optimizer(model, OptimSettings()).param_groups for p in group["params"]
    ]
    assert not any(p is model.bert.embeddings.positions.weight for p in held)


class _Plane(nn.Module):
    """Two parameters, one that decays and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -1.5], [2.0, 0.1]]))
        self.bias = nn.Parameter(torch.tensor([0.3, -0.7]))

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Any:
        """Name them as in a model."""
        yield "layer.weight", self.weight
        yield "layer.bias", self.bias


def _losses(slopes: Any) -> Any:
    """Return a loss whose gradient is ``slopes`` times the piece."""

    def losses(piece: Any, whole: Any, noise: DropoutSeed) -> dict[str, Tensor]:
        model, factor = piece
        weight, bias = slopes
        return {"a": (model.weight * weight).sum() * factor, "b": (model.bias * bias).sum()}

    return losses


@pytest.mark.parametrize("clip", [0.01, 1.0, 1e9])
def test_a_step_is_plain_adamw(clip: float) -> None:
    """Five steps equal AdamW in numpy: clipping by the global norm, bias correction, decay.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; w -= rate (wd w + m' / (sqrt(v') + eps)).
    """
    settings = OptimSettings(
        lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2, max_grad_norm=clip
    )
    model = _Plane()
    optimizer = build_optimizer(model, settings)
    weights = [p.detach().double().numpy().copy() for p in model.parameters()]
    decay = [settings.weight_decay, 0.0]
    m, v = [0 * w for w in weights], [0 * w for w in weights]
    chance = np.random.default_rng(0)
    for step in range(5):
        slopes = [chance.normal(size=w.shape) for w in weights]
        rate = 0.1 * (step + 1)
        tensors = [torch.tensor(slope, dtype=torch.float32) for slope in slopes]
        result = take_step(
            _losses(tensors), [(model, 1.0)], model, optimizer, CPU,
            step=step, seed=0, lr=rate, max_grad_norm=clip,
        )  # fmt: skip
        norm = math.sqrt(sum(float((slope**2).sum()) for slope in slopes))
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        for i, slope in enumerate(slopes):
            g = slope * min(1.0, clip / norm)
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.95 * v[i] + 0.05 * g**2
            m_hat, v_hat = m[i] / (1 - 0.8 ** (step + 1)), v[i] / (1 - 0.95 ** (step + 1))
            weights[i] = weights[i] - rate * decay[i] * weights[i]
            weights[i] -= rate * m_hat / (np.sqrt(v_hat) + 1e-3)
    for parameter, expected in zip(model.parameters(), weights, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_touches_nothing(bad: float) -> None:
    """RunError names step, seed and batch; weights and moments stand as they stood."""
    model = _Plane()
    optimizer = build_optimizer(model, OptimSettings())
    slopes = [torch.ones(2, 2), torch.ones(2)]

    def take(factor: float, step: int) -> None:
        pieces = [(model, 1.0), (model, factor)]
        take_step(
            _losses(slopes), pieces, model, optimizer, CPU,
            step=step, seed=5, lr=0.1, max_grad_norm=1.0, describe_batch="page {}".format,
        )  # fmt: skip

    take(1.0, 0)
    before = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    with pytest.raises(RunError, match=r"step 2: the loss is (nan|inf).*page 1 \(seed 5\)"):
        take(bad, 1)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    after = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))


def test_a_gradient_that_is_not_finite_touches_nothing() -> None:
    """A finite loss with an infinite gradient stops the step too."""
    model = _Plane()
    optimizer = build_optimizer(model, OptimSettings())
    before = model.weight.detach().clone()

    def losses(piece: Any, whole: Any, noise: DropoutSeed) -> dict[str, Tensor]:
        return {"root": (model.weight - model.weight.detach()).abs().sqrt().sum()}

    with pytest.raises(RunError, match="the norm of its gradient"):
        take_step(losses, [None], model, optimizer, CPU, step=0, seed=0, lr=0.1, max_grad_norm=1.0)
    assert torch.equal(model.weight, before)


def test_no_two_steps_or_pieces_share_their_noise() -> None:
    """The seeds of dropout differ between steps, between pieces, and between runs."""
    seeds = [step_seed(s, t, p) for s in range(5) for t in range(200) for p in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert step_seed(3, 4, 5) == step_seed(3, 4, 5)
    assert all(0 <= seed < 2**62 for seed in (*seeds, step_seed(2**31 - 1, 10**7, 10**4)))


def test_nothing_decays_that_only_shifts_or_mixes() -> None:
    """Of the feature-based model the biases of the LSTM, and the weights of the layers, do not."""
    model = BertWithBiLSTM(prime_config(), 3, FeatureSettings(layers="weighted-sum-all", width=5),
                         is_sequence_level=True)  # fmt: skip
    found = {name for name, weight in model.named_parameters()
             if weight.requires_grad and has_weight_decay(name)}  # fmt: skip
    assert found == {
        *(f"lstm.weight_{kind}_l{layer}{way}" for kind in ("ih", "hh") for layer in (0, 1)
          for way in ("", "_reverse")),
        "output.weight",
    }  # fmt: skip
