"""Cross-entropy over a large vocabulary, in pieces that stay in the cache.

It never knows what the classes mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertsmith.model.ops.linear import matmul_dtype, onednn_linear, pad_rows, uses_onednn

#: Logits held at once (30 MB in float32). Larger tensors are handed back to the system at each
#: step, and then fetched and zeroed again page by page.
MAX_CHUNK_LOGITS = 7_500_000
#: Words a product: with all of them at once the product would run at half the machine's speed.
VOCAB_CHUNK = 2048

#: x [R, in], weight [out, in], bias [out] or None -> x weight^T + bias [R, out].
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@torch.library.custom_op("bertsmith::cross_entropy_and_gradients", mutates_args=())
def cross_entropy_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss [] and its gradients of x, weight and bias (empty if not wanted).

    With Z = X W^T + b the loss is sum log sum exp Z - Z[label], and the gradient of Z is
    softmax(Z) - onehot. The vocabulary is taken in parts c, each while it is in the cache:
    E_c = exp(Z_c - m_c) with m_c the part's own maximum of each row. Once all parts are known,
    softmax(Z_c) = E_c f_c for one factor a row, which need not be multiplied out:
    dX = sum (E_c W_c) f_c - W[label], dW_c = E_c^T (X f_c) - X in the rows of the labels, db
    likewise. The logits of a chunk of rows live only until their gradient has been formed.

    What is multiplied is in ``dtype``; exponentials, sums and gradients are float32.
    An operator of its own, so that a compiled graph runs the same code.
    """
    chunks = max(1, -(-x.shape[0] * weight.shape[0] // MAX_CHUNK_LOGITS))
    rows = max(1, -(-x.shape[0] // chunks))
    total = x.new_zeros((), dtype=torch.float32)
    grads = Gradients.zeros(x, weight, bias) if wanted else None
    with torch.autocast("cpu", enabled=False):
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype).contiguous()
        for first in range(0, x.shape[0], rows):
            part, target = x[first : first + rows], labels[first : first + rows]
            softmax = ChunkedSoftmax.of(part, weight, bias)
            own = weight.index_select(0, target).float()
            picked = (part.float() * own).sum(1) + bias.index_select(0, target)
            # Rounded as the logits are: else a sure answer would have a loss below 0.
            total += (softmax.normalizer - picked.to(dtype)).sum()
            if grads is not None:
                grads.add(first, weight, softmax)
                grads.take_labels(first, part, own, target)
            del softmax
    if grads is None:
        return total, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    return total, grads.x, grads.weight, grads.bias


@cross_entropy_and_gradients.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del labels
    total = x.new_empty((), dtype=torch.float32)
    if not wanted:
        return total, *(x.new_empty(0, dtype=dtype) for _ in range(3))  # type: ignore[return-value]
    grads = [x.new_empty(one.shape, dtype=torch.float32) for one in (x, weight, bias)]
    return total, grads[0], grads[1], grads[2]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients are there when the loss is; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        outputs: tuple[Tensor, ...] = cross_entropy_and_gradients(
            x, weight, bias, labels, dtype, wanted
        )
        if wanted:
            ctx.save_for_backward(*outputs[1:])
            ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        return outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(own.mul_(gradient).to(dtype) for own, dtype in grads), None, None


@dataclass(frozen=True)
class ChunkedSoftmax:
    """softmax(Z) of some rows in parts of the vocabulary, a factor apart.

    x: [R, D], the rows of X, filled up with zeros. multiply: what made Z of them.
    parts: exp(Z_c - m_c), each [R, words of c]. factors: exp(m_c - normalizer), each float32 [R],
    0 for what fills up. normalizer: log sum exp Z, float32, of the rows themselves.
    """

    x: Tensor
    multiply: Multiply
    parts: list[Tensor]
    factors: list[Tensor]
    normalizer: Tensor

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor) -> Self:
        """Compute them from x [rows, D], weight [V, D] and bias [V], all of one dtype."""
        onednn, rows = uses_onednn(x, weight[:VOCAB_CHUNK]), x.shape[0]
        multiply: Multiply = onednn_linear if onednn else F.linear
        even = pad_rows(x) if onednn or x.dtype == torch.bfloat16 else x
        parts, peaks, masses = [], [], []
        for words, offsets in zip(
            torch.split(weight, VOCAB_CHUNK), torch.split(bias, VOCAB_CHUNK), strict=True
        ):
            z = multiply(even, words, offsets).float()
            peaks.append(z.amax(1, keepdim=True))
            masses.append(z.sub_(peaks[-1]).exp_().sum(1, keepdim=True))
            parts.append(z.to(x.dtype))
        peak = torch.cat(peaks, 1)
        normalizer = (peak + torch.cat(masses, 1).log()).logsumexp(1)
        factors = (peak - normalizer[:, None]).exp()
        factors[rows:] = 0.0
        return cls(even, multiply, parts, list(factors.unbind(1)), normalizer[:rows])


@dataclass(frozen=True)
class Gradients:
    """Gradients of the summed loss: x [P, D], weight [V, D], bias [V], all float32."""

    x: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def zeros(cls, *like: Tensor) -> Self:
        """Start at nothing, for tensors of the shapes of x, weight and bias."""
        return cls(*(one.new_zeros(one.shape, dtype=torch.float32) for one in like))

    def add(self, first: int, weight: Tensor, softmax: ChunkedSoftmax) -> None:
        """Add softmax(Z) of the rows from ``first`` on, by X and by weight [V, D]."""
        x, multiply = softmax.x, softmax.multiply
        own = self.x[first : first + len(softmax.normalizer)]
        parts = zip(
            softmax.parts, softmax.factors, torch.split(weight, VOCAB_CHUNK),
            torch.split(self.weight, VOCAB_CHUNK), torch.split(self.bias, VOCAB_CHUNK), strict=True,
        )  # fmt: skip
        for e, factor, words, grad_words, grad_offsets in parts:
            found = multiply(e, words.t(), None)[: len(own)]
            own.addcmul_(found.float(), factor[: len(own), None])
            scaled = (x * factor[:, None]).to(x.dtype)
            if multiply is F.linear and x.dtype == torch.float32:
                grad_words.addmm_(e.t(), scaled)
            else:
                grad_words.add_(multiply(e.t(), scaled.t(), None))
            grad_offsets.add_(torch.mv(e.t(), factor.to(e.dtype)))

    def take_labels(self, first: int, x: Tensor, own: Tensor, labels: Tensor) -> None:
        """Take the one-hot away: x [rows, D], the labels' own weights [rows, D], labels [rows]."""
        x = x.float()
        self.x[first : first + len(x)].sub_(own)
        self.weight.index_add_(0, labels, x, alpha=-1)
        self.bias.index_add_(0, labels, torch.ones_like(x[:, 0]), alpha=-1)


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy, float32 [], of softmax(x weight^T + bias).

    x: [P, D]; weight: [V, D]; bias: [V]; labels: int64 [P], one class a row.
    """
    dtype = matmul_dtype(x)
    alike = torch.is_autocast_enabled("cpu") or x.dtype == weight.dtype
    if x.is_cpu and alike and dtype in (torch.float32, torch.bfloat16):
        loss: Tensor = _ChunkedCrossEntropy.apply(x.contiguous(), weight, bias, labels, dtype)  # type: ignore[no-untyped-call]
        return loss
    return F.cross_entropy(F.linear(x, weight, bias).float(), labels, reduction="sum")
