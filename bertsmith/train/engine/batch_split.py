"""Splits a batch into micro-batches with few tokens, for one or several processes."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: The micro-batches of a single process are also those of several processes if the largest share of
#: a process has at most this many times the mean number of tokens.
_MAX_IMBALANCE = 1.2


def split_lengths(
    lengths: Sequence[int] | NDArray[np.integer], max_tokens: int, num_processes: int = 1
) -> list[tuple[int, int]]:
    """Split sequences into parts of at most ``max_tokens`` tokens.

    A sequence of more tokens is a part of its own.

    The parts are the same for any number of processes, as long as process r computes about as many
    tokens in ``parts[r::num_processes]`` as the other processes. Otherwise the number of parts is a
    multiple of the number of processes, and all parts have nearly the same number of tokens. There
    are fewer parts than processes only if there are fewer sequences.

    Args:
        lengths: Number of tokens of each sequence; at least one sequence.
        max_tokens: Maximum number of tokens of a part.
        num_processes: Number of processes that divide the parts among them.

    Returns:
        The first sequence of each part, and the first one after it.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    num_sequences = len(offsets) - 1
    parts = _split_greedily(offsets, max_tokens)
    if _is_balanced(offsets, parts, num_processes):
        return parts
    num_parts = len(parts)
    while True:
        num_parts = min(-(-num_parts // num_processes) * num_processes, num_sequences)
        parts = _split_evenly(offsets, num_parts)
        longest = max(offsets[end] - offsets[first] for first, end in parts)
        if num_parts == num_sequences or longest <= max_tokens:
            return parts
        num_parts += 1


def _split_greedily(offsets: NDArray[np.int64], max_tokens: int) -> list[tuple[int, int]]:
    """Return parts with as many sequences as ``max_tokens`` allows.

    Args:
        offsets: Number of tokens before each sequence, and of all sequences, int64 [B + 1].
        max_tokens: Maximum number of tokens of a part.
    """
    parts = []
    first = 0
    while first < len(offsets) - 1:
        end = int(np.searchsorted(offsets, offsets[first] + max_tokens, "right")) - 1
        end = max(end, first + 1)
        parts.append((first, end))
        first = end
    return parts


def _is_balanced(
    offsets: NDArray[np.int64], parts: list[tuple[int, int]], num_processes: int
) -> bool:
    """Return whether no process has many more tokens than the mean of all processes."""
    num_tokens = [int(offsets[end] - offsets[first]) for first, end in parts]
    largest_share = max(sum(num_tokens[rank::num_processes]) for rank in range(num_processes))
    return largest_share * num_processes <= _MAX_IMBALANCE * sum(num_tokens)


def _split_evenly(offsets: NDArray[np.int64], num_parts: int) -> list[tuple[int, int]]:
    """Return ``num_parts`` parts with nearly the same number of tokens.

    Each part has at least one sequence; ``num_parts`` is at most the number of sequences.
    """
    ends: list[int] = []
    for part in range(1, num_parts + 1):
        nearest = int(np.abs(offsets - offsets[-1] * part // num_parts).argmin())
        first = ends[-1] if ends else 0
        ends.append(min(max(nearest, first + 1), len(offsets) - 1 - (num_parts - part)))
    return list(pairwise([0, *ends]))
