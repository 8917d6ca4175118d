"""Holds the model of a server in the middle of a batch, so that tests need no sleeps."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bertsmith.model.bert import BertModel

#: Seconds after which a test gives up; it takes as long only where something is broken.
TIMEOUT = 60.0


class Pause:
    """``begun`` is set when a batch begins; it ends when ``let`` is set."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        #: Batches that began.
        self.batches = 0


@contextmanager
def paused_model() -> Iterator[Pause]:
    """Let no forward pass of any model end before ``let`` is set, or the block ends."""
    hold, forward = Pause(), BertModel.hidden_states

    def wait(self: BertModel, *arguments: Any, **options: Any) -> Any:
        hold.batches += 1
        hold.begun.set()
        assert hold.let.wait(TIMEOUT)
        return forward(self, *arguments, **options)

    BertModel.hidden_states = wait  # type: ignore[method-assign]
    try:
        yield hold
    finally:
        hold.let.set()
        BertModel.hidden_states = forward  # type: ignore[method-assign]


def wait_until(is_true: Callable[[], object]) -> None:
    """Wait until something is true; fail after a long time."""
    until = time.monotonic() + TIMEOUT
    while not is_true():
        assert time.monotonic() < until, "it never became true"
        time.sleep(0.01)
