"""Batches that warm up a compiled model, the same at every start of a run.

From the first tensor sizes, the compiler decides how to split sums among threads, which determines
their order. A resumed run starts with another batch than an uninterrupted one. Without the warm-up,
the two runs could therefore end with different bytes.
"""

from dataclasses import replace
from itertools import accumulate

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings

#: Candidates for n, where every n-th token is predicted. The first candidate is used for which the
#: number of predictions differs from all other sizes.
_STRIDES = (7, 6, 8, 5, 9, 4, 3)


def build_warmup_batches(
    data: DataSettings,
    max_seqlen: int,
    micro_batch_tokens: int,
    *,
    has_causal_phase: bool = False,
    has_neighbor_bias: bool = False,
    num_processes: int = 1,
) -> list[ExampleBatch]:
    """Return one batch for each graph that torch.compile needs in a run.

    These are a graph for several sequences, and one for a single sequence if a micro-batch can have
    only one: torch.compile specializes sizes of 1. Left-to-right training and the bias towards
    neighboring tokens need their own graphs.

    Args:
        data: Data settings of the run.
        max_seqlen: Maximum sequence length of all phases.
        micro_batch_tokens: Maximum tokens of a micro-batch.
        has_causal_phase: Whether the run starts with left-to-right training.
        has_neighbor_bias: Whether attention has a bias towards neighboring tokens at the start of
            the run.
        num_processes: Number of processes of the run.
    """
    length_lists = []
    if data.batch_size > 1:
        num_sequences = max(2, min(data.batch_size, micro_batch_tokens // data.max_seqlen))
        lengths = [data.max_seqlen - i % 5 for i in range(num_sequences)]
        length_lists.append(lengths)
    min_batch_size = min(data.batch_size, data.initial_batch_size or data.batch_size)
    has_single_sequence = min_batch_size < 2 * num_processes
    if has_single_sequence or data.batch_size * max_seqlen > micro_batch_tokens:
        length_lists.append([data.max_seqlen])
    batches = [_build_batch(lengths, nsp=data.nsp) for lengths in length_lists]
    if has_neighbor_bias:
        batches += [replace(batch, neighbor_bias=1.0) for batch in batches]
    if has_causal_phase:
        batches += [_build_causal_batch(lengths) for lengths in length_lists]
    return batches


def _build_batch(lengths: list[int], *, nsp: bool) -> ExampleBatch:
    """Return a batch of zeros whose sizes differ, if possible.

    The sizes are the numbers of tokens, sequences and predictions, and the maximum length. The
    compiler assumes that two sizes that are equal in the first batch are always equal.
    """
    num_tokens = sum(lengths)
    num_sequences = len(lengths)
    sizes = {num_sequences, num_sequences + 1, max(lengths), num_tokens}
    candidates = [np.arange(0, num_tokens, stride) for stride in _STRIDES]
    masked_positions = next(
        (positions for positions in candidates if len(positions) not in sizes), candidates[0]
    )
    nsp_labels = np.zeros(num_sequences, np.int64) if nsp else None
    return _build_zeros(lengths, masked_positions, nsp_labels)


def _build_causal_batch(lengths: list[int]) -> ExampleBatch:
    """Return a batch of zeros for left-to-right training.

    In each sequence, all tokens except the last two predict the next token, so all sizes differ.
    """
    ends = np.cumsum(lengths)
    positions = np.delete(np.arange(sum(lengths)), np.concatenate([ends - 1, ends - 2]))
    return replace(_build_zeros(lengths, positions, None), is_causal=True)


def _build_zeros(
    lengths: list[int], masked_positions: IntArray, nsp_labels: IntArray | None
) -> ExampleBatch:
    """Return a batch of sequences of token 0, which predict token 0 at ``masked_positions``."""
    num_tokens = sum(lengths)
    return ExampleBatch(
        ids=np.zeros(num_tokens, np.int64),
        segments=np.zeros(num_tokens, np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.array([0, *accumulate(lengths)], np.int32),
        max_seqlen=max(lengths),
        masked_positions=masked_positions,
        masked_labels=np.zeros(len(masked_positions), np.int64),
        nsp_labels=nsp_labels,
    )
