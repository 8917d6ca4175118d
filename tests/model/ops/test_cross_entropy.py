"""The chunked cross-entropy against PyTorch's own, values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.ops import cross_entropy, linear
from bertsmith.model.ops.cross_entropy import linear_cross_entropy
from bertsmith.model.ops.linear import bucket_rows, onednn_linear

P, D, V = 29, 7, 53


@pytest.fixture
def terms() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x [P, D], weight [V, D], bias [V] and labels [P]."""
    torch.manual_seed(0)
    labels = torch.randint(V, (P,))
    return torch.randn(P, D), torch.randn(V, D), torch.randn(V), labels


def plain(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the same sum in one piece."""
    return F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")


# One row a piece, a few, a number that does not divide P, all but one, exactly P, and more.
@pytest.mark.parametrize("rows", [0, 1, 3, 10, 28, 29, 1000])
@pytest.mark.parametrize("words", [1, 20, V, 2048])
@pytest.mark.parametrize("upstream", [1.0, -0.37])
def test_equals_the_plain_loss(
    rows: int,
    words: int,
    upstream: float,
    terms: tuple[Tensor, Tensor, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Value and gradients agree for every size of piece and part, and any gradient from above."""
    monkeypatch.setattr(cross_entropy, "MAX_CHUNK_LOGITS", max(1, rows * V))
    monkeypatch.setattr(cross_entropy, "VOCAB_CHUNK", words)
    *inputs, labels = terms
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for function, results in ((linear_cross_entropy, found), (plain, expected)):
        own = [value.clone().requires_grad_() for value in inputs]
        value = function(own[0], own[1], own[2], labels)
        results += [value.detach(), *torch.autograd.grad(value * upstream, own)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), ()])
def test_only_some_need_a_gradient(
    wanted: tuple[int, ...], terms: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Frozen weights get no gradient, and the others theirs."""
    *inputs, labels = terms
    slopes = []
    for function in (linear_cross_entropy, plain):
        own = [value.clone().requires_grad_(place in wanted) for place, value in enumerate(inputs)]
        value = function(own[0], own[1], own[2], labels)
        if not wanted:
            assert not value.requires_grad
            return
        torch.autograd.backward(value)
        assert [value.grad is not None for value in own] == [n in wanted for n in range(3)]
        slopes.append([own[place].grad for place in wanted])
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch's oneDNN has no way in"
)
@pytest.mark.parametrize("rows", [1, 10, 29, 1000])
def test_by_onednn_it_is_the_same(
    rows: int, terms: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where oneDNN multiplies float32, rows are filled up and count for nothing."""
    monkeypatch.setattr(cross_entropy, "MAX_CHUNK_LOGITS", rows * V)
    monkeypatch.setattr(cross_entropy, "VOCAB_CHUNK", 20)
    monkeypatch.setattr(cross_entropy, "taken", lambda *_: True)
    shapes = set()

    def told(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.add(x.shape)
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(cross_entropy, "product", told)
    *inputs, labels = terms
    results = []
    for function in (linear_cross_entropy, plain):
        own = [value.clone().requires_grad_() for value in inputs]
        value = function(own[0], own[1], own[2], labels)
        results.append([value.detach(), *torch.autograd.grad(value, own)])
    even = bucket_rows(min(rows, P))
    assert {(even, D), (even, 20), (20, even), (even, V % 20), (V % 20, even)} <= shapes
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_in_bf16_what_fills_up_counts_for_nothing(
    terms: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are filled up; loss and gradients are float32's up to rounding."""
    *inputs, labels = terms
    shapes = set()
    multiply = F.linear

    def told(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.add((*x.shape, weight.shape[0]) if x.dtype == torch.bfloat16 else None)
        return multiply(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", told)
    results = []
    for enabled in (True, False):
        own = [value.clone().requires_grad_() for value in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = linear_cross_entropy(own[0], own[1], own[2], labels)
        results.append([value.detach(), *torch.autograd.grad(value, own)])
    assert shapes == {(32, D, V), (32, V, D), (V, 32, D), None}
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_in_bf16_no_loss_is_below_zero() -> None:
    """The label's logit is rounded as all are, so that the sum of sure answers is near 0."""
    torch.manual_seed(1)
    weight, labels = torch.randn(400, 128), torch.arange(400)
    x = weight * 0.2
    bias = torch.zeros(400)
    with torch.autocast("cpu", torch.bfloat16):
        each = [linear_cross_entropy(x[n : n + 1], weight, bias, labels[n : n + 1])
                for n in range(400)]  # fmt: skip
    assert min(each) >= 0.0
    exact = float(plain(x, weight, bias, labels))
    assert abs(float(sum(each)) - exact) < 0.1 * exact + 0.01


def test_double_stays_double() -> None:
    """Autocast leaves float64 alone, and unlike dtypes without it are PyTorch's error."""
    x, weight, bias = torch.randn(P, D).double(), torch.randn(V, D).double(), torch.randn(V)
    labels = torch.randint(V, (P,))
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, weight, bias.double(), labels)
    exact = F.cross_entropy(F.linear(x, weight, bias.double()), labels, reduction="sum")
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="dtype"):
        linear_cross_entropy(x.bfloat16(), weight.float(), bias, labels)


def test_bias_that_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second number of a larger one, and one number all over."""
    monkeypatch.setattr(
        linear, "has_slow_mkl", lambda: hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 1)
    x, weight, labels = torch.randn(P, D), torch.randn(V, D), torch.randint(V, (P,))
    for bias in (torch.randn(2 * V)[::2], torch.randn(1).expand(V)):
        found = linear_cross_entropy(x, weight, bias, labels)
        torch.testing.assert_close(found, plain(x, weight, bias, labels))


def strided(base: Tensor) -> Tensor:
    """Cut [P, D] out of the middle."""
    return base[3 : P + 3, 2 : D + 2]


def shifted(base: Tensor) -> Tensor:
    """Cut [P, D] from a place in the memory that begins no row."""
    return base.flatten()[5 : 5 + P * D].view(P, D)


def test_rows_that_are_a_view(terms: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Rows cut out of a larger tensor, at any place and stride, give the same gradients."""
    x, weight, bias, labels = terms
    for cut in (strided, shifted):
        slopes: list[Tensor] = []
        for function in (linear_cross_entropy, plain):
            base = torch.zeros(P + 5, D + 4)
            cut(base).copy_(x)
            base.requires_grad_()
            slopes += torch.autograd.grad(function(cut(base), weight, bias, labels), base)
        torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-5, atol=1e-5)


def test_no_prediction_is_no_loss() -> None:
    """With P = 0 the sum is 0, and so are all gradients."""
    inputs = [torch.zeros(0, D), torch.randn(V, D), torch.randn(V)]
    x, weight, bias = (value.requires_grad_() for value in inputs)
    value = linear_cross_entropy(x, weight, bias, torch.zeros(0, dtype=torch.int64))
    assert float(value.detach()) == 0.0
    assert all(not slope.any() for slope in torch.autograd.grad(value, inputs))


def test_large_logits_stay_finite() -> None:
    """Logits of thousands overflow neither value nor gradient."""
    x = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [3.0]])
    value = linear_cross_entropy(x, weight, torch.zeros(3), torch.tensor([0, 2]))
    expected = plain(x, weight, torch.zeros(3), torch.tensor([0, 2]))
    torch.testing.assert_close(value, expected)
    (slope,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, x)[0])


def test_in_16_bits_the_sum_is_float32(terms: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Under autocast the loss is summed in float32, near the exact one."""
    x, weight, bias, labels = terms
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, weight, bias, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain(x, weight, bias, labels), rtol=2e-2, atol=0)
