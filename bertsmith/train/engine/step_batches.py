"""Iteration over batches that are a function of the step, so a run resumes from a step number."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch


class _Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


MicroBatch = TypeVar("MicroBatch")
Targets = TypeVar("Targets", bound=_Dataclass)


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


def move_tensors(targets: Targets, device: torch.device) -> Targets:
    """Return a dataclass, all fields of which are tensors, on a device."""
    tensors = {name: tensor.to(device) for name, tensor in vars(targets).items()}
    return replace(targets, **tensors)
