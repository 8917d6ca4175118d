"""The journal of a run, ``metrics.jsonl``: one JSON object a line, in the order of the steps.

It never knows what the figures mean.
"""

import json
import os
from pathlib import Path
from typing import Any

from bertsmith.files import figures_of, json_of, with_filename, write_whole

NAME = "metrics.jsonl"
#: The keys of a line that differ between two runs of the same steps.
TIMES = ("seconds", "tokens_per_second", "ceiling_share")


class Journal:
    """A file that only grows, except that a resume cuts off what came after its checkpoint."""

    def __init__(self, run: Path, step: int) -> None:
        """Open the journal of ``run``, keeping the lines up to ``step``.

        A line that a kill left half written is dropped with those after the checkpoint.
        """
        self.path = run / NAME
        kept = [line for line in read(run) if line["step"] <= step]
        write_whole(self.path, "".join(json_of(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and hand it to the system."""
        with with_filename(self.path):
            self._file.write(json_of(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Have everything on the disk: a checkpoint never knows more than the journal."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's journal; none if there is no journal, nor a torn last line."""
    path = run / NAME
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(figures_of(json.loads(text)))
        except json.JSONDecodeError:
            break
    return lines
