"""Muon: its updates compared with PyTorch's Muon and with NumPy, and its parameter groups."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.muon import Muon, orthogonalize
from bertsmith.train.engine.optimizer import build_optimizer, iter_moment_names, skip_step_if
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import take_step
from tests.model.examples import make_prime_size_config

CPU = Machine(torch.device("cpu"), "fp32", "padded")
MUON = OptimSettings(optimizer="muon", lr=0.01, weight_decay=0.1, muon_lr_factor=1.5)


def _set_random_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def _build_model() -> BertForPreTraining:
    torch.manual_seed(0)
    return BertForPreTraining(make_prime_size_config(nsp=True))


@pytest.mark.parametrize("shape", [(3, 13, 13), (1, 29, 7), (2, 7, 29)])
def test_orthogonalized_matrices_equal_the_formula(shape: tuple[int, int, int]) -> None:
    """The iterations equal X = a X + (b A + c A²) X with A = X X^T, computed in float64.

    They bring all singular values near 1, and keep the singular vectors.
    """
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonalize(matrices, 5)
    for matrix, actual in zip(matrices.double().numpy(), result.numpy(), strict=True):
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        np.testing.assert_allclose(actual, u @ np.diag(s) @ vt, atol=2e-5)
        assert s[:-1].min() > 0.6
        assert s.max() < 1.3


def test_zero_matrix_stays_zero() -> None:
    """The update of a zero gradient is zero, not NaN."""
    assert not orthogonalize(torch.zeros(1, 5, 3), 5).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_update_equals_pytorch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Three steps equal torch.optim.Muon, up to the rounding of its bfloat16 iterations."""
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    reference = nn.Parameter(weight.detach().clone())
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9}
    group = {"params": [weight], "num_matrices": 1, "num_iterations": 5, "matmul_dtype": dtype}
    muon = Muon([group | options], {})
    pytorch = torch.optim.Muon([reference], adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        start = weight.detach().clone()
        weight.grad = torch.randn(shape, generator=generator)
        reference.grad = weight.grad.clone()
        muon.step()
        pytorch.step()  # type: ignore[no-untyped-call]
        buffer = pytorch.state[reference]["momentum_buffer"]
        assert torch.equal(muon.state[weight]["momentum_buffer"], buffer)
        difference = (weight - reference).norm() / (weight - start).norm()
        assert difference < 0.02
        reference.data.copy_(weight)


def test_update_of_stacked_matrices_equals_their_separate_updates() -> None:
    """Queries, keys and values in one weight are updated as three weights would be."""
    generator = torch.Generator().manual_seed(3)
    stacked = nn.Parameter(torch.randn(21, 7, generator=generator))
    stacked.grad = torch.randn(21, 7, generator=generator)
    parts = [nn.Parameter(part.clone()) for part in torch.split(stacked.detach(), 7)]
    for part, gradient in zip(parts, torch.split(stacked.grad, 7), strict=True):
        part.grad = gradient.clone()
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}
    options |= {"num_iterations": 5, "matmul_dtype": torch.float32}
    Muon([{"params": [stacked], "num_matrices": 3, **options}], {}).step()
    Muon([{"params": parts, "num_matrices": 1, **options}], {}).step()
    torch.testing.assert_close(stacked.detach(), torch.cat([part.detach() for part in parts]))


@pytest.mark.parametrize(("matmul_dtype", "changes"), [(None, False), (torch.bfloat16, True)])
def test_iterations_run_in_the_dtype_of_the_run(
    matmul_dtype: torch.dtype | None, changes: bool
) -> None:
    """The products of the optimizer are float32 by default, and bfloat16 in a bf16 run."""
    weights = []
    for dtype in (torch.float32, matmul_dtype or torch.float32):
        model = _build_model()
        optimizer = build_optimizer(model, MUON, dtype)
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        weights.append(model.get_parameter("bert.encoder.layers.0.up.weight"))
    assert torch.equal(*weights) != changes
    torch.testing.assert_close(*weights, atol=2e-3, rtol=0)


def test_step_is_skipped_on_the_device() -> None:
    """With found_inf = 1, a step with NaN gradients changes nothing; with 0, it is as usual.

    This holds for Muon and AdamW, whose momentum already exists from an earlier step.
    """
    generator = torch.Generator().manual_seed(6)
    model, reference = _build_model(), _build_model()
    optimizers = build_optimizer(model, MUON), build_optimizer(reference, MUON)

    def take_steps(factor: float) -> None:
        for optimizer, module in zip(optimizers, (model, reference), strict=True):
            state = generator.get_state()
            for parameter in module.parameters():
                parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
            if optimizer is optimizers[0]:
                skip_step_if(optimizer, torch.tensor(not math.isfinite(factor)))
                generator.set_state(state)
            if math.isfinite(factor) or optimizer is optimizers[0]:
                optimizer.step()

    for factor in (1.0, math.nan, 2.0):
        take_steps(factor)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        moments, expected_moments = optimizers[0].state[parameter], optimizers[1].state[expected]
        assert all(torch.equal(moments[name], expected_moments[name]) for name in moments)


def test_update_has_the_size_of_adamw() -> None:
    """The root mean square of an update is about 0.2 lr for square and rectangular matrices."""
    for shape in [(64, 64), (64, 256), (256, 64)]:
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        options = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.95, "matmul_dtype": torch.float32}
        Muon([{"params": [weight], "num_matrices": 1, "num_iterations": 5, **options}], {}).step()
        assert weight.square().mean().sqrt().item() == pytest.approx(0.1, rel=0.2)


def test_muon_updates_the_matrices_of_the_encoder_layers() -> None:
    """Each matrix of an encoder layer is in a group of Muon, all other parameters in AdamW's."""
    model = _build_model()
    optimizer = build_optimizer(model, MUON)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    expected = {
        f"bert.encoder.layers.{layer}.{name}.weight"
        for layer in range(model.config.layers)
        for name in ("attention.query_key_value", "attention.output", "up", "down")
    }
    assert {name for group in groups[2:] for name in group} == expected
    assert [group["num_matrices"] for group in optimizer.param_groups[2:]] == [3, 1]
    assert all(name.endswith("query_key_value.weight") for name in groups[2])
    assert sorted(name for group in groups for name in group) == sorted(names.values())


def test_other_parameters_take_the_steps_of_adamw() -> None:
    """With Muon, embeddings, biases, norms and heads are updated as with AdamW alone."""
    model, reference = _build_model(), _build_model()
    optimizer = build_optimizer(model, MUON)
    adamw = build_optimizer(reference, MUON.model_copy(update={"optimizer": "adamw"}))
    for step in range(3):
        _set_random_gradients(model, step)
        _set_random_gradients(reference, step)
        optimizer.step()
        adamw.step()
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    different = {
        name
        for (name, parameter), other in zip(
            model.named_parameters(), reference.parameters(), strict=True
        )
        if not torch.equal(parameter, other)
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert different == {
        names[parameter]
        for parameter, moments in iter_moment_names(optimizer)
        if moments == ("momentum_buffer",)
    }


def test_each_group_has_the_scheduled_learning_rate() -> None:
    """A step sets the learning rate of all groups; Muon's is multiplied by muon_lr_factor."""
    model = _build_model()
    optimizer = build_optimizer(model, MUON)

    def loss_fn(*_: Any) -> dict[str, torch.Tensor]:
        losses = [parameter.square().sum() for parameter in model.parameters()]
        return {"loss": torch.stack(losses).sum()}

    take_step(loss_fn, [None], model, optimizer, CPU, step=0, seed=0, lr=0.003, max_grad_norm=1.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.003, 0.003, 0.0045, 0.0045])


def test_clipping_the_gradient_scales_the_momentum() -> None:
    """The global gradient norm, which is clipped, includes the gradients of Muon's matrices."""
    model = _build_model()
    optimizer = build_optimizer(model, MUON)

    def loss_fn(*_: Any) -> dict[str, torch.Tensor]:
        return {"loss": torch.stack([parameter.sum() for parameter in model.parameters()]).sum()}

    take_step(loss_fn, [None], model, optimizer, CPU, step=0, seed=0, lr=0.01, max_grad_norm=0.5)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    weight = optimizer.param_groups[2]["params"][0]
    buffer = optimizer.state[weight]["momentum_buffer"]
    expected = 0.5 / math.sqrt(num_values) * (1 - MUON.muon_momentum)
    torch.testing.assert_close(buffer, torch.full_like(buffer, expected))


def test_frozen_matrices_are_not_updated() -> None:
    """With a frozen encoder, Muon has no parameters, and AdamW trains the BiLSTM."""
    features = BiLSTMSettings(layers="last", width=5, frozen=True)
    model = BertWithBiLSTM(make_prime_size_config(), 3, features, is_sequence_level=True)
    optimizer = build_optimizer(model, MUON)
    assert [len(group["params"]) for group in optimizer.param_groups[2:]] == [0, 0]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _set_random_gradients(model, 0)
    optimizer.step()
    changed = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, start[name])
    }
    assert changed == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
