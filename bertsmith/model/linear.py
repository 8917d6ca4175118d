"""nn.Linear, multiplied by the quicker of the two libraries that PyTorch brings for CPUs.

PyTorch gives float32 products to MKL; where that is slow (see ``cpu``), oneDNN, which comes with
PyTorch as well, takes them here. It never knows what is multiplied.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertsmith.model.cpu import has_slow_mkl

#: Rows of a product that has no gradient come in multiples of this: oneDNN writes and keeps code
#: for each number of them, half a megabyte a Linear, by which a server would grow by a gigabyte.
_ROWS = 16
#: Multiply-adds of a product from which on oneDNN is ahead (benchmarks/products.py).
LEAST = 4_000_000


class Linear(nn.Linear):
    """nn.Linear: the same weights, and the same numbers up to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if not taken(x, self.weight):
            return super().forward(x)
        if not torch.is_grad_enabled():
            return product(_even(x), self.weight, self.bias)[: x.shape[0]]
        found: Tensor = _Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return found


def taken(x: Tensor, weight: Tensor) -> bool:
    """Tell whether oneDNN is to multiply: no small one of float32 on such a CPU."""
    return (
        # First of all: a compiled graph ends where it cannot see through a question.
        not torch.compiler.is_compiling()
        and has_slow_mkl()
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and x.shape[0] * weight.numel() >= LEAST
        and not torch.is_autocast_enabled("cpu")
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias by oneDNN, which reads transposed tensors as they lie.

    x: [T, in]; weight: [out, in]; bias: [out].
    """
    multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - oneDNN has no other way in
    found: Tensor = multiply(x, weight, bias, "none", [], "")
    return found


def _even(x: Tensor) -> Tensor:
    """Return x with rows of zeros up to a multiple of _ROWS, itself if it has so many."""
    rows = -(-x.shape[0] // _ROWS) * _ROWS
    if rows == x.shape[0]:
        return x
    even = x.new_empty(rows, x.shape[1])
    even[: x.shape[0]] = x
    even[x.shape[0] :] = 0.0
    return even


class _Product(torch.autograd.Function):
    """x W^T + b; its gradients are g W, g^T x, and the sum of g over the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if asked[0] else None,
            product(gradient.t(), x.t()) if asked[1] else None,
            gradient.sum(0) if asked[2] else None,
        )
