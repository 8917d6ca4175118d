"""Attention on padded sequences, with PyTorch's fused kernel or explicit matrix products."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertsmith.model.ops.attention_layout import AttentionLayout, Bucket
from bertsmith.model.ops.padding import append_zero_rows, pad, unpad

#: Returns a dropout mask (0 or 1 / (1 - rate)) of the shape, dtype and device of its argument.
DrawMask = Callable[[Tensor], Tensor]
#: The CUDA backends of PyTorch's fused attention. cuDNN is left out, because it builds a plan for
#: each new shape, which takes up to half a second.
CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
#: Maximum sequence length at which bf16 training on a CPU materializes the probabilities.
UNFUSED_ATTENTION_MAX_SEQLEN = 512


def padded_attention(
    qkv: Tensor, layout: AttentionLayout, draw_mask: DrawMask | None, dropout_rate: float
) -> Tensor:
    """Compute attention with the sequences of each bucket padded to the same length.

    Args:
        qkv: Queries, keys and values, [T, 3, N, H], or more rows, of which the last ones belong to
            no sequence.
        layout: Buckets and padding indices of the batch.
        draw_mask: Draws the dropout masks on the CPU; None on CUDA or without dropout.
        dropout_rate: Rate of PyTorch's dropout, which is used on CUDA; otherwise 0.

    Returns:
        [T, N, H], or zeros in as many more rows as ``qkv`` has.
    """
    num_heads, head_dim = qkv.shape[2:]
    if layout.unpad_indices is not None and layout.pad_indices is not None:
        padded = pad(qkv, layout.pad_indices, layout.unpad_indices)
    else:
        padded = qkv if len(qkv) == layout.num_tokens else qkv[: layout.num_tokens]
    dropout_masks: Sequence[Tensor | None] = [None] * len(layout.buckets)
    if draw_mask is not None:
        dropout_masks = draw_bucket_dropout_masks(layout, num_heads, draw_mask, qkv)
    outputs = []
    for bucket, bucket_qkv, dropout_mask in zip(
        layout.buckets, _split_buckets(padded, layout.buckets), dropout_masks, strict=True
    ):
        shape = (bucket.num_sequences, bucket.max_seqlen, 3, num_heads, head_dim)
        outputs.append(
            _attend_within_bucket(bucket_qkv.view(shape), bucket, dropout_mask, dropout_rate)
        )
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if layout.unpad_indices is not None:
        return unpad(output, layout.unpad_indices, len(qkv))
    return append_zero_rows(output, len(qkv))


def draw_bucket_dropout_masks(
    layout: AttentionLayout, num_heads: int, draw_mask: DrawMask, like: Tensor
) -> list[Tensor]:
    """Draw the dropout mask of each bucket, [B, N, S, S], with the dtype and device of ``like``.

    ``draw_mask`` is called once for all buckets, because each call returns the same random bits.
    """
    shapes = [
        (bucket.num_sequences, num_heads, bucket.max_seqlen, bucket.max_seqlen)
        for bucket in layout.buckets
    ]
    scalar = like.new_empty(1)
    if len(shapes) == 1:
        return [draw_mask(scalar.expand(shapes[0]))]
    sizes = [math.prod(shape) for shape in shapes]
    flat_masks = torch.split(draw_mask(scalar.expand(sum(sizes))), sizes)
    return [mask.view(shape) for mask, shape in zip(flat_masks, shapes, strict=True)]


def draw_sequence_dropout_masks(
    layout: AttentionLayout, num_heads: int, draw_mask: DrawMask, like: Tensor
) -> list[Tensor]:
    """Return the dropout mask of each sequence in the batch, [N, S, S].

    S is the padded length of the sequence's bucket.
    """
    num_sequences = layout.cu_seqlens.shape[0] - 1
    bucket_masks = draw_bucket_dropout_masks(layout, num_heads, draw_mask, like)
    mask_of_sequence: dict[int, Tensor] = {}
    for bucket, bucket_mask in zip(layout.buckets, bucket_masks, strict=True):
        indices = bucket.sequence_indices or range(num_sequences)
        mask_of_sequence.update(zip(indices, bucket_mask, strict=True))
    return [mask_of_sequence[index] for index in range(num_sequences)]


def _split_buckets(padded: Tensor, buckets: Sequence[Bucket]) -> Sequence[Tensor]:
    """Split padded rows [rows, ...] into the rows of each bucket."""
    if len(buckets) == 1:
        return [padded]
    return torch.split(padded, [bucket.num_rows for bucket in buckets])


def _attend_within_bucket(
    qkv: Tensor, bucket: Bucket, dropout_mask: Tensor | None, dropout_rate: float
) -> Tensor:
    """Compute attention within the sequences of a bucket: [B, S, 3, N, H] -> [B * S, N, H]."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if dropout_mask is None and not _prefers_unfused_attention(qkv):
        output = _fused_attention(q, k, v, bucket.mask, dropout_rate)
    else:
        output = _unfused_attention(q, k, v, bucket.mask, dropout_mask)
    return output.transpose(1, 2).reshape(-1, *qkv.shape[3:])


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_rate: float
) -> Tensor:
    """Compute PyTorch's fused attention: [B, N, S, H] -> [B, N, S, H]."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_rate)
    with sdpa_kernel(CUDA_BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_rate)


def _prefers_unfused_attention(qkv: Tensor) -> bool:
    """Return whether two matrix products and a softmax are faster than PyTorch's fused attention.

    This is the case in bf16 training on a CPU, where the fused backward pass is slow
    (benchmarks/attention.py). In inference the gain is small, and oneDNN's code cache would grow
    with each new batch shape.
    """
    is_eager_bf16 = qkv.is_cpu and qkv.dtype == torch.bfloat16 and not torch.compiler.is_compiling()
    return is_eager_bf16 and qkv.requires_grad and qkv.shape[1] <= UNFUSED_ATTENTION_MAX_SEQLEN


def _unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_mask: Tensor | None
) -> Tensor:
    """Compute attention as two matrix products and a softmax, in the dtype of the inputs.

    Args:
        q: [B, N, S, H].
        k: [B, N, S, H].
        v: [B, N, S, H].
        mask: Added to the scores, broadcastable to [B, N, S, S]; None adds nothing.
        dropout_mask: [B, N, S, S]; None for no dropout.

    Returns:
        [B, N, S, H].
    """
    with torch.autocast("cpu", enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if mask is not None:
            # With a mask of another dtype, PyTorch would convert the scores twice.
            scores.add_(mask.to(scores.dtype))
        probabilities = scores.softmax(-1)
        if dropout_mask is not None:
            probabilities = probabilities * dropout_mask
        output: Tensor = probabilities @ v
    return output
