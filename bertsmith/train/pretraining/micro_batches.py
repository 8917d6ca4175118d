"""Splits the numpy batches of the store into micro-batches of tensors on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.packing import ExampleBatch
from bertsmith.model.packed import PackedBatch

#: The micro-batches of a single process are also those of several processes if the largest share of
#: a process has at most this many times the mean number of tokens.
_MAX_IMBALANCE = 1.2


@dataclass(frozen=True)
class PretrainingMicroBatch:
    """Part of an ``ExampleBatch`` as tensors on the device, for one forward and backward pass.

    Its fields are those of ``ExampleBatch``.
    """

    packed: PackedBatch
    masked_positions: Tensor
    masked_labels: Tensor
    nsp_labels: Tensor | None
    is_causal: bool = False

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences (batch size)."""
        return self.packed.cu_seqlens.shape[0] - 1


def to_device(batch: ExampleBatch, device: torch.device) -> PretrainingMicroBatch:
    """Copy a numpy batch to the device."""

    def to_tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(values)
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor

    return PretrainingMicroBatch(
        PackedBatch(
            ids=to_tensor(batch.ids),
            segments=to_tensor(batch.segments),
            positions=to_tensor(batch.positions),
            cu_seqlens=to_tensor(batch.cu_seqlens),
            max_seqlen=batch.max_seqlen,
        ),
        to_tensor(batch.masked_positions),
        to_tensor(batch.masked_labels),
        None if batch.nsp_labels is None else to_tensor(batch.nsp_labels),
        batch.is_causal,
    )


def split_batch(batch: ExampleBatch, max_tokens: int, num_processes: int = 1) -> list[ExampleBatch]:
    """Split a batch into parts of at most ``max_tokens`` tokens.

    Sequences are not split: a sequence of more tokens is a part of its own.

    The parts are the same for any number of processes, as long as process r computes about as many
    tokens in ``parts[r::num_processes]`` as the other processes. Otherwise the number of parts is a
    multiple of the number of processes, and all parts have nearly the same number of tokens. There
    are fewer parts than processes only if there are fewer sequences.
    """
    parts = _split_greedily(batch, max_tokens)
    if _is_balanced(parts, num_processes):
        return parts
    num_parts = len(parts)
    while True:
        num_parts = min(-(-num_parts // num_processes) * num_processes, len(batch))
        parts = _split_evenly(batch, num_parts)
        longest = max(len(part.ids) for part in parts)
        if num_parts == len(batch) or longest <= max_tokens:
            return parts
        num_parts += 1


def _split_greedily(batch: ExampleBatch, max_tokens: int) -> list[ExampleBatch]:
    """Split a batch into parts with as many sequences as ``max_tokens`` allows."""
    if len(batch.ids) <= max_tokens:
        return [batch]
    parts = []
    first = 0
    while first < len(batch):
        max_end = int(batch.cu_seqlens[first]) + max_tokens
        end = int(np.searchsorted(batch.cu_seqlens, max_end, "right")) - 1
        end = min(max(end, first + 1), len(batch))
        parts.append(batch.slice(first, end))
        first = end
    return parts


def _is_balanced(parts: list[ExampleBatch], num_processes: int) -> bool:
    """Return whether no process has many more tokens than the mean of all processes."""
    num_tokens = [len(part.ids) for part in parts]
    largest_share = max(sum(num_tokens[rank::num_processes]) for rank in range(num_processes))
    return largest_share * num_processes <= _MAX_IMBALANCE * sum(num_tokens)


def _split_evenly(batch: ExampleBatch, num_parts: int) -> list[ExampleBatch]:
    """Split a batch into ``num_parts`` parts with nearly the same number of tokens.

    Each part has at least one sequence; ``num_parts`` is at most the number of sequences.
    """
    ends: list[int] = []
    for part in range(1, num_parts + 1):
        target = len(batch.ids) * part // num_parts
        nearest = int(np.abs(batch.cu_seqlens.astype(np.int64) - target).argmin())
        first = ends[-1] if ends else 0
        ends.append(min(max(nearest, first + 1), len(batch) - (num_parts - part)))
    return [batch.slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
