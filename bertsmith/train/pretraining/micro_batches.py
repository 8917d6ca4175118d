"""From the numpy batches of the store to what the model takes, piece by piece.

It never knows how batches are drawn, nor what is computed from them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.packing import Batch
from bertsmith.model.packed import Packed


@dataclass(frozen=True)
class Piece:
    """A batch on the device, with its predictions (see ``data.packing.Batch``)."""

    packed: Packed
    masked_positions: Tensor
    masked_labels: Tensor
    not_next: Tensor | None

    @property
    def sequences(self) -> int:
        """The number of sequences B."""
        return self.packed.boundaries.shape[0] - 1


def to_device(batch: Batch, device: torch.device) -> Piece:
    """Move a numpy batch to the device."""

    def tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        result = torch.from_numpy(values)
        return (
            result.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else result
        )

    return Piece(
        Packed(
            ids=tensor(batch.ids),
            segments=tensor(batch.segments),
            positions=tensor(batch.positions),
            boundaries=tensor(batch.boundaries),
            longest=batch.longest,
        ),
        tensor(batch.masked_positions),
        tensor(batch.masked_labels),
        None if batch.not_next is None else tensor(batch.not_next),
    )


def cut(batch: Batch, most_tokens: int) -> list[Batch]:
    """Cut a batch between sequences into pieces of at most ``most_tokens`` (one is the least)."""
    if len(batch.ids) <= most_tokens:
        return [batch]
    pieces, first = [], 0
    while first < len(batch):
        room = int(batch.boundaries[first]) + most_tokens
        last = int(np.searchsorted(batch.boundaries, room, "right")) - 1
        last = min(max(last, first + 1), len(batch))
        pieces.append(batch.slice(first, last))
        first = last
    return pieces
