"""Packed batches: all sequences concatenated into one row of T tokens, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Input of a model: B sequences concatenated into one row of T tokens.

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
