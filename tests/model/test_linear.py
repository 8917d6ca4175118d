"""nn.Linear by oneDNN: the textbook's numbers and gradients, and really asked where it is to be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.model import linear, loss
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.cpu import has_slow_mkl
from bertsmith.model.linear import Linear
from tests.model.examples import example, primes, shaken

ZEN4 = {"cpu_name": "AMD EPYC 9354", "avx512_f": True}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take this CPU for one whose MKL is slow; fills with the shapes that oneDNN was given."""
    shapes: list[tuple[int, ...]] = []
    multiply = linear.product

    def told(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, weight.shape[0]))
        return multiply(x, weight, bias)

    monkeypatch.setattr(linear, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(linear, "LEAST", 1)
    for module in (linear, loss):
        monkeypatch.setattr(module, "product", told)
    return shapes


@pytest.mark.parametrize("rows", [1, 2, 13, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 11), (64, 48), (1, 1), (384, 5)])
def test_numbers_and_gradients(
    rows: int, inputs: int, outputs: int, asked: list[tuple[int, ...]]
) -> None:
    """All three products are oneDNN's, and agree with float64."""
    torch.manual_seed(0)
    ours, exact = Linear(inputs, outputs), nn.Linear(inputs, outputs, dtype=torch.float64)
    exact.load_state_dict(ours.state_dict())
    # Every second row of a larger one, and a gradient that is one number all over: no plain memory.
    x = torch.randn(2 * rows, inputs)[::2].requires_grad_()
    far = x.detach().double().requires_grad_()
    found, expected = ours(x), exact(far)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    found.sum().backward()
    expected.sum().backward()
    for one, other in ((x, far), (ours.weight, exact.weight), (ours.bias, exact.bias)):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-5, atol=1e-4)
    assert asked == [
        (rows, inputs, outputs), (rows, outputs, inputs), (outputs, rows, inputs),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 300])
def test_in_use_rows_come_in_sixteens(rows: int, asked: list[tuple[int, ...]]) -> None:
    """So that there are few numbers of rows to prepare for; nobody sees those on top."""
    own, x = Linear(9, 5), torch.randn(rows, 9)
    with torch.inference_mode():
        found = own(x)
    torch.testing.assert_close(found, own(x).detach(), rtol=1e-5, atol=1e-6)
    assert asked == [(-(-rows // 16) * 16, 9, 5), (rows, 9, 5)]


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_what_is_frozen_is_not_multiplied(frozen: str, asked: list[tuple[int, ...]]) -> None:
    """It gets no gradient, and costs none."""
    own, x = Linear(5, 3), torch.randn(4, 5, requires_grad=True)
    parts = {"weight": own.weight, "bias": own.bias, "x": x}
    parts[frozen].requires_grad_(False)
    own(x).sum().backward()
    assert {name for name, part in parts.items() if part.grad is None} == {frozen}
    assert len(asked) == (3 if frozen == "bias" else 2)


def test_a_step_of_the_model_is_the_same(asked: list[tuple[int, ...]]) -> None:
    """Loss and all gradients of a pre-training step, with dropout off, by either library."""
    config = primes(dropout=0.0, attention_dropout=0.0)
    own, batch = shaken(PreTrainingModel(config)), example(config)

    def step() -> list[Tensor]:
        own.zero_grad(set_to_none=True)
        losses = own(*batch.arguments)
        masked, following = losses.masked, losses.next_sentence
        (masked + following).backward()
        grads = [weight.grad for weight in own.parameters() if weight.grad is not None]
        return [masked.detach(), following.detach(), *grads]

    by_onednn = step()
    # Two layers of four, the head's transform, and the loss: three products each.
    assert len(asked) == 3 * (2 * 4 + 1 + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "has_slow_mkl", lambda: False)
        by_mkl = step()
    assert len(asked) == 3 * (2 * 4 + 1 + 1)
    for one, other in zip(by_onednn, by_mkl, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_small_products_stay(asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is to be gained, nothing is prepared."""
    monkeypatch.setattr(linear, "LEAST", 2 * 6 * 4)
    own = Linear(6, 4)
    own(torch.randn(1, 6))
    assert asked == []
    own(torch.randn(2, 6))
    assert asked == [(2, 6, 4)]


def test_only_float32_on_the_cpu_goes_there(asked: list[tuple[int, ...]]) -> None:
    """Other dtypes, autocast, compiled graphs, no rows and more axes stay with PyTorch."""
    own = Linear(6, 4)
    assert own(torch.randn(2, 3, 6)).shape == (2, 3, 4)
    assert own(torch.randn(0, 6)).shape == (0, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert own(torch.randn(2, 6)).dtype == torch.bfloat16
    assert Linear(6, 4).double()(torch.randn(2, 6, dtype=torch.float64)).dtype == torch.float64
    with pytest.MonkeyPatch.context() as patch:
        # The question itself, which a graph could not hold.
        patch.setattr(linear, "has_slow_mkl", has_slow_mkl)
        compiled: Any = torch.compile(own, backend="eager", fullgraph=True)
        assert compiled(torch.randn(2, 6)).shape == (2, 4)
    assert asked == []


@pytest.mark.parametrize(
    ("facts", "slow"),
    [
        (ZEN4, True),
        (ZEN4 | {"avx512_f": False}, False),
        (ZEN4 | {"cpu_name": "Intel(R) Xeon(R) Gold 6430"}, False),
        ({}, False),
    ],
)
def test_whose_mkl_is_slow(
    facts: dict[str, Any], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's with AVX-512, and nobody else's."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: facts)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    has_slow_mkl.cache_clear()
    try:
        assert has_slow_mkl() is slow
    finally:
        has_slow_mkl.cache_clear()
