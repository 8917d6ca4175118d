"""A linear layer and cross-entropy over a large vocabulary, fused and computed in chunks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertsmith.model.ops.linear import matmul_dtype, onednn_linear, pad_rows, uses_onednn

#: Maximum number of logits in memory at once (30 MB in float32). glibc returns larger blocks to the
#: OS after each step, and the next step would spend time on page faults.
MAX_CHUNK_LOGITS = 7_500_000
#: Number of tokens of the vocabulary per matrix product, so that the logits fit in the cache. A
#: product with the whole vocabulary reaches only half the speed.
VOCAB_CHUNK = 2048

#: On a GPU, the vocabulary is padded to a multiple of this number of tokens.
VOCAB_MULTIPLE = 64

#: x [R, in], weight [out, in], bias [out] or None -> x weight^T + bias [R, out].
LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@torch.library.custom_op("bertsmith::cross_entropy_and_gradients", mutates_args=())
def cross_entropy_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype, needs_grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss [] and its gradients with respect to x, weight and bias.

    With the logits Z = X W^T + b, the loss is sum(logsumexp(Z) - Z[label]), and its gradient with
    respect to Z is softmax(Z) - onehot(label).

    The vocabulary is processed in chunks c that fit in the cache. For each chunk,
    E_c = exp(Z_c - m_c) is stored, where m_c is the maximum of each row of Z_c. After all chunks,
    softmax(Z_c) = E_c f_c with one factor f_c per row, which is applied in the matrix products:
    dX = sum_c (E_c W_c) f_c - W[label], and dW_c = E_c^T (X f_c), minus X in the rows of the
    labels; db likewise. Rows are processed in chunks too, and the logits of a chunk of rows are
    freed after its gradients have been added.

    Matrix products run in ``dtype``; exponentials, sums and gradients are float32. This is a custom
    operator so that eager and compiled models run the same code.

    Args:
        x: X, [P, D].
        weight: W, [V, D].
        bias: b, [V].
        labels: int64 [P].
        dtype: dtype of the matrix products, float32 or bfloat16.
        needs_grads: Whether to compute the gradients; otherwise they are empty.
    """
    num_logits = x.shape[0] * weight.shape[0]
    num_chunks = max(1, math.ceil(num_logits / MAX_CHUNK_LOGITS))
    chunk_rows = max(1, math.ceil(x.shape[0] / num_chunks))
    loss = x.new_zeros((), dtype=torch.float32)
    grads = Gradients.zeros(x, weight, bias) if needs_grads else None
    with torch.autocast("cpu", enabled=False):
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype).contiguous()
        for start in range(0, x.shape[0], chunk_rows):
            rows, row_labels = x[start : start + chunk_rows], labels[start : start + chunk_rows]
            softmax = ChunkedSoftmax.compute(rows, weight, bias)
            label_weights = weight.index_select(0, row_labels).float()
            label_logits = (rows.float() * label_weights).sum(1) + bias.index_select(0, row_labels)
            # The logits of the labels are rounded like those in logsumexp. Otherwise the loss of a
            # confident prediction could be negative.
            loss += (softmax.logsumexp - label_logits.to(dtype)).sum()
            if grads is not None:
                grads.add_softmax(start, weight, softmax)
                grads.subtract_labels(start, rows, label_weights, row_labels)
            # Free the logits before the next chunk of rows allocates its logits.
            del softmax
    if grads is None:
        return loss, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    return loss, grads.x, grads.weight, grads.bias


@cross_entropy_and_gradients.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype, needs_grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del labels
    loss = x.new_empty((), dtype=torch.float32)
    if not needs_grads:
        return loss, *(x.new_empty(0, dtype=dtype) for _ in range(3))  # type: ignore[return-value]
    grads = [x.new_empty(tensor.shape, dtype=torch.float32) for tensor in (x, weight, bias)]
    return loss, grads[0], grads[1], grads[2]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy whose forward pass computes the gradients; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype
    ) -> Tensor:
        needs_grads = any(ctx.needs_input_grad)
        outputs: tuple[Tensor, ...] = cross_entropy_and_gradients(
            x, weight, bias, labels, dtype, needs_grads
        )
        if needs_grads:
            ctx.save_for_backward(*outputs[1:])
            ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        return outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(grad.mul_(grad_output).to(dtype) for grad, dtype in grads), None, None


@dataclass(frozen=True)
class ChunkedSoftmax:
    """Softmax of some rows of the logits Z, in chunks c of the vocabulary.

    The softmax of a chunk is the product of its exponentials and its scales.

    Attributes:
        x: [R, D], the rows of X, followed by rows of zeros as padding.
        linear: The function that computed Z.
        exponentials: exp(Z_c - m_c) for each chunk, [R, tokens in c], where m_c is the
            maximum of each row of Z_c.
        scales: exp(m_c - logsumexp(Z)) for each chunk, float32 [R]; 0 for padding rows.
        logsumexp: logsumexp(Z), float32, without padding rows.
    """

    x: Tensor
    linear: LinearFunction
    exponentials: list[Tensor]
    scales: list[Tensor]
    logsumexp: Tensor

    @classmethod
    def compute(cls, x: Tensor, weight: Tensor, bias: Tensor) -> Self:
        """Compute the softmax for x [rows, D], weight [V, D] and bias [V] of the same dtype."""
        num_rows = x.shape[0]
        use_onednn = uses_onednn(x, weight[:VOCAB_CHUNK])
        linear: LinearFunction = onednn_linear if use_onednn else F.linear
        padded_x = pad_rows(x) if use_onednn or x.dtype == torch.bfloat16 else x
        exponentials, maxima, sums = [], [], []
        for weight_chunk, bias_chunk in zip(
            torch.split(weight, VOCAB_CHUNK), torch.split(bias, VOCAB_CHUNK), strict=True
        ):
            logits = linear(padded_x, weight_chunk, bias_chunk).float()
            chunk_maxima = logits.amax(1, keepdim=True)
            chunk_exponentials = logits.sub_(chunk_maxima).exp_()
            maxima.append(chunk_maxima)
            sums.append(chunk_exponentials.sum(1, keepdim=True))
            exponentials.append(chunk_exponentials.to(x.dtype))
        # The columns of ``all_maxima`` and ``scales`` are the chunks.
        all_maxima = torch.cat(maxima, 1)
        logsumexp = (all_maxima + torch.cat(sums, 1).log()).logsumexp(1)
        scales = (all_maxima - logsumexp[:, None]).exp()
        scales[num_rows:] = 0.0
        return cls(padded_x, linear, exponentials, list(scales.unbind(1)), logsumexp[:num_rows])


@dataclass(frozen=True)
class Gradients:
    """float32 gradients of the summed loss: x [P, D], weight [V, D], bias [V]."""

    x: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def zeros(cls, *tensors: Tensor) -> Self:
        """Create zero gradients with the shapes of x, weight and bias."""
        return cls(*(tensor.new_zeros(tensor.shape, dtype=torch.float32) for tensor in tensors))

    def add_softmax(self, start: int, weight: Tensor, softmax: ChunkedSoftmax) -> None:
        """Add the gradients of sum(logsumexp(Z)) over some rows.

        Args:
            start: Index of the first row.
            weight: W, [V, D].
            softmax: Softmax of the rows of Z.
        """
        x, linear = softmax.x, softmax.linear
        grad_rows = self.x[start : start + len(softmax.logsumexp)]
        chunks = zip(
            softmax.exponentials,
            softmax.scales,
            torch.split(weight, VOCAB_CHUNK),
            torch.split(self.weight, VOCAB_CHUNK),
            torch.split(self.bias, VOCAB_CHUNK),
            strict=True,
        )
        for exponentials, scale, weight_chunk, weight_grad, bias_grad in chunks:
            unscaled_grad = linear(exponentials, weight_chunk.t(), None)[: len(grad_rows)]
            grad_rows.addcmul_(unscaled_grad.float(), scale[: len(grad_rows), None])
            scaled_x = (x * scale[:, None]).to(x.dtype)
            if linear is F.linear and x.dtype == torch.float32:
                weight_grad.addmm_(exponentials.t(), scaled_x)
            else:
                weight_grad.add_(linear(exponentials.t(), scaled_x.t(), None))
            bias_grad.add_(torch.mv(exponentials.t(), scale.to(exponentials.dtype)))

    def subtract_labels(self, start: int, x: Tensor, label_weights: Tensor, labels: Tensor) -> None:
        """Subtract the gradients of sum(Z[label]) over some rows.

        Args:
            start: Index of the first row.
            x: [rows, D], these rows of X.
            label_weights: [rows, D], the rows of W for the labels.
            labels: int64 [rows].
        """
        x = x.float()
        self.x[start : start + len(x)].sub_(label_weights)
        self.weight.index_add_(0, labels, x, alpha=-1)
        self.bias.index_add_(0, labels, torch.ones_like(x[:, 0]), alpha=-1)


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of softmax(x weight^T + bias), summed over the rows.

    Args:
        x: [P, D].
        weight: [V, D].
        bias: [V].
        labels: int64 [P]; -100 ignores the row, which is supported except on the CPU in float32
            and bfloat16.

    Returns:
        float32 [], or float64 for inputs of this dtype.
    """
    dtype = matmul_dtype(x)
    has_same_dtype = torch.is_autocast_enabled("cpu") or x.dtype == weight.dtype
    if x.is_cpu and has_same_dtype and dtype in (torch.float32, torch.bfloat16):
        loss: Tensor = _ChunkedCrossEntropy.apply(x.contiguous(), weight, bias, labels, dtype)  # type: ignore[no-untyped-call]
        return loss
    # Matrix products are faster if the size of the vocabulary is a multiple of a power of two. The
    # added tokens have probability 0.
    padding = -len(weight) % VOCAB_MULTIPLE
    if padding:
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = F.pad(bias, (0, padding), value=-math.inf)
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(to_full_precision(logits), labels, reduction="sum")


def to_full_precision(x: Tensor) -> Tensor:
    """Return a 16-bit tensor as float32 and others unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
