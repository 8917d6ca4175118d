"""A batch without padding: all sequences one after another in one row of T tokens.

It never knows where the ids come from, nor what is done with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

#: Tokens of one batch, the filler of shorter sequences counted: some hundred megabytes at large.
MAX_BATCH_TOKENS = 8192
#: Numbers of the widest activations of a batch for which a CPU is quickest (16 MB, of which its
#: cache holds a good part); on a GPU larger batches are faster.
_CPU_NUMBERS = 2**22


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """B sequences packed into one row of T tokens.

    ids: int64 [T], word ids.
    segments: int64 [T], 0 for A and 1 for B.
    positions: int64 [T], each token's place in its own sequence, from 0.
    cu_seqlens: int32 [B + 1], where each sequence starts; the last entry is T.
    max_seqlen: the longest sequence's length S.
    """

    ids: Tensor
    segments: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @property
    def first_token_indices(self) -> Tensor:
        """int64 [B], the index of each sequence's first token, its [CLS]."""
        return self.cu_seqlens[:-1].long()

    def to(self, device: torch.device) -> Self:
        """Return the batch on ``device``; from pinned memory the copy does not block."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "segments", "positions", "cu_seqlens")
        }
        return replace(self, **moved)


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    """Pack pairs of (word ids, segment ids), one pair a sequence.

    Raises ValueError if there is no sequence, or one is empty or has two lists of unlike length.
    """
    lengths = [len(ids) for ids, _ in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError("a batch needs at least one sequence, and each at least one token")
    if any(len(ids) != len(segments) for ids, segments in sequences):
        raise ValueError("a sequence needs one segment id for each word id")
    sizes = torch.tensor([0, *lengths])
    return PackedBatch(
        ids=torch.tensor([word for ids, _ in sequences for word in ids]),
        segments=torch.tensor([segment for _, segments in sequences for segment in segments]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=sizes.cumsum(0).int(),
        max_seqlen=max(lengths),
    )


def preferred_batch_tokens(device: torch.device, feed_forward: int) -> int:
    """Return how many tokens a model of that feed-forward width computes at once, quickest."""
    if device.type == "cpu":
        return min(MAX_BATCH_TOKENS, _CPU_NUMBERS // feed_forward)
    return MAX_BATCH_TOKENS


def batch_by_length(
    lengths: Sequence[int], max_tokens: int = MAX_BATCH_TOKENS
) -> Iterator[list[int]]:
    """Yield the numbers of the sequences of each batch: like lengths together, the longest first.

    A batch of n sequences has n times its longest length at most ``max_tokens`` tokens; a sequence
    longer than that stands alone.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first = 0
    while first < len(order):
        count = max(max_tokens // lengths[order[first]], 1)
        yield order[first : first + count]
        first += count
