"""Copies to a GPU on a CUDA stream of their own, so that they overlap with computation."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class CopyStream:
    """A CUDA stream for copies from page-locked memory.

    One thread starts copies, and the thread that computes waits for them on its own stream. The CPU
    does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        """Create a stream of a CUDA device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def select_device(self) -> None:
        """Make the device of the stream the current one of this thread.

        In a new thread, the current device is GPU 0, where calls could create a CUDA context.
        """
        torch.cuda.set_device(self._stream.device)

    def start(self, copy: Callable[[], T]) -> tuple[T, torch.cuda.Event]:
        """Call ``copy`` on the stream.

        Returns:
            The result of ``copy``, and an event after which its tensors are copied.
        """
        with torch.cuda.stream(self._stream):
            return copy(), self._stream.record_event()

    def finish(self, event: torch.cuda.Event, tensors: Iterable[Tensor]) -> None:
        """Make the current stream wait for copied tensors, and reserve their memory for it.

        Without the reservation, a later copy could overwrite the memory of a tensor that is freed
        by Python while a kernel still reads it.

        Args:
            event: The event that ``start`` has returned.
            tensors: The tensors of its result.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)
