"""Pause models within a forward pass, so that tests need no sleeps."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bertsmith.model.bert import BertModel

#: Seconds after which a test fails; reached only if something is broken.
TIMEOUT = 60.0


class Pause:
    """State of paused models.

    Attributes:
        started: set when a forward pass starts.
        resume: forward passes wait until it is set.
        num_batches: number of forward passes that have started.
    """

    def __init__(self) -> None:
        self.started = threading.Event()
        self.resume = threading.Event()
        self.num_batches = 0


@contextmanager
def paused_model() -> Iterator[Pause]:
    """Pause all models in their next forward pass, until ``resume`` is set or the block ends."""
    pause = Pause()
    forward = BertModel.iter_hidden_states

    def wait(self: BertModel, *args: Any, **kwargs: Any) -> Any:
        pause.num_batches += 1
        pause.started.set()
        assert pause.resume.wait(TIMEOUT)
        return forward(self, *args, **kwargs)

    BertModel.iter_hidden_states = wait  # type: ignore[method-assign]
    try:
        yield pause
    finally:
        pause.resume.set()
        BertModel.iter_hidden_states = forward  # type: ignore[method-assign]


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true; fail after TIMEOUT."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)
