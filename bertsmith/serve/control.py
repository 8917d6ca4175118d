"""State of a running server that signal handlers change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bertsmith.serve.models import ServedModel


def _has_not_failed() -> bool:
    """Return False, for apps without models."""
    return False


def _ignore_models(_: Sequence[ServedModel]) -> None:
    """Do nothing, for apps without models."""


@dataclass
class ServerControl:
    """State of a running server that signal handlers change.

    Attributes:
        replace_models: makes later requests use other models.
        has_failed: returns whether a model thread is dead, so that the server must be restarted.
        is_supervised: whether another process restarts the server when it ends.
        is_draining: whether the server is about to stop, so that load balancers should use others.
    """

    replace_models: Callable[[Sequence[ServedModel]], None] = _ignore_models
    has_failed: Callable[[], bool] = _has_not_failed
    is_supervised: bool = False
    is_draining: bool = False
