"""Which sequences of a batch are padded together on a CPU, and how far.

It never touches a tensor: it counts.
"""

import torch

#: What another group of sequences costs `padded` on the CPU, in probabilities of one head: the
#: calls that each needs, against passes over numbers that nothing reads. And what grouping at all
#: must save to be worth its own calls (benchmarks/attention.py).
_GROUP_COST, _WORTH = 2**12, 2**14


def _edge() -> int:
    """Return how many numbers this CPU takes at once, or 8."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def bucket_seqlen(length: int) -> int:
    """Return to what length a group is padded: to a multiple of ``_edge`` if it is not far.

    What is left over at the end of a row is dear to PyTorch's attention and softmax: with AVX-512
    31 tokens take nearly twice as long as 32, and 33 less than 48 (docs/measurements.md).
    """
    edge = _edge()
    missing = -length % edge
    return length + missing if missing <= edge // 2 else length


def bucket_sequences(lengths: list[int]) -> list[list[int]] | None:
    """Part the sequences of a batch so that padding each part to its longest costs least.

    Attention pays for the square of a length: one long sequence among short ones would make all
    others pay for it. Returns the numbers of each part's sequences, the longest first; None where
    all are best left together.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    edge = _edge()
    sizes = [-(-lengths[number] // edge) * edge for number in order]
    waste = len(sizes) * sizes[0] ** 2 - sum(size * size for size in sizes)
    if waste <= _WORTH:
        return None
    # Groups begin where a length does; best[n]: the least cost of the first n of those places.
    starts = [n for n in range(len(sizes)) if n == 0 or sizes[n] != sizes[n - 1]]
    ends = [*starts[1:], len(sizes)]
    best, cut = [0.0], [0]
    for last, end in enumerate(ends):
        costs = [best[first] + (end - starts[first]) * sizes[starts[first]] ** 2 + _GROUP_COST
                 for first in range(last + 1)]  # fmt: skip
        best.append(min(costs))
        cut.append(costs.index(best[-1]))
    parts, last = [], len(starts)
    while last:
        first = cut[last]
        parts.append(sorted(order[starts[first] : ends[last - 1]]))
        last = first
    return parts[::-1] if len(parts) > 1 else None
