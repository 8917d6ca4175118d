"""Layout of a packed batch for attention: sequence boundaries, padding indices and masks."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bertsmith.model.ops.bucketing import bucket_sequences, round_up_seqlen
from bertsmith.model.packed import PackedBatch

Kernel = Literal["reference", "padded", "varlen"]


@dataclass(frozen=True)
class Bucket:
    """Sequences of a batch that are padded to the same length.

    Attributes:
        num_sequences: B, the number of sequences in the bucket.
        max_seqlen: S, the padded length. On a CPU it is rounded up if the lengths differ.
        mask: Added to the attention scores, broadcastable to [B, N, S, S]: -inf for hidden keys,
            otherwise 0 or a bias. None if every query may attend to every key, without bias.
        sequence_indices: The sequences' indices in the batch; None for all sequences.
    """

    num_sequences: int
    max_seqlen: int
    mask: Tensor | None = None
    sequence_indices: list[int] | None = None

    @property
    def num_rows(self) -> int:
        """B * S, the number of rows after padding."""
        return self.num_sequences * self.max_seqlen


@dataclass(frozen=True)
class AttentionLayout:
    """Sequence boundaries, padding indices and masks of a batch, shared by all layers.

    Attributes:
        kernel: The attention kernel that the layout was built for.
        cu_seqlens: int32 [B + 1], cumulative sequence lengths.
        max_seqlen: S.
        num_tokens: T.
        is_causal: Whether a token attends only to itself and earlier tokens.
        buckets: Sequences of similar length; empty for `varlen`.
        unpad_indices: int64 [T], the index of each token among the padded rows of all buckets,
            concatenated. None if all sequences have the same length, because padding is then only a
            reshape.
        pad_indices: int64 [padded rows], the index of the token that is copied to each padded row.
            Padding repeats the last token of its sequence. None if ``unpad_indices`` is None.
        score_bias: [N, S, S] or larger, added to the attention scores of each sequence by
            `reference`. The masks of the buckets include it. None for no bias.
    """

    kernel: Kernel
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    is_causal: bool
    buckets: tuple[Bucket, ...] = ()
    unpad_indices: Tensor | None = None
    pad_indices: Tensor | None = None
    score_bias: Tensor | None = None


def build_attention_layout(
    batch: PackedBatch, kernel: Kernel, *, is_causal: bool, dtype: torch.dtype
) -> AttentionLayout:
    """Compute the layout of a batch; ``dtype`` is the dtype of the attention masks."""
    cu_seqlens, max_seqlen = batch.cu_seqlens, batch.max_seqlen
    num_tokens = batch.ids.shape[0]
    layout = AttentionLayout(kernel, cu_seqlens, max_seqlen, num_tokens, is_causal)
    if kernel == "varlen":
        return layout
    num_sequences = cu_seqlens.shape[0] - 1
    # A compiled graph always takes the general path: branching on lengths would add a guard and
    # recompile for every new batch.
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and num_tokens == num_sequences * max_seqlen:
        mask = _build_causal_mask(max_seqlen, dtype, cu_seqlens.device) if is_causal else None
        return replace(layout, buckets=(Bucket(num_sequences, max_seqlen, mask),))
    if cu_seqlens.is_cpu and not is_compiling:
        buckets = _build_buckets(cu_seqlens.diff(), max_seqlen, is_causal=is_causal, dtype=dtype)
    else:
        mask = _build_mask(cu_seqlens.diff(), max_seqlen, is_causal=is_causal, dtype=dtype)
        buckets = (Bucket(num_sequences, max_seqlen, mask),)
    unpad_indices, pad_indices = _build_padding_indices(batch, buckets)
    return replace(layout, buckets=buckets, unpad_indices=unpad_indices, pad_indices=pad_indices)


def _build_buckets(
    lengths: Tensor, max_seqlen: int, *, is_causal: bool, dtype: torch.dtype
) -> tuple[Bucket, ...]:
    """Partition sequences of different lengths, int32 [B], into buckets."""
    index_groups = bucket_sequences(lengths.tolist())
    if index_groups is None:
        max_seqlen = round_up_seqlen(max_seqlen)
        mask = _build_mask(lengths, max_seqlen, is_causal=is_causal, dtype=dtype)
        return (Bucket(len(lengths), max_seqlen, mask),)
    return tuple(
        _build_bucket(indices, lengths, is_causal=is_causal, dtype=dtype)
        for indices in index_groups
    )


def _build_bucket(
    sequence_indices: list[int], lengths: Tensor, *, is_causal: bool, dtype: torch.dtype
) -> Bucket:
    """Build the bucket of some sequences; ``lengths`` has the lengths of all sequences, [B]."""
    bucket_lengths = lengths[sequence_indices]
    max_seqlen = round_up_seqlen(int(bucket_lengths.max()))
    if bool((bucket_lengths == max_seqlen).all()):
        mask = _build_causal_mask(max_seqlen, dtype, lengths.device) if is_causal else None
    else:
        mask = _build_mask(bucket_lengths, max_seqlen, is_causal=is_causal, dtype=dtype)
    return Bucket(len(sequence_indices), max_seqlen, mask, sequence_indices)


def _build_mask(lengths: Tensor, max_seqlen: int, *, is_causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the mask that hides padding and, if causal, later tokens.

    Its shape is [B, 1, 1, S], or [B, 1, S, S] if causal.
    """
    is_padding = torch.arange(max_seqlen, device=lengths.device) >= lengths[:, None]
    mask = torch.zeros(len(lengths), max_seqlen, dtype=dtype, device=lengths.device)
    mask = mask.masked_fill(is_padding, -math.inf)[:, None, None, :]
    if not is_causal:
        return mask
    # A query at a padded position still attends to the first token, so no row is all -inf.
    return mask + _build_causal_mask(max_seqlen, dtype, lengths.device)


def _build_causal_mask(max_seqlen: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask [S, S] that hides later tokens."""
    is_later = torch.ones(max_seqlen, max_seqlen, dtype=torch.bool, device=device).triu(1)
    return torch.zeros_like(is_later, dtype=dtype).masked_fill(is_later, -math.inf)


def _build_padding_indices(
    batch: PackedBatch, buckets: tuple[Bucket, ...]
) -> tuple[Tensor, Tensor]:
    """Return ``unpad_indices`` and ``pad_indices`` of ``AttentionLayout``."""
    starts, lengths = batch.cu_seqlens[:-1], batch.cu_seqlens.diff()
    # first_rows[i] is the padded row of the first token of sequence i.
    first_rows = torch.empty_like(lengths)
    pad_indices = []
    num_rows = 0
    for bucket in buckets:
        bucket_indices = slice(None) if bucket.sequence_indices is None else bucket.sequence_indices
        ordinals = torch.arange(bucket.num_sequences, device=lengths.device)
        bucket_first_rows = num_rows + ordinals * bucket.max_seqlen
        first_rows[bucket_indices] = bucket_first_rows.to(first_rows.dtype)
        pad_indices.append(
            _build_pad_indices(starts[bucket_indices], lengths[bucket_indices], bucket.max_seqlen)
        )
        num_rows += bucket.num_rows
    num_tokens = batch.ids.shape[0]
    unpad_indices = batch.positions + first_rows.repeat_interleave(lengths, output_size=num_tokens)
    return unpad_indices, torch.cat(pad_indices)


def _build_pad_indices(starts: Tensor, lengths: Tensor, max_seqlen: int) -> Tensor:
    """Return the token to copy to each padded row of a bucket: int64 [B * S].

    Each sequence is padded with its last token. The mask hides padding from the queries, but
    0 * inf is NaN: padding with a token of another sequence would spread the non-finite values of
    that sequence.
    """
    positions = torch.arange(max_seqlen, device=starts.device)
    indices: Tensor = torch.minimum(positions, lengths[:, None] - 1) + starts[:, None]
    return indices.flatten()
