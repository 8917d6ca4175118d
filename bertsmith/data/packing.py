"""Packed batches: sequences one after another in one row of tokens, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.counter_rng import IntArray

CuSeqlens = NDArray[np.int32]


@dataclass(frozen=True)
class ExampleBatch:
    """Pre-training examples in NumPy: B packed sequences of T tokens, with P tokens to predict.

    Attributes:
        ids: Token ids after masking, int64 [T].
        segments: Segment ids, int64 [T]: 0 from [CLS] to the first [SEP], 1 after it.
        positions: Position of each token in its sequence, int64 [T].
        cu_seqlens: Start of each sequence, int32 [B + 1]; the last entry is T.
        max_seqlen: Number of tokens in the longest sequence.
        masked_positions: Indices in the batch at which a token is predicted, int64 [P], ascending.
        masked_labels: Token ids to predict, int64 [P]: the original ids for masked LM, the ids of
            the next tokens for a left-to-right language model.
        nsp_labels: int64 [B], 0 where segment B follows segment A in the document, 1 where it is
            from another document or, for sentence-order prediction, precedes A; None without
            next-sentence prediction.
        is_causal: Whether the model's attention must be causal for this batch, because a
            bidirectional model is trained left to right at the start of a run.
        neighbor_bias: Strength of the model's attention bias towards neighboring tokens for this
            batch, from 0 (none) to 1.
    """

    ids: IntArray
    segments: IntArray
    positions: IntArray
    cu_seqlens: CuSeqlens
    max_seqlen: int
    masked_positions: IntArray
    masked_labels: IntArray
    nsp_labels: IntArray | None
    is_causal: bool = False
    neighbor_bias: float = 0.0

    def __len__(self) -> int:
        """Return B, the number of sequences."""
        return len(self.cu_seqlens) - 1

    def slice(self, first: int, last: int) -> "ExampleBatch":
        """Return a new batch with copies of the sequences [first, last).

        Raises:
            IndexError: The batch does not have these sequences.
        """
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"sequences {first} to {last} of a batch of {len(self)}")
        start, end = int(self.cu_seqlens[first]), int(self.cu_seqlens[last])
        low, high = np.searchsorted(self.masked_positions, (start, end))
        cu_seqlens = self.cu_seqlens[first : last + 1] - np.int32(start)
        return ExampleBatch(
            ids=self.ids[start:end].copy(),
            segments=self.segments[start:end].copy(),
            positions=self.positions[start:end].copy(),
            cu_seqlens=cu_seqlens,
            max_seqlen=compute_max_seqlen(cu_seqlens),
            masked_positions=self.masked_positions[low:high] - start,
            masked_labels=self.masked_labels[low:high].copy(),
            nsp_labels=None if self.nsp_labels is None else self.nsp_labels[first:last].copy(),
            is_causal=self.is_causal,
            neighbor_bias=self.neighbor_bias,
        )


def compute_max_seqlen(cu_seqlens: CuSeqlens) -> int:
    """Return the number of tokens in the longest sequence; 0 if there is no sequence."""
    return int(np.diff(cu_seqlens).max(initial=0))


def concat_batches(batches: Sequence[ExampleBatch]) -> ExampleBatch:
    """Concatenate batches of the same objective into one, in order."""
    if len(batches) == 1:
        return batches[0]
    offsets = np.cumsum([0] + [len(batch.ids) for batch in batches])
    sequence_starts = [
        batch.cu_seqlens[:-1] + np.int32(offset)
        for batch, offset in zip(batches, offsets[:-1], strict=True)
    ]
    masked_positions = [
        batch.masked_positions + offset for batch, offset in zip(batches, offsets[:-1], strict=True)
    ]
    nsp_labels = [batch.nsp_labels for batch in batches if batch.nsp_labels is not None]
    return ExampleBatch(
        ids=np.concatenate([batch.ids for batch in batches]),
        segments=np.concatenate([batch.segments for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        cu_seqlens=np.concatenate([*sequence_starts, offsets[-1:].astype(np.int32)]),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        masked_positions=np.concatenate(masked_positions),
        masked_labels=np.concatenate([batch.masked_labels for batch in batches]),
        nsp_labels=np.concatenate(nsp_labels) if nsp_labels else None,
        is_causal=batches[0].is_causal,
        neighbor_bias=batches[0].neighbor_bias,
    )


def concat_ranges(starts: IntArray, sizes: IntArray) -> IntArray:
    """Concatenate the ranges [starts[i], starts[i] + sizes[i]) into one array.

    Args:
        starts: First number of each range, int64 [n].
        sizes: Length of each range, int64 [n].

    Returns:
        int64 [sum of sizes].
    """
    offsets = np.cumsum(sizes) - sizes
    numbers: IntArray = np.arange(int(sizes.sum())) + np.repeat(starts - offsets, sizes)
    return numbers
