"""Packed batches: all sequences concatenated into one row of T tokens, without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

#: Default maximum number of tokens in an inference batch, counting each sequence at the longest
#: one's length. Needs several hundred megabytes for BERT-large.
MAX_BATCH_TOKENS = 8192
#: Values in a batch's widest activation (T * F) at which CPU inference is fastest: 16 MB in
#: float32, which mostly fits in the cache. GPUs are faster with larger batches.
_CPU_ACTIVATION_VALUES = 2**22


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """B sequences concatenated into one row of T tokens.

    Attributes:
        ids: int64 [T], token ids.
        segments: int64 [T], 0 for segment A and 1 for B.
        positions: int64 [T], each token's position in its sequence, from 0.
        cu_seqlens: int32 [B + 1], cumulative sequence lengths, from 0 to T.
        max_seqlen: S, the length of the longest sequence.
    """

    ids: Tensor
    segments: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @property
    def first_token_indices(self) -> Tensor:
        """int64 [B], the index of each sequence's first token, [CLS]."""
        return self.cu_seqlens[:-1].long()

    def to(self, device: torch.device) -> Self:
        """Return the batch on ``device``; copies from pinned memory are asynchronous."""
        tensors = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "segments", "positions", "cu_seqlens")
        }
        return replace(self, **tensors)


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    """Pack sequences into a batch.

    Args:
        sequences: Token ids and segment ids of each sequence.

    Raises:
        ValueError: If there are no sequences, or one is empty or has lists of different lengths.
    """
    lengths = [len(ids) for ids, _ in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError("a batch needs at least one sequence, and each at least one token")
    if any(len(ids) != len(segments) for ids, segments in sequences):
        raise ValueError("a sequence needs one segment id for each token id")
    boundaries = torch.tensor([0, *lengths])
    return PackedBatch(
        ids=torch.tensor([token for ids, _ in sequences for token in ids]),
        segments=torch.tensor([segment for _, segments in sequences for segment in segments]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=boundaries.cumsum(0).int(),
        max_seqlen=max(lengths),
    )


def preferred_batch_tokens(device: torch.device, feed_forward: int) -> int:
    """Return the number of tokens per batch at which inference is fastest.

    Args:
        device: Where the model runs.
        feed_forward: The model's feed-forward width.
    """
    if device.type == "cpu":
        return min(MAX_BATCH_TOKENS, _CPU_ACTIVATION_VALUES // feed_forward)
    return MAX_BATCH_TOKENS


def batch_by_length(
    lengths: Sequence[int], max_tokens: int = MAX_BATCH_TOKENS
) -> Iterator[list[int]]:
    """Group sequences of similar length into batches, longest first.

    Args:
        lengths: Length of each sequence.
        max_tokens: Limit for the number of sequences in a batch times its longest length. A longer
            sequence gets its own batch.

    Yields:
        The indices of each batch's sequences.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        num_sequences = max(max_tokens // lengths[order[start]], 1)
        yield order[start : start + num_sequences]
        start += num_sequences
