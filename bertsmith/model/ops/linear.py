"""nn.Linear, multiplied by the quicker of the two libraries that PyTorch brings for CPUs.

PyTorch gives float32 products to MKL; where that is slow (see ``cpu``), oneDNN, which comes with
PyTorch as well, takes them here. What oneDNN multiplies, bf16 too, gets few numbers of rows. It
never knows what is multiplied.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertsmith.model.ops.cpu import has_slow_mkl

#: Multiply-adds of a product from which on oneDNN is ahead (benchmarks/products.py).
ONEDNN_MIN_MACS = 4_000_000


class Linear(nn.Linear):
    """nn.Linear: the same weights, and the same numbers up to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if uses_onednn(x, self.weight):
            found: Tensor = _Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return found
        filling = bucket_rows(x.shape[0]) - x.shape[0] if is_cpu_bf16(x) else 0
        if not filling:
            return super().forward(x)
        return super().forward(F.pad(x, (0, 0, 0, filling)))[: x.shape[0]]


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Tell whether oneDNN is to multiply: no small product of float32 on such a CPU."""
    return (
        # First of all: a compiled graph ends where it cannot see through a question.
        not torch.compiler.is_compiling()
        and has_slow_mkl()
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and x.shape[0] * weight.numel() >= ONEDNN_MIN_MACS
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def is_cpu_bf16(x: Tensor) -> bool:
    """Tell whether rows of x are multiplied in bf16 on the CPU: by oneDNN, as PyTorch has it."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and x.is_cpu
        and x.dim() == 2
        and x.shape[0] > 0
        and matmul_dtype(x) == torch.bfloat16
    )


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return in what dtype the CPU multiplies x: autocast's, which leaves float64 alone."""
    auto = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if auto else x.dtype


def bucket_rows(tokens: int) -> int:
    """Return how many rows are computed for so many tokens: the next of eight numbers an octave.

    PyTorch's libraries prepare code for each number of rows and keep it, half a megabyte or more a
    Linear: with a number for each batch that there can be, a server would grow by a gigabyte.
    """
    step = max(16, 1 << (max(tokens - 1, 8).bit_length() - 4))
    return -(-tokens // step) * step


def pad_rows(x: Tensor) -> Tensor:
    """Return x [T, D] with rows of zeros up to ``bucket_rows`` T, in plain memory."""
    tokens, rows = x.shape[0], bucket_rows(x.shape[0])
    if rows == tokens:
        return x.contiguous()
    even = x.new_empty(rows, x.shape[1])
    even[:tokens] = x
    even[tokens:] = 0.0
    return even


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias by oneDNN, which reads transposed tensors as they lie.

    x: [T, in]; weight: [out, in]; bias: [out], in plain memory.
    """
    multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - oneDNN has no other way in
    found: Tensor = multiply(x, weight, bias, "none", [], "")
    return found


class _Product(torch.autograd.Function):
    """x W^T + b; its gradients are g W, g^T x, and the sum of g over the rows.

    Rows of zeros that fill x and g up add nothing to g^T x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        even = pad_rows(x)
        ctx.save_for_backward(even if ctx.needs_input_grad[1] else None, weight)
        return onednn_linear(even, weight, None if bias is None else bias.contiguous())[
            : x.shape[0]
        ]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        asked, even = ctx.needs_input_grad, pad_rows(gradient)
        return (
            onednn_linear(even, weight.t())[: gradient.shape[0]] if asked[0] else None,
            onednn_linear(even.t(), x.t()) if asked[1] else None,
            gradient.sum(0) if asked[2] else None,
        )
