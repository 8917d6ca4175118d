"""nn.Linear with the faster of PyTorch's two CPU matrix libraries, MKL and oneDNN.

PyTorch uses MKL for float32. On CPUs where MKL is slow, float32 products go to oneDNN instead. Row
counts are bucketed for oneDNN, in bf16 too, because it caches generated code per shape.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertsmith.model.ops.cpu import has_slow_mkl

#: Minimum number of multiply-adds at which oneDNN is faster than MKL (benchmarks/products.py).
ONEDNN_MIN_MACS = 4_000_000


class Linear(nn.Linear):
    """nn.Linear with the same weights, and the same outputs up to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if uses_onednn(x, self.weight):
            output: Tensor = _OneDnnLinear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return output
        num_padding_rows = round_up_num_rows(x.shape[0]) - x.shape[0] if uses_cpu_bf16(x) else 0
        if not num_padding_rows:
            return super().forward(x)
        return super().forward(F.pad(x, (0, 0, 0, num_padding_rows)))[: x.shape[0]]


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether x weight^T is computed by oneDNN: large float32 products where MKL is slow."""
    return (
        # Checked first, because torch.compile cannot trace the other conditions.
        not torch.compiler.is_compiling()
        and has_slow_mkl()
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and x.shape[0] * weight.numel() >= ONEDNN_MIN_MACS
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def uses_cpu_bf16(x: Tensor) -> bool:
    """Return whether PyTorch multiplies the rows of x in bf16 on the CPU, which uses oneDNN."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and x.is_cpu
        and x.dim() == 2
        and x.shape[0] > 0
        and matmul_dtype(x) == torch.bfloat16
    )


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x on the CPU; autocast does not apply to float64."""
    is_autocast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if is_autocast else x.dtype


def round_up_num_rows(num_rows: int) -> int:
    """Round a number of rows up to one of eight sizes per power of two.

    oneDNN generates and caches code for each number of rows, half a megabyte or more per linear
    layer. Without bucketing a server with varying batch sizes would grow by a gigabyte.
    """
    step = max(16, 1 << (max(num_rows - 1, 8).bit_length() - 4))
    return -(-num_rows // step) * step


def pad_rows(x: Tensor) -> Tensor:
    """Return x [T, D] with zero rows appended up to ``round_up_num_rows(T)`` rows, contiguous."""
    num_rows, padded_rows = x.shape[0], round_up_num_rows(x.shape[0])
    if padded_rows == num_rows:
        return x.contiguous()
    padded = x.new_empty(padded_rows, x.shape[1])
    padded[:num_rows] = x
    padded[num_rows:] = 0.0
    return padded


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, computed by oneDNN.

    Args:
        x: [T, in]; transposed tensors need no copy.
        weight: [out, in]; transposed tensors need no copy.
        bias: [out], contiguous, or None.
    """
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - there is no public function
    output: Tensor = linear(x, weight, bias, "none", [], "")
    return output


class _OneDnnLinear(torch.autograd.Function):
    """x W^T + b with the gradients g W, g^T x and the sum of g over the rows.

    Padding rows are zero and add nothing to g^T x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padded_x = pad_rows(x)
        ctx.save_for_backward(padded_x if ctx.needs_input_grad[1] else None, weight)
        contiguous_bias = None if bias is None else bias.contiguous()
        return onednn_linear(padded_x, weight, contiguous_bias)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_grad, padded_grad = ctx.needs_input_grad, pad_rows(grad_output)
        return (
            onednn_linear(padded_grad, weight.t())[: grad_output.shape[0]]
            if needs_grad[0]
            else None,
            onednn_linear(padded_grad.t(), x.t()) if needs_grad[1] else None,
            grad_output.sum(0) if needs_grad[2] else None,
        )
