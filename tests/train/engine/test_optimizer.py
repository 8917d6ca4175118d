"""The optimizer: parameter groups, and optimizer steps compared with NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bertsmith.errors import RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.optimizer import build_optimizer, has_weight_decay
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import derive_dropout_seed, take_step
from tests.model.examples import make_prime_size_config

CPU = Machine(torch.device("cpu"), "fp32", "padded")


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_only_weights_of_linear_and_embedding_decay(norm: Any) -> None:
    """Every parameter is in one group: biases and LayerNorm do not decay, everything else does.

    The MLM decoder's weight, tied to the word embeddings, occurs only once.
    """
    config = ModelConfig(
        vocab_size=31, layers=2, width=14, heads=2, feed_forward=17, max_positions=19, norm=norm
    )
    model = BertForPreTraining(config)
    expected_without_decay = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or name == "bias"
    }
    optimizer = build_optimizer(model, OptimSettings(weight_decay=0.03))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.03, 0.0]
    with_decay, without_decay = (
        [id(p) for p in group["params"]] for group in optimizer.param_groups
    )
    assert set(without_decay) == expected_without_decay
    assert sorted(with_decay + without_decay) == sorted(id(p) for p in model.parameters())
    names = {name for name, _ in model.named_parameters() if not has_weight_decay(name)}
    assert {"mlm.decoder.bias", "mlm.norm.weight", "pooler.dense.bias"} <= names
    assert not {"bert.embeddings.words.weight", "nsp.classifier.weight"} & names


def test_sinusoidal_positions_are_not_trained() -> None:
    """Sinusoidal position embeddings are in no parameter group."""
    config = ModelConfig(
        vocab_size=31, layers=1, width=14, heads=2, feed_forward=17, positions="sinusoidal"
    )
    model = BertForPreTraining(config)
    optimizer = build_optimizer(model, OptimSettings())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert not any(p is model.bert.embeddings.positions.weight for p in parameters)


class _TwoParameters(nn.Module):
    """A module with one parameter that decays and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -1.5], [2.0, 0.1]]))
        self.bias = nn.Parameter(torch.tensor([0.3, -0.7]))

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Any:
        """Yield the parameters with names as in a BERT."""
        yield "layer.weight", self.weight
        yield "layer.bias", self.bias


def _make_loss_fn(model: _TwoParameters, gradients: Any) -> Any:
    """Return a loss function with these gradients of the model's weight and bias.

    A micro-batch is the factor by which the weight's gradient is multiplied.
    """

    def loss_fn(
        micro_batch: Any, micro_batches: Any, dropout_seed: DropoutSeed
    ) -> dict[str, Tensor]:
        weight_gradient, bias_gradient = gradients
        return {
            "a": (model.weight * weight_gradient).sum() * micro_batch,
            "b": (model.bias * bias_gradient).sum(),
        }

    return loss_fn


@pytest.mark.parametrize("max_grad_norm", [0.01, 1.0, 1e9])
def test_steps_equal_adamw_in_numpy(max_grad_norm: float) -> None:
    """Five steps with gradient clipping equal the formulas of AdamW, computed in NumPy.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; w -= lr (wd w + m_hat / (sqrt(v_hat) + eps)).
    """
    settings = OptimSettings(
        lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2, max_grad_norm=max_grad_norm
    )
    model = _TwoParameters()
    optimizer = build_optimizer(model, settings)
    weights = [p.detach().double().numpy().copy() for p in model.parameters()]
    decay = [settings.weight_decay, 0.0]
    m, v = [0 * w for w in weights], [0 * w for w in weights]
    rng = np.random.default_rng(0)
    for step in range(5):
        gradients = [rng.normal(size=w.shape) for w in weights]
        lr = 0.1 * (step + 1)
        tensors = [torch.tensor(gradient, dtype=torch.float32) for gradient in gradients]
        result = take_step(
            _make_loss_fn(model, tensors),
            [1.0],
            model,
            optimizer,
            CPU,
            step=step,
            seed=0,
            lr=lr,
            max_grad_norm=max_grad_norm,
        ).read()
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        for i, gradient in enumerate(gradients):
            g = gradient * min(1.0, max_grad_norm / norm)
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.95 * v[i] + 0.05 * g**2
            m_hat, v_hat = m[i] / (1 - 0.8 ** (step + 1)), v[i] / (1 - 0.95 ** (step + 1))
            weights[i] = weights[i] - lr * decay[i] * weights[i]
            weights[i] -= lr * m_hat / (np.sqrt(v_hat) + 1e-3)
    for parameter, expected in zip(model.parameters(), weights, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_non_finite_loss_changes_nothing(factor: float) -> None:
    """The RunError names step, seed and batch; weights and moments are unchanged."""
    model = _TwoParameters()
    optimizer = build_optimizer(model, OptimSettings())
    gradients = [torch.ones(2, 2), torch.ones(2)]

    def take_one_step(second_factor: float, step: int) -> None:
        micro_batches = [1.0, second_factor]
        take_step(
            _make_loss_fn(model, gradients),
            micro_batches,
            model,
            optimizer,
            CPU,
            step=step,
            seed=5,
            lr=0.1,
            max_grad_norm=1.0,
            describe_batch="page {}".format,
        )

    take_one_step(1.0, 0)
    old_weights = [p.detach().clone() for p in model.parameters()]
    old_moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    with pytest.raises(RunError, match=r"step 2: the loss is (nan|inf).*page 1 \(seed 5\)"):
        take_one_step(factor, 1)
    assert all(map(torch.equal, model.parameters(), old_weights))
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(map(torch.equal, moments, old_moments))


def test_non_finite_gradient_changes_nothing() -> None:
    """An infinite gradient raises RunError, although the loss is finite."""
    model = _TwoParameters()
    optimizer = build_optimizer(model, OptimSettings())
    old_weight = model.weight.detach().clone()

    def loss_fn(
        micro_batch: Any, micro_batches: Any, dropout_seed: DropoutSeed
    ) -> dict[str, Tensor]:
        return {"loss": (model.weight - model.weight.detach()).abs().sqrt().sum()}

    with pytest.raises(RunError, match="the gradient norm"):
        take_step(loss_fn, [None], model, optimizer, CPU, step=0, seed=0, lr=0.1, max_grad_norm=1.0)
    assert torch.equal(model.weight, old_weight)


def test_dropout_seeds_differ_between_steps_and_micro_batches() -> None:
    """No two runs, steps or micro-batches have the same dropout seed."""
    seeds = [
        derive_dropout_seed(seed, step, index)
        for seed in range(5)
        for step in range(200)
        for index in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive_dropout_seed(3, 4, 5) == derive_dropout_seed(3, 4, 5)
    assert all(0 <= seed < 2**62 for seed in (*seeds, derive_dropout_seed(2**31 - 1, 10**7, 10**4)))


def test_bilstm_biases_and_layer_weights_do_not_decay() -> None:
    """In the feature-based model, LSTM biases and the layer-mixing weights do not decay."""
    features = BiLSTMSettings(layers="weighted-sum-all", width=5)
    model = BertWithBiLSTM(make_prime_size_config(), 3, features, is_sequence_level=True)
    names = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and has_weight_decay(name)
    }
    assert names == {
        *(
            f"lstm.weight_{kind}_l{layer}{suffix}"
            for kind in ("ih", "hh")
            for layer in (0, 1)
            for suffix in ("", "_reverse")
        ),
        "output.weight",
    }
