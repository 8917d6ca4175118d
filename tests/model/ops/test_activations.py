"""The tanh form of GELU, written out by hand, against PyTorch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.ops.activations import ACTIVATIONS, gelu_tanh

#: Where it bends, where it is flat, where x cubed leaves float32's exact range.
POINTS = torch.cat([torch.linspace(-12, 12, 4801), torch.logspace(1, 12, 45), torch.zeros(1)])


def pytorch(x: Tensor) -> Tensor:
    """Return PyTorch's own tanh form."""
    return F.gelu(x, approximate="tanh")


def test_gelu_tanh_equals_pytorch() -> None:
    """Value and slope agree from 0 to 10^12, both signs, and none is NaN."""
    results = []
    # In float64: PyTorch's 1 + tanh u loses six digits in float32 where tanh u is near -1.
    for function, kind in ((gelu_tanh, torch.float32), (pytorch, torch.float64)):
        x = torch.cat([POINTS, -POINTS]).to(kind).requires_grad_()
        value = function(x)
        upstream = torch.linspace(-2, 3, x.numel())
        slope = torch.autograd.grad(value, x, upstream.to(kind))[0]
        results.append((value.detach().float(), slope.float()))
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gelu_tanh_is_not_the_erf_form() -> None:
    """The two forms differ by more than rounding, so the names cannot be mistaken unseen."""
    x = torch.linspace(-4, 4, 801)
    apart = (ACTIVATIONS["gelu_tanh"](x) - ACTIVATIONS["gelu"](x)).abs().max()
    assert 1e-4 < apart < 1e-3


def test_gelu_tanh_has_the_slope_of_its_value() -> None:
    """The slope written out by hand is that of the value, by differences in float64."""
    x = torch.linspace(-6, 6, 601, dtype=torch.float64)
    step = 1e-5
    expected = (F.gelu(x + step, approximate="tanh") - F.gelu(x - step, approximate="tanh")) / (
        2 * step
    )
    own = x.float().requires_grad_()
    (slope,) = torch.autograd.grad(gelu_tanh(own).sum(), own)
    torch.testing.assert_close(slope.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_input_is_left_as_it_was() -> None:
    """Nothing is worked out in place of the input or of the gradient from above."""
    x = torch.linspace(-3, 3, 7, requires_grad=True)
    before, upstream = x.detach().clone(), torch.ones(7)
    value = gelu_tanh(x)
    torch.autograd.backward(value, upstream)
    assert torch.equal(x.detach(), before)
    assert torch.equal(upstream, torch.ones(7))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_16_bits_are_kept(name: str) -> None:
    """Each activation returns the type that it was given."""
    assert ACTIVATIONS[name](torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
