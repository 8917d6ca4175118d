"""Bucketing by length: sequences of similar length are padded together in attention on the CPU."""

import torch

#: Fixed cost of a bucket, in attention scores of one head that take the same time to compute.
_BUCKET_COST = 2**12
#: Minimum number of attention scores of one head that bucketing must save to be worth its overhead.
#: Both values were measured with benchmarks/attention.py.
_MIN_SAVING = 2**14


def _simd_width() -> int:
    """Return the number of float32 values in a SIMD register: 16 with AVX-512, otherwise 8."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def round_up_seqlen(length: int) -> int:
    """Round the padded length of a bucket up to a multiple of the SIMD width.

    A length that is more than half the SIMD width below the next multiple is not rounded. PyTorch's
    attention and softmax are slow for the remainder of a row after the last full SIMD register:
    with AVX-512, 31 tokens take nearly twice as long as 32, but 33 take less time than 48.
    """
    simd_width = _simd_width()
    padding = -length % simd_width
    return length + padding if padding <= simd_width // 2 else length


def bucket_sequences(lengths: list[int]) -> list[list[int]] | None:
    """Partition the sequences of a batch into buckets with the least total attention cost.

    A bucket costs its number of sequences times the square of its longest length, plus a fixed
    cost. Each bucket is a range of the sequences in order of length, and the ranges with the least
    total cost are found with dynamic programming.

    Returns:
        The sequence indices of each bucket, longest sequences first; None if one bucket is best.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    simd_width = _simd_width()
    padded_lengths = [_round_up(lengths[index], simd_width) for index in order]
    one_bucket_cost = len(padded_lengths) * padded_lengths[0] ** 2
    if one_bucket_cost - sum(length**2 for length in padded_lengths) <= _MIN_SAVING:
        return None
    runs = _find_runs(padded_lengths)
    # min_costs[n] is the least cost of the first n runs, and first_runs[n] the index of the first
    # run in the last of the buckets that have this cost.
    min_costs, first_runs = [0], [0]
    for last_run in range(len(runs)):
        costs = []
        for first_run in range(last_run + 1):
            num_sequences = runs[last_run].stop - runs[first_run].start
            longest = padded_lengths[runs[first_run].start]
            costs.append(min_costs[first_run] + num_sequences * longest**2 + _BUCKET_COST)
        min_costs.append(min(costs))
        first_runs.append(costs.index(min(costs)))
    # Follow first_runs from the last bucket to the first.
    buckets = []
    num_runs = len(runs)
    while num_runs > 0:
        first_run = first_runs[num_runs]
        buckets.append(sorted(order[runs[first_run].start : runs[num_runs - 1].stop]))
        num_runs = first_run
    return buckets[::-1] if len(buckets) > 1 else None


def _round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def _find_runs(values: list[int]) -> list[range]:
    """Return the index range of each run of equal consecutive values."""
    starts = [
        index for index in range(len(values)) if index == 0 or values[index] != values[index - 1]
    ]
    ends = [*starts[1:], len(values)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
