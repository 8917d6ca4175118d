"""The packed batch: sequences one after another in one row of tokens, without padding.

It never knows where the tokens come from, nor what a model does with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.counter_rng import IntArray

CuSeqlens = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """B sequences in one row of T tokens, with P predictions asked for.

    - ``ids`` int64 [T]: token ids, some of them masked.
    - ``segments`` int64 [T]: 0 from [CLS] to the first [SEP], 1 after it.
    - ``positions`` int64 [T]: place in the sequence, from 0.
    - ``boundaries`` int32 [B + 1]: where each sequence starts; the last is T.
    - ``longest``: the most tokens in one sequence.
    - ``masked_positions`` int64 [P]: indices into T, ascending.
    - ``masked_labels`` int64 [P]: the ids that stood there; left to right, those that come next.
    - ``not_next`` int64 [B]: 0 where the second segment follows the first, 1 where it was taken
      from another document; None without pairs.
    """

    ids: IntArray
    segments: IntArray
    positions: IntArray
    cu_seqlens: CuSeqlens
    max_seqlen: int
    masked_positions: IntArray
    masked_labels: IntArray
    nsp_labels: IntArray | None

    def __len__(self) -> int:
        """Return B, the number of sequences."""
        return len(self.cu_seqlens) - 1

    def slice(self, first: int, last: int) -> "Batch":
        """Return the sequences [first, last) as a batch of its own, copied and re-based."""
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"sequences {first} to {last} of a batch of {len(self)}")
        begin, end = int(self.cu_seqlens[first]), int(self.cu_seqlens[last])
        low, high = np.searchsorted(self.masked_positions, (begin, end))
        boundaries = self.cu_seqlens[first : last + 1] - np.int32(begin)
        return Batch(
            ids=self.ids[begin:end].copy(),
            segments=self.segments[begin:end].copy(),
            positions=self.positions[begin:end].copy(),
            cu_seqlens=boundaries,
            max_seqlen=compute_max_seqlen(boundaries),
            masked_positions=self.masked_positions[low:high] - begin,
            masked_labels=self.masked_labels[low:high].copy(),
            nsp_labels=None if self.nsp_labels is None else self.nsp_labels[first:last].copy(),
        )


def compute_max_seqlen(boundaries: CuSeqlens) -> int:
    """Return the most tokens in one sequence; 0 if there is none."""
    return int(np.diff(boundaries).max(initial=0))


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Return several batches as one, in order."""
    if len(batches) == 1:
        return batches[0]
    bases = np.cumsum([0] + [len(batch.ids) for batch in batches])
    starts = [
        batch.cu_seqlens[:-1] + np.int32(base)
        for batch, base in zip(batches, bases[:-1], strict=True)
    ]
    masked = [
        batch.masked_positions + base for batch, base in zip(batches, bases[:-1], strict=True)
    ]
    labels = [batch.nsp_labels for batch in batches if batch.nsp_labels is not None]
    return Batch(
        ids=np.concatenate([batch.ids for batch in batches]),
        segments=np.concatenate([batch.segments for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        cu_seqlens=np.concatenate([*starts, bases[-1:].astype(np.int32)]),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        masked_positions=np.concatenate(masked),
        masked_labels=np.concatenate([batch.masked_labels for batch in batches]),
        nsp_labels=np.concatenate(labels) if labels else None,
    )


def concat_ranges(firsts: IntArray, sizes: IntArray) -> IntArray:
    """Return ``sizes[i]`` numbers from ``firsts[i]`` on, for each i, one after another.

    ``firsts`` and ``sizes`` are int64 [n]; the result is int64 [sum of sizes].
    """
    starts = np.cumsum(sizes) - sizes
    numbers: IntArray = np.arange(int(sizes.sum())) + np.repeat(firsts - starts, sizes)
    return numbers
