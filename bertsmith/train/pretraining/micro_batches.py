"""Splits the NumPy batches of the store into micro-batches of tensors on the device."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.packing import ExampleBatch
from bertsmith.model.packed import PackedBatch
from bertsmith.train.engine.batch_split import split_lengths
from bertsmith.train.pretraining.static_shapes import StaticShape


@dataclass(frozen=True)
class PretrainingMicroBatch:
    """Part of an ``ExampleBatch`` as tensors, for one forward and backward pass.

    The counts do not include filler sequences and ignored predictions, see ``static_shapes``.

    Attributes:
        packed: The sequences.
        masked_positions: int64 [P], indices of the tokens that predict a token.
        masked_labels: int64 [P], ids to predict.
        nsp_labels: int64 [B], see ``ExampleBatch``.
        num_tokens: Number of tokens.
        num_sequences: Number of sequences.
        num_predictions: Number of predictions.
        is_causal: See ``ExampleBatch``.
        neighbor_bias: See ``ExampleBatch``; float32 [], None for no bias.
    """

    packed: PackedBatch
    masked_positions: Tensor
    masked_labels: Tensor
    nsp_labels: Tensor | None
    num_tokens: int
    num_sequences: int
    num_predictions: int
    is_causal: bool = False
    neighbor_bias: Tensor | None = None

    @classmethod
    def build(
        cls, batch: ExampleBatch, shape: StaticShape | None = None, *, pin_memory: bool = False
    ) -> Self:
        """Convert a NumPy batch to tensors on the CPU.

        Args:
            batch: The sequences.
            shape: Shape to fill the batch up to; None: that of the batch.
            pin_memory: Whether to use page-locked memory, from which copies to a GPU are
                asynchronous.
        """

        def pin(tensor: Tensor) -> Tensor:
            return tensor.pin_memory() if pin_memory else tensor

        def to_tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            return pin(torch.from_numpy(values))

        filled = batch if shape is None else shape.fill_up(batch)
        return cls(
            PackedBatch(
                ids=to_tensor(filled.ids),
                segments=to_tensor(filled.segments),
                positions=to_tensor(filled.positions),
                cu_seqlens=to_tensor(filled.cu_seqlens),
                max_seqlen=filled.max_seqlen,
            ),
            to_tensor(filled.masked_positions),
            to_tensor(filled.masked_labels),
            None if filled.nsp_labels is None else to_tensor(filled.nsp_labels),
            num_tokens=len(batch.ids),
            num_sequences=len(batch),
            num_predictions=len(batch.masked_labels),
            is_causal=batch.is_causal,
            neighbor_bias=pin(torch.tensor(batch.neighbor_bias)) if batch.neighbor_bias else None,
        )

    def list_tensors(self) -> list[Tensor]:
        """Return all tensors."""
        packed = self.packed
        tensors = [packed.ids, packed.segments, packed.positions, packed.cu_seqlens]
        tensors += [self.masked_positions, self.masked_labels]
        optional_tensors = (self.nsp_labels, self.neighbor_bias)
        return tensors + [tensor for tensor in optional_tensors if tensor is not None]

    def to(self, device: torch.device) -> Self:
        """Return a copy on ``device``; copies from page-locked memory are asynchronous."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            packed=self.packed.to(device),
            masked_positions=copy(self.masked_positions),
            masked_labels=copy(self.masked_labels),
            nsp_labels=None if self.nsp_labels is None else copy(self.nsp_labels),
            neighbor_bias=None if self.neighbor_bias is None else copy(self.neighbor_bias),
        )


def add_neighbor_bias(micro_batches: list[PretrainingMicroBatch]) -> list[PretrainingMicroBatch]:
    """Return micro-batches whose attention has the full bias towards neighboring tokens."""
    return [
        replace(batch, neighbor_bias=torch.ones((), device=batch.masked_positions.device))
        for batch in micro_batches
    ]


def to_device(batch: ExampleBatch, device: torch.device) -> PretrainingMicroBatch:
    """Copy a NumPy batch to the device."""
    return PretrainingMicroBatch.build(batch, pin_memory=device.type == "cuda").to(device)


def split_batch(batch: ExampleBatch, max_tokens: int, num_processes: int = 1) -> list[ExampleBatch]:
    """Split a batch into micro-batches, see ``split_lengths``."""
    parts = split_lengths(np.diff(batch.cu_seqlens), max_tokens, num_processes)
    if len(parts) == 1:
        return [batch]
    return [batch.slice(first, end) for first, end in parts]
