"""Batches that warm up a compiled model, the same at every start of a run.

The compiler decides from the first sizes it sees how to split work among threads, and with it the
order of summation. Without a warm-up, a resumed run would see another batch first than an
uninterrupted run and could end with different bytes.
"""

from itertools import accumulate

import numpy as np

from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings

#: Every n-th token is predicted, with the first n for which P differs from all other sizes.
_STRIDES = (7, 6, 8, 5, 9, 4, 3)


def build_warmup_batches(
    data: DataSettings, max_length: int, micro_batch_tokens: int
) -> list[ExampleBatch]:
    """Return one batch for each graph that a run can need: many sequences and a single one.

    torch.compile always specializes a size of 1.

    Args:
        data: Data settings of the run.
        max_length: Longest sequence length of all phases.
        micro_batch_tokens: Maximum tokens of a micro-batch.
    """
    batches = []
    if data.batch_size > 1:
        num_sequences = max(2, min(data.batch_size, micro_batch_tokens // data.max_seqlen))
        lengths = [data.max_seqlen - i % 5 for i in range(num_sequences)]
        batches.append(_build_batch(lengths, nsp=data.nsp))
    if data.batch_size == 1 or data.batch_size * max_length > micro_batch_tokens:
        batches.append(_build_batch([data.max_seqlen], nsp=data.nsp))
    return batches


def _build_batch(lengths: list[int], *, nsp: bool) -> ExampleBatch:
    """Return a batch of zeros whose sizes differ as far as possible.

    The compiler assumes that two sizes that are equal in the first batch are always equal.
    """
    num_tokens, num_sequences = sum(lengths), len(lengths)
    sizes = {num_sequences, num_sequences + 1, max(lengths), num_tokens}
    candidates = [np.arange(0, num_tokens, stride) for stride in _STRIDES]
    masked_positions = next(
        (positions for positions in candidates if len(positions) not in sizes), candidates[0]
    )
    return ExampleBatch(
        ids=np.zeros(num_tokens, np.int64),
        segments=np.zeros(num_tokens, np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.array([0, *accumulate(lengths)], np.int32),
        max_seqlen=max(lengths),
        masked_positions=masked_positions,
        masked_labels=np.zeros(len(masked_positions), np.int64),
        nsp_labels=np.zeros(num_sequences, np.int64) if nsp else None,
    )
