"""The chunked cross-entropy equals PyTorch's, in value and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.ops import cross_entropy, linear
from bertsmith.model.ops.cross_entropy import linear_cross_entropy
from bertsmith.model.ops.linear import onednn_linear, round_up_num_rows

P, D, V = 29, 7, 53


@pytest.fixture
def inputs_and_labels() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x [P, D], weight [V, D], bias [V] and labels [P]."""
    torch.manual_seed(0)
    labels = torch.randint(V, (P,))
    return torch.randn(P, D), torch.randn(V, D), torch.randn(V), labels


def torch_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return PyTorch's cross-entropy, summed over the rows."""
    return F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")


# Chunks have one row, a number of rows that does not divide P, P - 1 rows, P rows, or more rows.
@pytest.mark.parametrize("chunk_rows", [0, 1, 3, 10, 28, 29, 1000])
@pytest.mark.parametrize("vocab_chunk", [1, 20, V, 2048])
@pytest.mark.parametrize("grad_output", [1.0, -0.37])
def test_chunked_loss_equals_pytorch(
    chunk_rows: int,
    vocab_chunk: int,
    grad_output: float,
    inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and gradients equal PyTorch's for all chunk sizes and upstream gradients."""
    monkeypatch.setattr(cross_entropy, "MAX_CHUNK_LOGITS", max(1, chunk_rows * V))
    monkeypatch.setattr(cross_entropy, "VOCAB_CHUNK", vocab_chunk)
    *inputs, labels = inputs_and_labels
    actual_values: list[Tensor] = []
    expected_values: list[Tensor] = []
    for function, values in (
        (linear_cross_entropy, actual_values),
        (torch_cross_entropy, expected_values),
    ):
        leaves = [value.clone().requires_grad_() for value in inputs]
        loss = function(leaves[0], leaves[1], leaves[2], labels)
        values += [loss.detach(), *torch.autograd.grad(loss * grad_output, leaves)]
    for actual, expected in zip(actual_values, expected_values, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trainable", [(0,), (1,), (2,), (0, 2), ()])
def test_frozen_inputs_get_no_gradient(
    trainable: tuple[int, ...], inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Only inputs with requires_grad get a gradient, and the gradient equals PyTorch's."""
    *inputs, labels = inputs_and_labels
    gradients = []
    for function in (linear_cross_entropy, torch_cross_entropy):
        leaves = [
            value.clone().requires_grad_(index in trainable) for index, value in enumerate(inputs)
        ]
        loss = function(leaves[0], leaves[1], leaves[2], labels)
        if not trainable:
            assert not loss.requires_grad
            return
        torch.autograd.backward(loss)
        assert [leaf.grad is not None for leaf in leaves] == [n in trainable for n in range(3)]
        gradients.append([leaves[index].grad for index in trainable])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this PyTorch cannot call oneDNN for float32",
)
@pytest.mark.parametrize("chunk_rows", [1, 10, 29, 1000])
def test_onednn_gives_the_same_loss(
    chunk_rows: int,
    inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With oneDNN, rows are padded without changing loss or gradients."""
    monkeypatch.setattr(cross_entropy, "MAX_CHUNK_LOGITS", chunk_rows * V)
    monkeypatch.setattr(cross_entropy, "VOCAB_CHUNK", 20)
    monkeypatch.setattr(cross_entropy, "uses_onednn", lambda *_: True)
    shapes = set()

    def record_and_apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.add(x.shape)
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(cross_entropy, "onednn_linear", record_and_apply_linear)
    *inputs, labels = inputs_and_labels
    results = []
    for function in (linear_cross_entropy, torch_cross_entropy):
        leaves = [value.clone().requires_grad_() for value in inputs]
        loss = function(leaves[0], leaves[1], leaves[2], labels)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    rows = round_up_num_rows(min(chunk_rows, P))
    assert {(rows, D), (rows, 20), (20, rows), (rows, V % 20), (V % 20, rows)} <= shapes
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_bf16_rows_are_padded(
    inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, rows are padded; loss and gradients equal those of float32 up to rounding."""
    *inputs, labels = inputs_and_labels
    shapes = set()
    original_linear = F.linear

    def record_and_apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.bfloat16:
            shapes.add((*x.shape, weight.shape[0]))
        return original_linear(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", record_and_apply_linear)
    results = []
    for use_autocast in (True, False):
        leaves = [value.clone().requires_grad_() for value in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=use_autocast):
            loss = linear_cross_entropy(leaves[0], leaves[1], leaves[2], labels)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    rows = round_up_num_rows(P)
    assert shapes == {(rows, D, V), (rows, V, D), (V, rows, D)}
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() < 0.01 * expected.norm()


def test_bf16_loss_is_not_negative() -> None:
    """In bf16, losses of confident predictions are not negative, and their sum is nearly exact."""
    torch.manual_seed(1)
    weight = torch.randn(400, 128)
    labels = torch.arange(400)
    x = weight * 0.2
    bias = torch.zeros(400)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [
            linear_cross_entropy(x[row : row + 1], weight, bias, labels[row : row + 1])
            for row in range(400)
        ]
    assert min(losses) >= 0.0
    exact = float(torch_cross_entropy(x, weight, bias, labels))
    assert abs(float(sum(losses)) - exact) < 0.1 * exact + 0.01


def test_float64_ignores_autocast() -> None:
    """Autocast does not change float64; mixed dtypes without autocast raise PyTorch's error."""
    x, weight, bias = torch.randn(P, D).double(), torch.randn(V, D).double(), torch.randn(V)
    labels = torch.randint(V, (P,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, bias.double(), labels)
    expected = F.cross_entropy(F.linear(x, weight, bias.double()), labels, reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="dtype"):
        linear_cross_entropy(x.bfloat16(), weight.float(), bias, labels)


def test_padded_vocabulary_gives_the_same_loss(
    inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without chunks, tokens are added to the vocabulary; label -100 ignores a row."""
    *inputs, labels = inputs_and_labels
    labels[3] = -100
    num_logits: list[int] = []

    def record_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        num_logits.append(len(weight))
        return x @ weight.t() + bias

    results = []
    for function in (linear_cross_entropy, torch_cross_entropy):
        leaves = [value.double().requires_grad_() for value in inputs]
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", record_logits)
            loss = function(leaves[0], leaves[1], leaves[2], labels)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results)
    assert num_logits == [64, V]


def test_bias_need_not_be_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided and expanded biases give the correct loss."""
    monkeypatch.setattr(
        linear, "has_slow_mkl", lambda: hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 1)
    x = torch.randn(P, D)
    weight = torch.randn(V, D)
    labels = torch.randint(V, (P,))
    for bias in (torch.randn(2 * V)[::2], torch.randn(1).expand(V)):
        loss = linear_cross_entropy(x, weight, bias, labels)
        torch.testing.assert_close(loss, torch_cross_entropy(x, weight, bias, labels))


def slice_rows_and_columns(base: Tensor) -> Tensor:
    """Return a strided view [P, D]."""
    return base[3 : P + 3, 2 : D + 2]


def slice_with_offset(base: Tensor) -> Tensor:
    """Return a contiguous view [P, D] that starts in the middle of a row."""
    return base.flatten()[5 : 5 + P * D].view(P, D)


def test_input_may_be_a_view(inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Views of a larger tensor, with any offset and stride, get correct gradients."""
    x, weight, bias, labels = inputs_and_labels
    for make_view in (slice_rows_and_columns, slice_with_offset):
        gradients: list[Tensor] = []
        for function in (linear_cross_entropy, torch_cross_entropy):
            base = torch.zeros(P + 5, D + 4)
            make_view(base).copy_(x)
            base.requires_grad_()
            gradients += torch.autograd.grad(function(make_view(base), weight, bias, labels), base)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)


def test_loss_without_predictions_is_zero() -> None:
    """With P = 0 the loss and all gradients are 0."""
    inputs = [torch.zeros(0, D), torch.randn(V, D), torch.randn(V)]
    x, weight, bias = (value.requires_grad_() for value in inputs)
    loss = linear_cross_entropy(x, weight, bias, torch.zeros(0, dtype=torch.int64))
    assert float(loss.detach()) == 0.0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, inputs))


def test_large_logits_do_not_overflow() -> None:
    """Logits of several thousand give a finite loss and gradient."""
    x = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [3.0]])
    loss = linear_cross_entropy(x, weight, torch.zeros(3), torch.tensor([0, 2]))
    expected = torch_cross_entropy(x, weight, torch.zeros(3), torch.tensor([0, 2]))
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x)[0])


def test_loss_under_autocast_is_float32(
    inputs_and_labels: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Under autocast the loss is summed in float32 and is close to the exact value."""
    x, weight, bias, labels = inputs_and_labels
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, bias, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, torch_cross_entropy(x, weight, bias, labels), rtol=2e-2, atol=0
    )
