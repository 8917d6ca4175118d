"""Splits the numpy batches of the store into micro-batches of tensors on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.packing import ExampleBatch
from bertsmith.model.packed import PackedBatch
from bertsmith.train.engine.batch_split import split_lengths


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
    """Split a batch into micro-batches, see ``split_lengths``."""
    parts = split_lengths(np.diff(batch.cu_seqlens), max_tokens, num_processes)
    if len(parts) == 1:
        return [batch]
    return [batch.slice(first, end) for first, end in parts]
