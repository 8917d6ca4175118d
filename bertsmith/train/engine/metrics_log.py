"""The journal of a run, ``metrics.jsonl``: one JSON object a line, in the order of the steps.

It never knows what the figures mean.
"""

import json
import os
from pathlib import Path
from typing import Any

from bertsmith.compatibility import upgrade_metrics
from bertsmith.files import add_error_filename, dump_json, restore_nan, write_atomic

METRICS_FILE = "metrics.jsonl"
#: The keys of a line that differ between two runs of the same steps.
TIMING_KEYS = ("seconds", "tokens_per_second", "mfu")


class MetricsLog:
    """A file that only grows, except that a resume cuts off what came after its checkpoint."""

    def __init__(self, run: Path, step: int) -> None:
        """Open the journal of ``run``, keeping the lines up to ``step``.

        A line that a kill left half written is dropped with those after the checkpoint.
        """
        self.path = run / METRICS_FILE
        kept = [line for line in read_metrics(run) if line["step"] <= step]
        write_atomic(self.path, "".join(dump_json(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and hand it to the system."""
        with add_error_filename(self.path):
            self._file.write(dump_json(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Have everything on the disk: a checkpoint never knows more than the journal."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's journal; none if there is no journal, nor a torn last line."""
    path = run / METRICS_FILE
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(upgrade_metrics(restore_nan(json.loads(text))))
        except json.JSONDecodeError:
            break
    return lines
