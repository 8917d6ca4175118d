"""A bias of the attention scores towards neighboring tokens, for the start of pre-training."""

from dataclasses import replace

import torch
from torch import Tensor

from bertsmith.model.ops.attention_layout import AttentionLayout, Bucket


def add_neighbor_bias(
    layout: AttentionLayout, strength: Tensor, num_heads: int, dtype: torch.dtype
) -> AttentionLayout:
    """Return a layout whose attention scores have the bias of ``build_neighbor_bias``.

    Args:
        layout: A layout for the kernel `reference` or `padded`.
        strength: float32 [], reduction of the score per token of distance.
        num_heads: N.
        dtype: Dtype of the attention masks.
    """
    # A bucket can be padded to more tokens than the longest sequence.
    max_seqlen = max(layout.max_seqlen, *(bucket.max_seqlen for bucket in layout.buckets))
    score_bias = build_neighbor_bias(strength, num_heads, max_seqlen, dtype)

    # On the CPU, fused attention needs a mask with two or four dimensions.
    def add_to_mask(bucket: Bucket) -> Bucket:
        bias = score_bias[None, :, : bucket.max_seqlen, : bucket.max_seqlen]
        return replace(bucket, mask=bias if bucket.mask is None else bucket.mask + bias)

    buckets = tuple(add_to_mask(bucket) for bucket in layout.buckets)
    return replace(layout, buckets=buckets, score_bias=score_bias)


def build_neighbor_bias(
    strength: Tensor, num_heads: int, max_seqlen: int, dtype: torch.dtype
) -> Tensor:
    """Return the values that are added to the attention scores.

    The heads alternately prefer the previous and the next token: with c = i - 1 or c = i + 1, the
    score of query i and key j is reduced by strength * |j - c|. This is the linear bias of ALiBi
    (Press et al. 2022, arXiv:2108.12409) with a shifted center. The score of [CLS] (j = 0) is not
    reduced.

    Args:
        strength: float32 [], reduction of the score per token of distance.
        num_heads: N.
        max_seqlen: S.
        dtype: Dtype of the result.

    Returns:
        [N, S, S], on the device of ``strength``.
    """
    device = strength.device
    positions = torch.arange(max_seqlen, device=device)
    heads = torch.arange(num_heads, device=device)[:, None, None]
    centers = positions[:, None] + 2 * (heads % 2) - 1
    return (-strength * (positions - centers).abs() * (positions > 0)).to(dtype)
