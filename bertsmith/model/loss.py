"""Cross-entropy over a large vocabulary, in pieces that stay in the cache.

It never knows what the classes mean.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

#: Floats of logits that are held at once (128 MB). Fewer rows at a time would read and write
#: the V x D weights more often than the products can hide.
CHUNK_FLOATS = 2**25


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The logits of a chunk of rows live only until their gradient has been formed from them.

    With Z = X W^T + b, E = exp(Z - max Z) and s its sum a row: the loss is
    sum (log s + max Z - Z[label]), and the gradient of Z is E / s - onehot. Neither that
    quotient nor the onehot is ever formed: dX = (E W) / s - W[label],
    dW = E^T (X / s) - X added to the rows of the labels, db likewise. All are worked out in the
    forward pass and scaled in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        chunks = max(1, -(-x.shape[0] * weight.shape[0] // CHUNK_FLOATS))
        rows = max(1, -(-x.shape[0] // chunks))
        buffer = x.new_empty(rows, weight.shape[0])
        total = x.new_zeros(())
        grads = Gradients.zeros(x, weight, bias) if wanted else None
        for first in range(0, x.shape[0], rows):
            part, target = x[first : first + rows], labels[first : first + rows]
            z = torch.addmm(bias, part, weight.t(), out=buffer[: part.shape[0]])
            picked = z.gather(1, target[:, None])
            peak = z.amax(1, keepdim=True)
            e = z.sub_(peak).exp_()
            mass = e.sum(1, keepdim=True)
            total += (mass.log() + peak - picked).sum()
            if grads is not None:
                grads.add(first, part, weight, target, e, mass)
        if grads is not None:
            ctx.save_for_backward(grads.x, grads.weight, grads.bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        return grad_x.mul_(gradient), grad_weight.mul_(gradient), grad_bias.mul_(gradient), None


@dataclass(frozen=True)
class Gradients:
    """Gradients of the summed loss: x [P, D], weight [V, D], bias [V]."""

    x: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def zeros(cls, x: Tensor, weight: Tensor, bias: Tensor) -> Self:
        """Start at nothing; the rows of ``x`` are written once each."""
        return cls(torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias))

    def add(
        self, first: int, x: Tensor, weight: Tensor, labels: Tensor, e: Tensor, mass: Tensor
    ) -> None:
        """Add the rows from ``first`` on; e is exp(Z - max) [rows, V], mass its sum [rows, 1]."""
        self.weight.addmm_(e.t(), x / mass).index_add_(0, labels, x, alpha=-1)
        inverse = mass.squeeze(1).reciprocal()
        self.bias.addmv_(e.t(), inverse).index_add_(0, labels, torch.ones_like(inverse), alpha=-1)
        own = self.x[first : first + x.shape[0]]
        torch.mm(e, weight, out=own).div_(mass).sub_(weight.index_select(0, labels))


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy, float32 [], of softmax(x weight^T + bias).

    x: [P, D]; weight: [V, D]; bias: [V]; labels: int64 [P], one class a row.
    """
    plain = x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain and not torch.compiler.is_compiling():
        loss: Tensor = _ChunkedCrossEntropy.apply(x.contiguous(), weight, bias, labels)  # type: ignore[no-untyped-call]
        return loss
    return F.cross_entropy(F.linear(x, weight, bias).float(), labels, reduction="sum")
