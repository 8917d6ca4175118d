"""Bertsmith's tanh GELU equals PyTorch's, in value and gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.ops.activations import ACTIVATIONS, gelu_tanh

#: Inputs around 0, in the saturated range, and so large that x cubed is not exact in float32.
POINTS = torch.cat([torch.linspace(-12, 12, 4801), torch.logspace(1, 12, 45), torch.zeros(1)])


def pytorch_gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh form of GELU, computed by PyTorch."""
    return F.gelu(x, approximate="tanh")


def test_gelu_tanh_equals_pytorch() -> None:
    """Values and gradients agree for inputs up to 10^12 in magnitude, and none is NaN."""
    results = []
    # PyTorch runs in float64: in float32, its 1 + tanh(u) loses six digits if tanh(u) is near -1.
    for function, dtype in ((gelu_tanh, torch.float32), (pytorch_gelu_tanh, torch.float64)):
        x = torch.cat([POINTS, -POINTS]).to(dtype).requires_grad_()
        value = function(x)
        grad_output = torch.linspace(-2, 3, x.numel())
        gradient = torch.autograd.grad(value, x, grad_output.to(dtype))[0]
        results.append((value.detach().float(), gradient.float()))
    for actual, expected in zip(*results, strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_gelu_tanh_differs_from_the_erf_form() -> None:
    """The tanh and erf forms of GELU differ by more than rounding errors."""
    x = torch.linspace(-4, 4, 801)
    difference = (ACTIVATIONS["gelu_tanh"](x) - ACTIVATIONS["gelu"](x)).abs().max()
    assert 1e-4 < difference < 1e-3


def test_gelu_tanh_gradient_equals_finite_differences() -> None:
    """The explicit gradient equals finite differences in float64."""
    x = torch.linspace(-6, 6, 601, dtype=torch.float64)
    step = 1e-5
    expected = (pytorch_gelu_tanh(x + step) - pytorch_gelu_tanh(x - step)) / (2 * step)
    x32 = x.float().requires_grad_()
    (gradient,) = torch.autograd.grad(gelu_tanh(x32).sum(), x32)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


def test_gelu_tanh_does_not_change_its_input() -> None:
    """Neither the input nor the output's gradient is modified in place."""
    x = torch.linspace(-3, 3, 7, requires_grad=True)
    original = x.detach().clone()
    grad_output = torch.ones(7)
    value = gelu_tanh(x)
    torch.autograd.backward(value, grad_output)
    assert torch.equal(x.detach(), original)
    assert torch.equal(grad_output, torch.ones(7))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_preserve_bf16(name: str) -> None:
    """Each activation returns the dtype of its input."""
    assert ACTIVATIONS[name](torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
