"""Iteration over batches that are a function of the step, so a run resumes from a step number."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

MicroBatch = TypeVar("MicroBatch")


def build_batch_iterator(
    make_micro_batches: Callable[[int], list[MicroBatch]],
) -> Callable[..., Iterator[list[MicroBatch]]]:
    """Return the method ``iter_batches`` of an objective.

    Args:
        make_micro_batches: Returns the micro-batches of a step, numbered from 0.
    """

    def iter_batches(
        first_step: int,
        data_state: Mapping[str, int] | None = None,  # noqa: ARG001 - there is no such state
    ) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step from ``first_step`` on, without end."""
        return map(make_micro_batches, itertools.count(first_step))

    return iter_batches
