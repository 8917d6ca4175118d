"""Writes the checkpoints of a run, either at once or in a thread while training continues.

At most one checkpoint is written at a time: the next one waits for it. A thread needs a copy of the
weights and of the optimizer state, which is released when they are written.
"""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.averaging import WeightAverage
from bertsmith.train.engine.checkpoint import CheckpointContent, TrainingState
from bertsmith.train.engine.optimizer import Optimizer


class CheckpointWriter:
    """Context manager that writes checkpoints; on exit, it waits for the last one.

    If an exception ends the block, the error of the thread is dropped. If it is a KeyboardInterrupt
    or a similar exception, there is no wait: an unfinished checkpoint stays in a temporary
    directory, which the next start removes.
    """

    def __init__(self, run: Path, keep: int, *, is_asynchronous: bool) -> None:
        """Create a writer.

        Args:
            run: Run directory.
            keep: Number of recent checkpoints to keep.
            is_asynchronous: Whether to write in a thread.
        """
        self._run = run
        self._keep = keep
        self._is_asynchronous = is_asynchronous
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._seconds: float | None = None

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the last checkpoint."""
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception) and self._thread is not None:
            self._thread.join()

    def save(
        self,
        state: TrainingState,
        model: nn.Module,
        optimizer: Optimizer,
        average: WeightAverage | None = None,
    ) -> None:
        """Write a checkpoint, or start to write it after the previous one is written.

        Raises:
            OSError: If this checkpoint or the previous one cannot be written.
        """
        self.wait()
        start_time = time.perf_counter()
        content = checkpoint.collect_checkpoint(
            state, model, optimizer, average, should_copy=self._is_asynchronous
        )
        if not self._is_asynchronous:
            self._write(content, start_time)
            return
        # A daemon, so that a second Ctrl-C can end the process at once.
        self._thread = threading.Thread(
            target=self._write_and_keep_error,
            args=(content, start_time),
            name="bertsmith-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            OSError: If it cannot be written.
        """
        if self._thread is not None:
            self._thread.join()
            self.check()

    def check(self) -> None:
        """Raise the error of the thread, if it has failed."""
        thread = self._thread
        if thread is None or thread.is_alive():
            return
        self._thread = None
        if self._error is not None:
            raise self._error

    def pop_seconds(self) -> float | None:
        """Return the duration of the last written checkpoint once, and otherwise None."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def _write(self, content: CheckpointContent, start_time: float) -> None:
        checkpoint.write(self._run, content, self._keep)
        self._seconds = time.perf_counter() - start_time

    def _write_and_keep_error(self, content: CheckpointContent, start_time: float) -> None:
        try:
            self._write(content, start_time)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
