"""Cross-entropy over a large vocabulary, in pieces that stay in the cache.

It never knows what the classes mean.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: Floats of logits handled at once (16 MB): larger buffers are fetched from the system and
#: zeroed page by page at every step, which costs as much as the product itself.
CHUNK_FLOATS = 2**22


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The logits of a chunk of rows live only until their gradient has been formed from them.

    With Z = X W^T + b and p = softmax(Z): loss = sum log sum exp Z - Z[label], dZ = p - onehot,
    dX = dZ W, dW = dZ^T X, db = sum dZ, all worked out in the forward pass and scaled in the
    backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        step = max(1, CHUNK_FLOATS // weight.shape[0])
        buffer = x.new_empty(min(step, x.shape[0]), weight.shape[0])
        total = x.new_zeros(())
        grad_x, grad_bias = torch.empty_like(x), torch.zeros_like(bias)
        grad_weight = torch.zeros_like(weight) if wanted else None
        for rows, targets in zip(torch.split(x, step), torch.split(labels, step), strict=True):
            z = torch.addmm(bias, rows, weight.t(), out=buffer[: rows.shape[0]])
            picked = z.gather(1, targets[:, None])
            normalizer = z.logsumexp(1, keepdim=True)
            total += (normalizer - picked).sum()
            if grad_weight is None:
                continue
            z.sub_(normalizer).exp_()
            z.scatter_add_(1, targets[:, None], -torch.ones_like(picked))
            grad_weight.addmm_(z.t(), rows)
            grad_bias += z.sum(0)
            first = rows.storage_offset() // x.shape[1] - x.storage_offset() // x.shape[1]
            torch.mm(z, weight, out=grad_x[first : first + rows.shape[0]])
        if grad_weight is not None:
            ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        return grad_x.mul_(gradient), grad_weight.mul_(gradient), grad_bias.mul_(gradient), None


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy, float32 [], of softmax(x weight^T + bias).

    x: [P, D]; weight: [V, D]; bias: [V]; labels: int64 [P], one class a row.
    """
    plain = x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if plain and not torch.compiler.is_compiling():
        loss: Tensor = _ChunkedCrossEntropy.apply(x.contiguous(), weight, bias, labels)  # type: ignore[no-untyped-call]
        return loss
    return F.cross_entropy(F.linear(x, weight, bias).float(), labels, reduction="sum")
