"""State of a running server that signals change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bertsmith.serve.models import ServedModel


def _ignore_models(_: Sequence[ServedModel]) -> None:
    """Do nothing, for apps without models."""


@dataclass
class ServerControl:
    """State of a running server that signals change.

    Attributes:
        replace_models: makes later requests use other models.
        is_draining: whether the server is about to stop, so that load balancers should use others.
    """

    replace_models: Callable[[Sequence[ServedModel]], None] = _ignore_models
    is_draining: bool = False
