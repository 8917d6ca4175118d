"""From the numpy batches of the store to what the model takes, piece by piece.

It never knows how batches are drawn, nor what is computed from them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.packing import Batch
from bertsmith.model.packed import PackedBatch


@dataclass(frozen=True)
class MicroBatch:
    """A batch on the device, with its predictions (see ``data.packing.Batch``)."""

    packed: PackedBatch
    masked_positions: Tensor
    masked_labels: Tensor
    nsp_labels: Tensor | None

    @property
    def num_sequences(self) -> int:
        """The number of sequences B."""
        return self.packed.cu_seqlens.shape[0] - 1


def to_device(batch: Batch, device: torch.device) -> MicroBatch:
    """Move a numpy batch to the device."""

    def tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        result = torch.from_numpy(values)
        return (
            result.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else result
        )

    return MicroBatch(
        PackedBatch(
            ids=tensor(batch.ids),
            segments=tensor(batch.segments),
            positions=tensor(batch.positions),
            cu_seqlens=tensor(batch.cu_seqlens),
            max_seqlen=batch.max_seqlen,
        ),
        tensor(batch.masked_positions),
        tensor(batch.masked_labels),
        None if batch.nsp_labels is None else tensor(batch.nsp_labels),
    )


def split_batch(batch: Batch, max_tokens: int) -> list[Batch]:
    """Cut a batch between sequences into pieces of at most ``max_tokens`` (one is the least)."""
    if len(batch.ids) <= max_tokens:
        return [batch]
    pieces, first = [], 0
    while first < len(batch):
        room = int(batch.cu_seqlens[first]) + max_tokens
        last = int(np.searchsorted(batch.cu_seqlens, room, "right")) - 1
        last = min(max(last, first + 1), len(batch))
        pieces.append(batch.slice(first, last))
        first = last
    return pieces
