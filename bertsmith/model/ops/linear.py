"""A linear layer that uses the faster of PyTorch's two CPU matrix libraries, MKL and oneDNN.

PyTorch uses MKL for float32 and oneDNN for bf16. On CPUs where MKL is slow, this layer uses oneDNN
for float32 too. With oneDNN, the number of rows is rounded up to one of a few sizes, because oneDNN
caches generated code for each shape. The encoder therefore appends rows to its input
(``append_filler_rows``), so that its layers need not.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertsmith.model.ops.cpu import has_onednn_bf16, has_slow_mkl

#: Minimum number of multiply-adds of a product for which oneDNN is faster than MKL
#: (benchmarks/matmul.py).
ONEDNN_MIN_MACS = 4_000_000


class Linear(nn.Linear):
    """nn.Linear with a faster CPU implementation; outputs are the same up to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias: [T, in] -> [T, out]."""
        is_bf16 = uses_cpu_bf16(x)
        # In bf16, nn.Linear would first copy the bias to each row of the output.
        if uses_onednn(x, self.weight) or (is_bf16 and has_onednn_bf16()):
            dtype = torch.bfloat16 if is_bf16 else x.dtype
            output: Tensor = _OneDnnLinear.apply(x, self.weight, self.bias, dtype)  # type: ignore[no-untyped-call]
            return output
        if not is_bf16:
            return super().forward(x)
        num_padding_rows = round_up_num_rows(x.shape[0]) - x.shape[0]
        if num_padding_rows == 0:
            return super().forward(x)
        return super().forward(F.pad(x, (0, 0, 0, num_padding_rows)))[: x.shape[0]]


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``Linear`` computes x weight^T with oneDNN instead of MKL.

    It does for large float32 products in eager mode, on CPUs where MKL is slow.
    """
    return (
        # This condition is first, because torch.compile cannot trace the others.
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
    """Return whether x [T, in] is multiplied by a weight in bf16 on the CPU.

    PyTorch uses oneDNN for it if the CPU has AVX-512.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and x.is_cpu
        and x.dim() == 2
        and x.shape[0] > 0
        and matmul_dtype(x) == torch.bfloat16
    )


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which PyTorch multiplies x by a matrix on the CPU, under autocast too."""
    # Autocast does not apply to float64.
    is_autocast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if is_autocast else x.dtype


def round_up_num_rows(num_rows: int) -> int:
    """Round a number of rows up to a multiple of 16 and to one of eight sizes per power of two.

    oneDNN generates and caches code for each number of rows, half a megabyte or more per linear
    layer. Without rounding, the memory of a server with varying batch sizes would grow by a
    gigabyte.
    """
    # The step is an eighth of the largest power of two below num_rows, and at least 16 = 2^4.
    num_bits = (num_rows - 1).bit_length()
    step = 1 << max(num_bits - 4, 4)
    return math.ceil(num_rows / step) * step


def pad_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert x [T, D] to ``dtype`` and pad it with zeros to ``round_up_num_rows(T)`` rows.

    The result is contiguous, even if no rows are appended. None keeps the dtype.
    """
    num_rows, num_padded_rows = x.shape[0], round_up_num_rows(x.shape[0])
    if num_padded_rows == num_rows:
        return x.to(dtype or x.dtype).contiguous()
    padded = x.new_empty(num_padded_rows, x.shape[1], dtype=dtype)
    padded[:num_rows] = x
    padded[num_rows:] = 0.0
    return padded


def append_filler_rows(x: Tensor) -> Tensor:
    """Append zeros to x [T, D] if its products are computed by oneDNN in bf16; else return x."""
    return pad_rows(x) if uses_cpu_bf16(x) else x


def onednn_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["none", "gelu", "relu"] = "none",
    algorithm: Literal["", "none", "tanh"] = "",
) -> Tensor:
    """Return activation(x weight^T + bias), computed by oneDNN.

    Args:
        x: [T, in]; a transposed tensor is not copied.
        weight: [out, in]; a transposed tensor is not copied.
        bias: [out], contiguous, or None.
        activation: Activation function.
        algorithm: The form of GELU: "none" for the exact one, or "tanh".
    """
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - there is no public function
    output: Tensor = linear(x, weight, bias, activation, [], algorithm)
    return output


class _OneDnnLinear(torch.autograd.Function):
    """The linear layer x W^T + b, with oneDNN in the forward and the backward pass.

    For the gradient g of the output, the gradients of x, W and b are g W, g^T x and the sum of g
    over the rows. Rows are padded with zeros, which add nothing to g^T x. The products run in
    ``dtype``, float32 or bfloat16, and the gradients have the dtypes of x, W and b.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        padded_x, converted_weight = pad_rows(x, dtype), weight.to(dtype)
        ctx.save_for_backward(padded_x if ctx.needs_input_grad[1] else None, converted_weight)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        converted_bias = None if bias is None else bias.to(dtype).contiguous()
        return onednn_linear(padded_x, converted_weight, converted_bias)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        padded_x, weight = ctx.saved_tensors
        needs_x_grad, needs_weight_grad, needs_bias_grad, _ = ctx.needs_input_grad
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        padded_grad = pad_rows(grad_output)
        x_grad, weight_grad, bias_grad = None, None, None
        if needs_x_grad:
            x_grad = _multiply(padded_grad, weight)[: grad_output.shape[0]].to(x_dtype)
        if needs_weight_grad:
            weight_grad = _multiply(padded_grad.t(), padded_x).to(weight_dtype)
        if needs_bias_grad:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        return x_grad, weight_grad, bias_grad, None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b of two matrices, computed by oneDNN."""
    # PyTorch's product in bf16 uses oneDNN, and is up to four times as fast as its linear layer if
    # ``a`` is transposed.
    return a @ b if a.dtype == torch.bfloat16 else onednn_linear(a, b.t())
