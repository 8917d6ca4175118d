"""Bucketing by length: sequences of similar length are padded together in attention on the CPU."""

import math

import torch

#: Fixed cost of a bucket, as the number of attention scores that one head computes in the same
#: time. Measured with benchmarks/attention.py.
_BUCKET_COST = 2**12
#: Minimum number of attention scores of one head that bucketing must save to be worth its overhead.
#: Measured with benchmarks/attention.py.
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
    cost.

    Returns:
        The sequence indices of each bucket, longest sequences first; None if one bucket is best.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    simd_width = _simd_width()
    padded_lengths = [_round_up(lengths[index], simd_width) for index in order]
    one_bucket_cost = len(padded_lengths) * padded_lengths[0] ** 2
    if one_bucket_cost - sum(length**2 for length in padded_lengths) <= _MIN_SAVING:
        return None
    buckets = [
        sorted(order[bucket_range.start : bucket_range.stop])
        for bucket_range in _find_cheapest_ranges(padded_lengths)
    ]
    return buckets if len(buckets) > 1 else None


def _find_cheapest_ranges(padded_lengths: list[int]) -> list[range]:
    """Partition sorted sequences into the index ranges with the least total cost.

    Sequences of equal padded length form a group and are always in the same range. Dynamic
    programming over the groups finds the ranges.

    Args:
        padded_lengths: Padded length of each sequence, longest first.
    """
    groups = _find_groups(padded_lengths)
    # min_costs[n] is the least cost of bucketing the first n groups. first_groups[n] is the index
    # of the first group in the last of these buckets.
    min_costs, first_groups = [0], [0]
    for last_group in range(len(groups)):
        costs = []
        for first_group in range(last_group + 1):
            num_sequences = groups[last_group].stop - groups[first_group].start
            longest = padded_lengths[groups[first_group].start]
            costs.append(min_costs[first_group] + num_sequences * longest**2 + _BUCKET_COST)
        min_costs.append(min(costs))
        first_groups.append(costs.index(min(costs)))
    # Follow first_groups from the last bucket to the first.
    ranges = []
    num_groups = len(groups)
    while num_groups > 0:
        first_group = first_groups[num_groups]
        ranges.append(range(groups[first_group].start, groups[num_groups - 1].stop))
        num_groups = first_group
    return ranges[::-1]


def _round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return math.ceil(value / multiple) * multiple


def _find_groups(values: list[int]) -> list[range]:
    """Return the index range of each group of equal consecutive values."""
    starts = [
        index for index in range(len(values)) if index == 0 or values[index] != values[index - 1]
    ]
    ends = [*starts[1:], len(values)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
