"""From the numpy batches of the store to what the model takes, piece by piece.

It never knows how batches are drawn, nor what is computed from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.packing import Batch
from bertsmith.model.abreast import at_once
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import Packed
from bertsmith.train.device import Machine

#: The most pieces computed at once: each has a gradient of its own, which wants memory.
MOST = 2
#: The fewest tokens of such a piece: below, its gradient costs more than is won
#: (docs/measurements.md).
_LEAST = 512


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


def together(machine: Machine, config: ModelConfig, *, compiled: bool = False) -> int:
    """Return how many pieces of a batch are computed at once: two on the CPU, where it can.

    Batch norm's statistics are of one piece after the other, and a compiled graph of one thread;
    an odd thread would be idle.
    """
    alone = compiled or config.norm == "batch" or torch.get_num_threads() % MOST
    return 1 if alone else min(at_once(machine.device), MOST)


def ranges(sizes: Sequence[int], most: int, count: int = 1) -> list[range]:
    """Part sequences of ``sizes`` tokens, in order, into pieces; return the numbers of each.

    ``count`` pieces, computed at once, have at most ``most`` tokens together (a sequence is the
    least), and about the same size each; too few tokens are not parted.
    """
    ends = np.cumsum(sizes)
    if count == 1 or ends[-1] < count * _LEAST:
        return _filled(ends, most)
    for number in range(count, len(sizes) + 1, count):
        borders = [int(np.abs(ends - ends[-1] * k / number).argmin()) + 1 for k in range(1, number)]
        found = _between([0, *borders, len(sizes)])
        if max(int(ends[own.stop - 1] - ends[own.start] + sizes[own.start]) for own in found) <= (
            most // count
        ):
            return found
    return _filled(ends, most // count)


def _filled(ends: NDArray[np.int64], most: int) -> list[range]:
    """Return as few pieces as there can be in order. ``ends``: where each sequence does, int64."""
    borders = [0]
    while (first := borders[-1]) < len(ends):
        room = (int(ends[first - 1]) if first else 0) + most
        borders.append(max(int(np.searchsorted(ends, room, "right")), first + 1))
    return _between(borders)


def _between(borders: Sequence[int]) -> list[range]:
    return [range(first, last) for first, last in pairwise(sorted(set(borders)))]


def cut(batch: Batch, most: int, count: int = 1) -> list[Batch]:
    """Cut a batch between sequences into pieces; see ``ranges``."""
    found = ranges(np.diff(batch.boundaries).tolist(), most, count)
    return [batch] if len(found) < 2 else [batch.slice(own.start, own.stop) for own in found]
