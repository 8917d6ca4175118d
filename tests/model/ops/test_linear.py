"""Linear layers: outputs and gradients computed by oneDNN, and the conditions for using oneDNN."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops import linear
from bertsmith.model.ops.cpu import has_onednn_bf16, has_onednn_linear, has_slow_mkl
from bertsmith.model.ops.linear import Linear, round_up_num_rows
from tests.model.examples import draw_batch, make_prime_size_config, randomize_weights

NEEDS_ONEDNN = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this PyTorch cannot call oneDNN for float32",
)
NEEDS_ONEDNN_BF16 = pytest.mark.skipif(
    not has_onednn_bf16(), reason="oneDNN has no bf16 linear layer on this CPU (no AVX-512)"
)
ZEN4 = {"cpu_name": "AMD EPYC 9354", "avx512_f": True}


@pytest.fixture
def onednn_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Use oneDNN for all float32 products, and record their shapes in the returned list."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch cannot call oneDNN for float32")
    shapes: list[tuple[int, ...]] = []
    onednn_linear = linear.onednn_linear

    def record_and_apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, weight.shape[0]))
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(linear, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 1)
    monkeypatch.setattr(linear, "onednn_linear", record_and_apply_linear)
    return shapes


@pytest.mark.parametrize("num_rows", [1, 2, 13, 300])
@pytest.mark.parametrize(("in_features", "out_features"), [(7, 11), (64, 48), (1, 1), (384, 5)])
def test_outputs_and_gradients_equal_float64(
    num_rows: int, in_features: int, out_features: int, onednn_shapes: list[tuple[int, ...]]
) -> None:
    """Outputs and gradients are computed by oneDNN and agree with float64."""
    torch.manual_seed(0)
    layer = Linear(in_features, out_features)
    exact_layer = nn.Linear(in_features, out_features, dtype=torch.float64)
    exact_layer.load_state_dict(layer.state_dict())
    # The input has every second row of a tensor, and the gradient of the output is expanded. So
    # neither tensor is contiguous.
    x = torch.randn(2 * num_rows, in_features)[::2].requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    output, expected = layer(x), exact_layer(exact_x)
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-5)
    output.sum().backward()
    expected.sum().backward()
    for leaf, exact_leaf in (
        (x, exact_x),
        (layer.weight, exact_layer.weight),
        (layer.bias, exact_layer.bias),
    ):
        assert leaf.grad is not None
        assert exact_leaf.grad is not None
        torch.testing.assert_close(leaf.grad, exact_leaf.grad.float(), rtol=1e-5, atol=1e-4)
    rows = round_up_num_rows(num_rows)
    assert onednn_shapes == [
        (rows, in_features, out_features),
        (rows, out_features, in_features),
        (out_features, rows, in_features),
    ]


def test_row_counts_are_bucketed(onednn_shapes: list[tuple[int, ...]]) -> None:
    """Rows are padded to eight sizes per power of two, because oneDNN caches code per size."""
    layer = Linear(9, 5)
    for num_rows in range(1, 1025):
        x = torch.randn(num_rows, 9)
        output = layer(x)
        output.sum().backward()
        with torch.inference_mode():
            assert torch.equal(layer(x), output)
    # Up to 128 rows there are 8 sizes, and 8 more per power of two. Each size has two products: the
    # output and the gradient of the weight.
    assert len(set(onednn_shapes)) == 2 * (8 + 3 * 8)
    assert {shape[0] for shape in onednn_shapes if shape[1] == 9} == {
        round_up_num_rows(num_rows) for num_rows in range(1, 1025)
    }


@pytest.mark.parametrize("has_onednn", [pytest.param(True, marks=NEEDS_ONEDNN_BF16), False])
def test_bf16_row_counts_are_bucketed(has_onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded under autocast and in bf16, with the same outputs and gradients."""
    row_counts: list[int] = []
    original_forward, onednn_linear = nn.Linear.forward, linear.onednn_linear

    def record_and_apply_forward(self: nn.Linear, x: Tensor) -> Tensor:
        row_counts.append(x.shape[0])
        return original_forward(self, x)

    def record_and_apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        row_counts.append(x.shape[0])
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(linear, "has_onednn_bf16", lambda: has_onednn)
    monkeypatch.setattr(nn.Linear, "forward", record_and_apply_forward)
    monkeypatch.setattr(linear, "onednn_linear", record_and_apply_linear)
    torch.manual_seed(0)
    layer = Linear(9, 5)
    bf16_layer = Linear(9, 5).bfloat16()
    bf16_layer.load_state_dict(layer.state_dict())
    for num_rows in (*range(1, 40), 1000):
        x = torch.randn(num_rows, 9, requires_grad=True)
        grad_output = torch.randn(num_rows, 5).bfloat16()
        leaves = [x, *layer.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            values = [layer(x)]
            expected_values = [original_forward(layer, x)]
        torch.testing.assert_close(bf16_layer(x.bfloat16()), values[0])
        values += torch.autograd.grad(values[0], leaves, grad_output)
        expected_values += torch.autograd.grad(expected_values[0], leaves, grad_output)
        for value, expected in zip(values, expected_values, strict=True):
            torch.testing.assert_close(value, expected, rtol=0.02, atol=0.02)
    assert set(row_counts) == {16, 32, 48, round_up_num_rows(1000)}
    assert layer(torch.randn(3, 9)).shape == (3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(0, 9)).shape == (0, 5)
        assert layer(torch.randn(2, 3, 9)).shape == (2, 3, 5)
    assert row_counts[-3:] == [3, 0, 2], "float32, empty and 3-d inputs are not padded"


def test_inputs_need_not_be_contiguous(onednn_shapes: list[tuple[int, ...]]) -> None:
    """Strided, transposed and expanded inputs and biases give the correct output."""
    weight = torch.randn(6, 40)
    inputs = {
        "columns": torch.randn(50, 80)[:, ::2],
        "transposed": torch.randn(40, 50).t(),
        "expanded": torch.randn(1, 40).expand(50, 40),
    }
    biases = {
        "strided": torch.randn(6, 2)[:, 0],
        "expanded": torch.randn(1).expand(6),
        "none": None,
    }
    for x in inputs.values():
        for bias in biases.values():
            output: Tensor = linear._OneDnnLinear.apply(x, weight, bias, torch.float32)  # type: ignore[no-untyped-call]
            expected = nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)
    assert len(onednn_shapes) == 9


@pytest.mark.parametrize("frozen_name", ["weight", "bias", "x"])
def test_no_gradient_is_computed_for_frozen_tensors(
    frozen_name: str, onednn_shapes: list[tuple[int, ...]]
) -> None:
    """A frozen tensor gets no gradient, and its matrix product is skipped."""
    layer = Linear(5, 3)
    x = torch.randn(4, 5, requires_grad=True)
    leaves = {"weight": layer.weight, "bias": layer.bias, "x": x}
    leaves[frozen_name].requires_grad_(False)
    layer(x).sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is None} == {frozen_name}
    # The output, the gradient of x and the gradient of the weight are matrix products.
    assert len(onednn_shapes) == (3 if frozen_name == "bias" else 2)


def test_pre_training_step_is_the_same_with_both_libraries(
    onednn_shapes: list[tuple[int, ...]],
) -> None:
    """Losses and gradients of a pre-training step agree between oneDNN and MKL."""
    config = make_prime_size_config(dropout=0.0, attention_dropout=0.0)
    model = randomize_weights(BertForPreTraining(config))
    batch = draw_batch(config)

    def compute_losses_and_gradients() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        losses = model(*batch.arguments)
        mlm_loss, nsp_loss = losses.mlm_loss, losses.nsp_loss
        (mlm_loss + nsp_loss).backward()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return [mlm_loss.detach(), nsp_loss.detach(), *grads]

    onednn_values = compute_losses_and_gradients()
    # The four linear layers of each of two encoder layers and the MLM transform have three matrix
    # products each: the output and two gradients.
    assert len(onednn_shapes) == 3 * (2 * 4 + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "has_slow_mkl", lambda: False)
        mkl_values = compute_losses_and_gradients()
    assert len(onednn_shapes) == 3 * (2 * 4 + 1)
    for onednn_value, mkl_value in zip(onednn_values, mkl_values, strict=True):
        torch.testing.assert_close(onednn_value, mkl_value, rtol=1e-4, atol=1e-6)


def test_small_products_use_mkl(
    onednn_shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only products with at least ``ONEDNN_MIN_MACS`` multiply-adds use oneDNN."""
    monkeypatch.setattr(linear, "ONEDNN_MIN_MACS", 2 * 6 * 4)
    layer = Linear(6, 4)
    layer(torch.randn(1, 6))
    assert onednn_shapes == []
    layer(torch.randn(2, 6))
    assert onednn_shapes == [(16, 6, 4)]


def test_only_eager_float32_and_bf16_use_onednn(onednn_shapes: list[tuple[int, ...]]) -> None:
    """Float64, compiled graphs, and empty or 3-d inputs use PyTorch's default."""
    layer = Linear(6, 4)
    assert layer(torch.randn(2, 3, 6)).shape == (2, 3, 4)
    assert layer(torch.randn(0, 6)).shape == (0, 4)
    assert Linear(6, 4).double()(torch.randn(2, 6, dtype=torch.float64)).dtype == torch.float64
    with pytest.MonkeyPatch.context() as patch:
        # Restore the original function, which a compiled graph must not call.
        patch.setattr(linear, "has_slow_mkl", has_slow_mkl)
        compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
        assert compiled(torch.randn(2, 6)).shape == (2, 4)
    assert onednn_shapes == []
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 6)).dtype == torch.bfloat16
    assert onednn_shapes == ([(16, 6, 4)] if has_onednn_bf16() else [])


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        pytest.param(ZEN4, True, marks=NEEDS_ONEDNN),
        (ZEN4 | {"avx512_f": False}, False),
        (ZEN4 | {"cpu_name": "Intel(R) Xeon(R) Gold 6430"}, False),
        ({}, False),
    ],
)
def test_mkl_is_slow_on_amd_with_avx512(
    capabilities: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``has_slow_mkl`` is true on AMD CPUs with AVX-512, and false on all other CPUs."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    has_slow_mkl.cache_clear()
    try:
        assert has_slow_mkl() is expected
    finally:
        has_slow_mkl.cache_clear()


def test_mkl_is_used_if_onednn_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch builds without the oneDNN operator use MKL."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN4)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    functions = has_onednn_linear, has_slow_mkl
    for function in functions:
        function.cache_clear()
    try:
        assert not has_slow_mkl()
    finally:
        for function in functions:
            function.cache_clear()
