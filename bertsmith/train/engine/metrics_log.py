"""The metrics log of a run, ``metrics.jsonl``: one JSON object per line, ordered by step."""

import os
from pathlib import Path
from typing import Any

from bertsmith.compatibility import upgrade_metrics
from bertsmith.errors import RunError
from bertsmith.files import add_error_filename, dump_json, parse_json, restore_nan, write_atomic
from bertsmith.train.engine.tensorboard_log import TensorBoardLog

METRICS_FILE = "metrics.jsonl"
#: Keys of a line that differ between two runs with the same settings.
TIMING_KEYS = ("seconds", "elapsed_seconds", "tokens_per_second", "mfu")


class MetricsLog:
    """Append-only log. A resumed run first removes the lines after its checkpoint."""

    def __init__(self, run: Path, step: int, *, use_tensorboard: bool = False) -> None:
        """Open the log of ``run`` and remove the lines after ``step``.

        An incomplete last line, which a killed process may leave, is removed too.

        Args:
            run: Run directory.
            step: Step of the checkpoint from which the run continues; 0 for a new run.
            use_tensorboard: Whether to also write the metrics as TensorBoard event files.

        Raises:
            MissingExtraError: If ``use_tensorboard`` is set and tensorboard is not installed.
        """
        self._tensorboard_log = TensorBoardLog(run, step) if use_tensorboard else None
        self.path = run / METRICS_FILE
        lines = [line for line in read_metrics(run) if line["step"] <= step]
        write_atomic(self.path, "".join(dump_json(line) + "\n" for line in lines))
        heldout_steps = [line["step"] for line in lines if line.get("kind") == "heldout"]
        #: Step of the last evaluation; -1 if there is none.
        self.last_heldout_step = max(heldout_steps, default=-1)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and flush it to the operating system."""
        with add_error_filename(self.path):
            self._file.write(dump_json(line) + "\n")
            self._file.flush()
        if line.get("kind") == "heldout":
            self.last_heldout_step = line["step"]
        if self._tensorboard_log is not None:
            self._tensorboard_log.write(line)

    def sync(self) -> None:
        """Write the log to disk; called before a checkpoint, whose steps must all be in the log."""
        os.fsync(self._file.fileno())
        if self._tensorboard_log is not None:
            self._tensorboard_log.sync()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tensorboard_log is not None:
            self._tensorboard_log.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics log, without an incomplete last line.

    The result is empty if the run has no log.

    Raises:
        RunError: If another line is damaged.
    """
    path = run / METRICS_FILE
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    texts = path.read_bytes().splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = upgrade_metrics(restore_nan(parse_json(text.decode())))
            int(line["step"])
            str(line["kind"])
        except (AttributeError, KeyError, TypeError, ValueError):
            if number == len(texts):
                break
            raise RunError(
                f"{path}, line {number:,}: this line is damaged; remove it, or remove the file to "
                "continue without the earlier metrics"
            ) from None
        lines.append(line)
    return lines


def read_heldout_metrics(run: Path, step: int | None = None) -> dict[str, float]:
    """Return the held-out metrics in a run's metrics log; empty if there are none.

    Args:
        run: Run directory.
        step: Step of the evaluation; None for the last evaluation.
    """
    lines = [line for line in read_metrics(run) if line["kind"] == "heldout"]
    if step is not None:
        lines = [line for line in lines if line["step"] == step]
    if not lines:
        return {}
    other_keys = ("step", "kind", *TIMING_KEYS)
    return {name: value for name, value in lines[-1].items() if name not in other_keys}
