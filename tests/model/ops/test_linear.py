"""nn.Linear by oneDNN: the textbook's numbers and gradients, and really asked where it is to be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops import linear
from bertsmith.model.ops.cpu import has_slow_mkl
from bertsmith.model.ops.linear import Linear, bucket_rows
from tests.model.examples import prime_config, random_batch, randomize_weights

ONEDNN = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch's oneDNN has no way in"
)
ZEN4 = {"cpu_name": "AMD EPYC 9354", "avx512_f": True}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take this CPU for one whose MKL is slow; fills with the shapes that oneDNN was given."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch's oneDNN has no way in")
    shapes: list[tuple[int, ...]] = []
    multiply = linear.onednn_linear

    def told(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, weight.shape[0]))
        return multiply(x, weight, bias)

    monkeypatch.setattr(linear, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 1)
    monkeypatch.setattr(linear, "onednn_linear", told)
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
    even = bucket_rows(rows)
    assert asked == [
        (even, inputs, outputs), (even, outputs, inputs), (outputs, even, inputs),
    ]  # fmt: skip


def test_few_numbers_of_rows_are_prepared(asked: list[tuple[int, ...]]) -> None:
    """Eight an octave, whatever a batch holds, in use and in training: each is kept for good."""
    own = Linear(9, 5)
    for rows in range(1, 1025):
        x = torch.randn(rows, 9)
        found = own(x)
        found.sum().backward()
        with torch.inference_mode():
            assert torch.equal(own(x), found)
    assert len(set(asked)) == 2 * (8 + 3 * 8)
    assert {shape[0] for shape in asked if shape[1] == 9} == {
        bucket_rows(rows) for rows in range(1, 1025)
    }


def test_rows_of_bf16_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers of them, by autocast or in bf16 itself, and the same outputs and gradients."""
    multiplied: list[int] = []
    plain = nn.Linear.forward

    def told(self: nn.Linear, x: Tensor) -> Tensor:
        multiplied.append(x.shape[0])
        return plain(self, x)

    monkeypatch.setattr(nn.Linear, "forward", told)
    torch.manual_seed(0)
    own = Linear(9, 5)
    half = Linear(9, 5).bfloat16()
    half.load_state_dict(own.state_dict())
    for rows in (*range(1, 40), 1000):
        x = torch.randn(rows, 9, requires_grad=True)
        slope = torch.randn(rows, 5).bfloat16()
        weights = [x, *own.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            found = [own(x)]
            expected = [plain(own, x)]
        torch.testing.assert_close(half(x.bfloat16()), found[0])
        found += torch.autograd.grad(found[0], weights, slope)
        expected += torch.autograd.grad(expected[0], weights, slope)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert set(multiplied) == {16, 32, 48, bucket_rows(1000)}
    assert own(torch.randn(3, 9)).shape == (3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert own(torch.randn(0, 9)).shape == (0, 5)
        assert own(torch.randn(2, 3, 9)).shape == (2, 3, 5)
    assert multiplied[-3:] == [3, 0, 2], "float32, no rows and more axes stay as they are"


def test_memory_that_is_not_plain(asked: list[tuple[int, ...]]) -> None:
    """Columns and rows of something larger, and one number all over, as x and as bias."""
    weight = torch.randn(6, 40)
    texts = {"columns": torch.randn(50, 80)[:, ::2], "transposed": torch.randn(40, 50).t(),
             "one row": torch.randn(1, 40).expand(50, 40)}  # fmt: skip
    biases = {"strided": torch.randn(6, 2)[:, 0], "one": torch.randn(1).expand(6), "none": None}
    for x in texts.values():
        for bias in biases.values():
            found: Tensor = linear._Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
            expected = nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert len(asked) == 9


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
    config = prime_config(dropout=0.0, attention_dropout=0.0)
    own, batch = randomize_weights(BertForPreTraining(config)), random_batch(config)

    def step() -> list[Tensor]:
        own.zero_grad(set_to_none=True)
        losses = own(*batch.arguments)
        masked, following = losses.masked, losses.next_sentence
        (masked + following).backward()
        grads = [weight.grad for weight in own.parameters() if weight.grad is not None]
        return [masked.detach(), following.detach(), *grads]

    by_onednn = step()
    # Two layers of four, and the head's transform: three products each.
    assert len(asked) == 3 * (2 * 4 + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "has_slow_mkl", lambda: False)
        by_mkl = step()
    assert len(asked) == 3 * (2 * 4 + 1)
    for one, other in zip(by_onednn, by_mkl, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_small_products_stay(asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is to be gained, nothing is prepared."""
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 2 * 6 * 4)
    own = Linear(6, 4)
    own(torch.randn(1, 6))
    assert asked == []
    own(torch.randn(2, 6))
    assert asked == [(16, 6, 4)]


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
        pytest.param(ZEN4, True, marks=ONEDNN),
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


def test_without_a_way_in_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of PyTorch without oneDNN, or with another name for it, keep to MKL."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN4)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    has_slow_mkl.cache_clear()
    try:
        assert not has_slow_mkl()
    finally:
        has_slow_mkl.cache_clear()
