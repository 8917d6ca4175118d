"""A bias of the attention scores towards neighboring tokens, for the start of pre-training."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from bertsmith.model.ops.attention_layout import AttentionLayout, Bucket

#: Decrease of the attention score per token of distance, for each head of a group of four.
_SLOPES: Final = (1.0, 1.0, 1 / 8, 1 / 64)
#: Position from which the distances of these heads count, relative to the query.
_CENTER_OFFSETS: Final = (-1, 1, 0, 0)


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


def find_widest_head(num_heads: int) -> int:
    """Return the head with the smallest slope, which can attend to the most distant tokens."""
    # The last one if several have this slope.
    return min(reversed(range(min(num_heads, len(_SLOPES)))), key=_SLOPES.__getitem__)


def build_neighbor_bias(
    strength: Tensor, num_heads: int, max_seqlen: int, dtype: torch.dtype
) -> Tensor:
    """Return the values that are added to the attention scores.

    The score of query i and key j is reduced by strength * slope * |j - center|. This is the linear
    bias of ALiBi (Press et al. 2022, arXiv:2108.12409) with a shifted center for half of the heads.
    In each group of four heads, the first prefers the previous token (center i - 1, slope 1), the
    second the next token (center i + 1, slope 1), and the other two look further in both directions
    (center i, slopes 1/8 and 1/64). The score of [CLS] (j = 0) is not reduced.

    Args:
        strength: float32 [], reduction of the score per token of distance at a slope of 1.
        num_heads: N.
        max_seqlen: S.
        dtype: Dtype of the result.

    Returns:
        [N, S, S], on the device of ``strength``.
    """
    device = strength.device
    positions = torch.arange(max_seqlen, device=device)
    head_types = torch.arange(num_heads, device=device) % len(_SLOPES)
    slopes = _select(_SLOPES, head_types)[:, None, None]
    offsets = _select(_CENTER_OFFSETS, head_types)[:, None, None]
    distances = (positions - positions[:, None] - offsets).abs()
    return (-strength * slopes * distances * (positions > 0)).to(dtype)


def _select(values: tuple[float, ...], indices: Tensor) -> Tensor:
    """Return ``torch.tensor(values)[indices]``, which would wait for a GPU to copy the values."""
    return torch.stack([(indices == index) * value for index, value in enumerate(values)]).sum(0)
