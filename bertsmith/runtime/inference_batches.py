"""Grouping of sequences into batches for inference."""

from collections.abc import Iterator, Sequence

import torch

#: Default maximum number of tokens per inference batch, including padding to the longest sequence.
#: Such a batch needs several hundred megabytes with BERT-large.
MAX_BATCH_TOKENS = 8192
#: Number of bytes of a batch's largest activation (T * F) at which CPU inference is fastest, which
#: mostly fit in the cache. GPUs are faster with larger batches.
_CPU_ACTIVATION_BYTES = 2**24


def choose_batch_tokens(
    device: torch.device, feed_forward: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return the number of tokens per batch at which inference is fastest.

    Args:
        device: Where the model runs.
        feed_forward: Width of the model's feed-forward layers.
        dtype: Dtype of the hidden states.
    """
    if device.type == "cpu":
        return min(MAX_BATCH_TOKENS, _CPU_ACTIVATION_BYTES // (feed_forward * dtype.itemsize))
    return MAX_BATCH_TOKENS


def max_batch_size(max_seqlen: int, max_tokens: int) -> int:
    """Return the maximum number of sequences in a batch whose longest has ``max_seqlen`` tokens.

    Each sequence counts as ``max_seqlen`` tokens, because attention kernels may pad to this length.
    A sequence that is longer than ``max_tokens`` is a batch by itself.
    """
    return max(max_tokens // max_seqlen, 1)


def batch_by_length(
    lengths: Sequence[int], max_tokens: int = MAX_BATCH_TOKENS
) -> Iterator[list[int]]:
    """Group sequences of similar length into batches, longest first.

    Args:
        lengths: Length of each sequence.
        max_tokens: Maximum number of tokens per batch, including padding to the longest sequence.

    Yields:
        The indices of the sequences of a batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        num_sequences = max_batch_size(lengths[order[start]], max_tokens)
        yield order[start : start + num_sequences]
        start += num_sequences
