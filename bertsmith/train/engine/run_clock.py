"""Measures the wall-clock time that a run has used, over all its processes.

RUN/elapsed.json holds the time in seconds. It is updated several times per second, so that a killed
run continues from the time it has used.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bertsmith.files import parse_json

ELAPSED_FILE: Final = "elapsed.json"
_UPDATE_SECONDS: Final = 0.25
_KEY: Final = "elapsed_seconds"


class RunClock:
    """Context manager that measures the time used by a run and updates its file in a thread."""

    def __init__(
        self, run: Path, start_time: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Continue from the time that earlier processes have stored.

        Args:
            run: Run directory.
            start_time: Value of ``clock`` at the start of the command.
            clock: Returns the current time in seconds.
        """
        self._path = run / ELAPSED_FILE
        self._start_time = start_time
        self._clock = clock
        self._previous_seconds = _read_seconds(self._path)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._update_repeatedly, name="bertsmith-clock", daemon=True
        )

    @property
    def elapsed_seconds(self) -> float:
        """Wall-clock time used by the run, including earlier processes."""
        return self._previous_seconds + self._clock() - self._start_time

    def advance_to(self, previous_seconds: float) -> None:
        """Set the time of earlier processes to ``previous_seconds``, if it is larger."""
        self._previous_seconds = max(self._previous_seconds, previous_seconds)

    def __enter__(self) -> Self:
        """Start to update the file."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Update the file a last time; raise OSError if it cannot be written."""
        self._stopped.set()
        self._thread.join()
        # An error of the block is more important than one of this file.
        with suppress(OSError) if error is not None else nullcontext():
            self._update()

    def _update_repeatedly(self) -> None:
        """Update the file until the block ends; if an update fails, the next one may succeed."""
        is_stopped = False
        while not is_stopped:
            with suppress(OSError):
                self._update()
            is_stopped = self._stopped.wait(_UPDATE_SECONDS)

    def _update(self) -> None:
        """Write the time with a single system call, which a kill does not interrupt.

        The number of digits never falls, so the text overwrites the previous one. The file is not
        synced: after a power failure, the time of the checkpoint is used.
        """
        text = json.dumps({_KEY: round(self.elapsed_seconds, 3)}).encode()
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, text.ljust(64) + b"\n", 0)
        finally:
            os.close(file)


def _read_seconds(path: Path) -> float:
    """Return the time stored in a file; 0 if the file is missing or damaged."""
    try:
        return float(parse_json(path.read_bytes())[_KEY])
    except (OSError, KeyError, TypeError, ValueError):
        return 0.0
