"""Cross-entropy over a large vocabulary, in pieces that stay in the cache.

It never knows what the classes mean.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.linear import rows_in_bf16

#: Floats of logits held at once (30 MB). Larger buffers are handed back to the system at each
#: step, and then fetched and zeroed again page by page.
CHUNK_FLOATS = 7_500_000
#: Words a product: with all of them at once the product would run at half the machine's speed.
WORDS = 2048


@torch.library.custom_op("bertsmith::cross_entropy_and_gradients", mutates_args=())
def cross_entropy_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss [] and its gradients of x, weight and bias (empty if not wanted).

    With Z = X W^T + b the loss is sum log sum exp Z - Z[label], and the gradient of Z is
    softmax(Z) - onehot. The vocabulary is taken in parts c, each while it is in the cache:
    E_c = exp(Z_c - m_c) with m_c the part's own maximum of each row. Once all parts are known,
    softmax(Z_c) = E_c f_c for one factor a row, which need not be multiplied out:
    dX = sum (E_c W_c) f_c - W[label], dW_c = E_c^T (X f_c) - X in the rows of the labels, db
    likewise. The logits of a chunk of rows live only until their gradient has been formed.

    An operator of its own, so that a compiled graph runs the same code.
    """
    chunks = max(1, -(-x.shape[0] * weight.shape[0] // CHUNK_FLOATS))
    rows = max(1, -(-x.shape[0] // chunks))
    buffer = x.new_empty(rows * weight.shape[0])
    total = x.new_zeros(())
    grads = Gradients.zeros(x, weight, bias) if wanted else None
    for first in range(0, x.shape[0], rows):
        part, target = x[first : first + rows], labels[first : first + rows]
        softmax = Exponentials.of(part, weight, bias, buffer)
        own = weight.index_select(0, target)
        picked = (part * own).sum(1) + bias.index_select(0, target)
        total += (softmax.normalizer - picked).sum()
        if grads is not None:
            grads.add(first, part, weight, target, softmax)
    if grads is None:
        return total, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    return total, grads.x, grads.weight, grads.bias


@cross_entropy_and_gradients.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del labels
    shapes = [one.shape if wanted else (0,) for one in (x, weight, bias)]
    grads = [x.new_empty(shape) for shape in shapes]
    return x.new_empty(()), grads[0], grads[1], grads[2]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients are there when the loss is; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        outputs: tuple[Tensor, ...] = cross_entropy_and_gradients(x, weight, bias, labels, wanted)
        if wanted:
            ctx.save_for_backward(*outputs[1:])
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        return grad_x.mul_(gradient), grad_weight.mul_(gradient), grad_bias.mul_(gradient), None


@dataclass(frozen=True)
class Exponentials:
    """softmax(Z) of some rows in parts of the vocabulary, a factor apart.

    parts: exp(Z_c - m_c), each [rows, words of c]. factors: exp(m_c - normalizer), each [rows].
    normalizer: log sum exp Z, [rows].
    """

    parts: list[Tensor]
    factors: list[Tensor]
    normalizer: Tensor

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor, buffer: Tensor) -> Self:
        """Compute them from x [rows, D], weight [V, D], bias [V] into ``buffer`` [rows * V]."""
        parts, peaks, masses = [], [], []
        rows, used = x.shape[0], 0
        for words, offsets in zip(
            torch.split(weight, WORDS), torch.split(bias, WORDS), strict=True
        ):
            size = rows * words.shape[0]
            z = buffer[used : used + size].view(rows, words.shape[0])
            used += size
            torch.addmm(offsets, x, words.t(), out=z)
            peaks.append(z.amax(1, keepdim=True))
            masses.append(z.sub_(peaks[-1]).exp_().sum(1, keepdim=True))
            parts.append(z)
        peak = torch.cat(peaks, 1)
        normalizer = (peak + torch.cat(masses, 1).log()).logsumexp(1)
        factors = list((peak - normalizer[:, None]).exp().unbind(1))
        return cls(parts, factors, normalizer)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the summed loss: x [P, D], weight [V, D], bias [V]."""

    x: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def zeros(cls, x: Tensor, weight: Tensor, bias: Tensor) -> Self:
        """Start at nothing."""
        return cls(torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias))

    def add(
        self, first: int, x: Tensor, weight: Tensor, labels: Tensor, softmax: Exponentials
    ) -> None:
        """Add what the rows from ``first`` on give: x [rows, D], labels int64 [rows]."""
        own = self.x[first : first + x.shape[0]]
        parts = zip(
            softmax.parts, softmax.factors, torch.split(weight, WORDS),
            torch.split(self.weight, WORDS), torch.split(self.bias, WORDS), strict=True,
        )  # fmt: skip
        for e, factor, words, grad_words, grad_offsets in parts:
            own.addcmul_(e @ words, factor[:, None])
            grad_words.addmm_(e.t(), x * factor[:, None])
            grad_offsets.addmv_(e.t(), factor)
        own.sub_(weight.index_select(0, labels))
        self.weight.index_add_(0, labels, x, alpha=-1)
        self.bias.index_add_(0, labels, torch.ones_like(x[:, 0]), alpha=-1)


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy, float32 [], of softmax(x weight^T + bias).

    x: [P, D]; weight: [V, D]; bias: [V]; labels: int64 [P], one class a row.
    """
    plain = x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain:
        loss: Tensor = _ChunkedCrossEntropy.apply(x.contiguous(), weight, bias, labels)  # type: ignore[no-untyped-call]
        return loss
    filling = rows_in_bf16(x) - x.shape[0]
    if filling:
        # Rows that count for nothing.
        x, labels = F.pad(x, (0, 0, 0, filling)), F.pad(labels, (0, filling), value=-100)
    return F.cross_entropy(F.linear(x, weight, bias).float(), labels, reduction="sum")
