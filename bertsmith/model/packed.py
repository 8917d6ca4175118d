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
        """int64 [B], the index of each sequence's first token ([CLS])."""
        return self.cu_seqlens[:-1].long()

    @property
    def last_token_indices(self) -> Tensor:
        """int64 [B], the index of each sequence's last token ([SEP])."""
        return self.cu_seqlens[1:].long() - 1

    @property
    def sequence_indices(self) -> Tensor:
        """int64 [T], the index of each token's sequence."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(lengths, output_size=len(self.ids))

    def to(self, device: torch.device) -> Self:
        """Return a copy of the batch on ``device``; copies from pinned memory are asynchronous."""
        tensors = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "segments", "positions", "cu_seqlens")
        }
        return replace(self, **tensors)


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    """Pack sequences into a batch.

    Args:
        sequences: A pair of token ids and segment ids for each sequence.

    Raises:
        ValueError: If there are no sequences, a sequence is empty, or a sequence has different
            numbers of token ids and segment ids.
    """
    lengths = [len(ids) for ids, _ in sequences]
    if not lengths:
        raise ValueError("the batch has no sequences; pass at least one")
    if min(lengths) == 0:
        raise ValueError(f"sequence {lengths.index(0)} of the batch is empty; remove it")
    for index, (ids, segments) in enumerate(sequences):
        if len(ids) != len(segments):
            raise ValueError(
                f"sequence {index} of the batch has {len(ids)} token ids and {len(segments)} "
                "segment ids; pass one segment id for each token id"
            )
    return PackedBatch(
        ids=torch.tensor([token for ids, _ in sequences for token in ids]),
        segments=torch.tensor([segment for _, segments in sequences for segment in segments]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
    )
