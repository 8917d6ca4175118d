"""Bucketing of a batch's sequences by length, for padded attention on the CPU."""

import torch

#: Costs in attention scores of one head: the fixed cost of a bucket, and the padding that bucketing
#: must save to be worth its overhead (benchmarks/attention.py).
_BUCKET_COST, _MIN_SAVING = 2**12, 2**14


def _simd_width() -> int:
    """Return the number of float32 values in a SIMD register: 16 with AVX-512, otherwise 8."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def round_up_seqlen(length: int) -> int:
    """Return the padded length of a bucket: the next multiple of the SIMD width if it is near.

    PyTorch's attention and softmax are slow on the remainder of a row: with AVX-512, 31 tokens take
    nearly twice as long as 32, but 33 take less time than 48.
    """
    simd_width = _simd_width()
    padding = -length % simd_width
    return length + padding if padding <= simd_width // 2 else length


def bucket_sequences(lengths: list[int]) -> list[list[int]] | None:
    """Partition the sequences of a batch into buckets with the least total attention cost.

    The cost of a sequence is the square of its bucket's longest length. Buckets are optimal
    partitions of the sequences in order of length (dynamic programming).

    Returns:
        The sequence indices of each bucket, longest sequences first; None if one bucket is best.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    simd_width = _simd_width()
    sizes = [-(-lengths[index] // simd_width) * simd_width for index in order]
    saving = len(sizes) * sizes[0] ** 2 - sum(size * size for size in sizes)
    if saving <= _MIN_SAVING:
        return None
    # Runs of equal size are never split. min_costs[n] is the least cost of the first n runs, and
    # last_starts[n] the first run of the last bucket at that cost.
    starts = [n for n in range(len(sizes)) if n == 0 or sizes[n] != sizes[n - 1]]
    ends = [*starts[1:], len(sizes)]
    min_costs, last_starts = [0.0], [0]
    for last, end in enumerate(ends):
        costs = [
            min_costs[first] + (end - starts[first]) * sizes[starts[first]] ** 2 + _BUCKET_COST
            for first in range(last + 1)
        ]
        min_costs.append(min(costs))
        last_starts.append(costs.index(min_costs[-1]))
    buckets, last = [], len(starts)
    while last:
        first = last_starts[last]
        buckets.append(sorted(order[starts[first] : ends[last - 1]]))
        last = first
    return buckets[::-1] if len(buckets) > 1 else None
