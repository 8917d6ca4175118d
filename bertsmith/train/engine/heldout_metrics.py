"""Held-out metrics of several validation sets."""

from collections.abc import Callable, Mapping
from typing import TypeVar

HeldoutSet = TypeVar("HeldoutSet")


def evaluate_all(
    heldout: Mapping[str, HeldoutSet], evaluate: Callable[[HeldoutSet], dict[str, float]]
) -> dict[str, float]:
    """Return the metrics of all held-out sets.

    The names are prefixed with the name of the set, except for the first set.

    Args:
        heldout: Held-out sets by name.
        evaluate: Returns the metrics of a set.
    """
    metrics: dict[str, float] = {}
    for index, (name, heldout_set) in enumerate(heldout.items()):
        prefix = f"{name}_" if index else ""
        set_metrics = evaluate(heldout_set)
        metrics |= {f"{prefix}{key}": value for key, value in set_metrics.items()}
    return metrics
