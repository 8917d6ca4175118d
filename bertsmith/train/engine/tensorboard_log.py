"""Writes the metrics of a run as TensorBoard event files to RUN/tensorboard."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import require_extra

TENSORBOARD_DIR = "tensorboard"
#: Keys of a line of the metrics log that are not scalars to plot.
_LINE_KEYS = ("step", "kind")


def import_summary_writer() -> Any:
    """Return the class ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        MissingExtraError: If tensorboard is not installed.
    """
    purpose = "run.tensorboard=true: writing TensorBoard event files"
    with require_extra("tensorboard", purpose, package="tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter


class TensorBoardLog:
    """TensorBoard event files with the same scalars as the metrics log.

    The tags are KIND/NAME, for example train/loss, heldout/mlm_loss and
    train/grad_norms/embeddings.
    """

    def __init__(self, run: Path, step: int) -> None:
        """Create an event file that makes TensorBoard hide older events after ``step``."""
        summary_writer = import_summary_writer()
        self._writer = summary_writer(str(run / TENSORBOARD_DIR), purge_step=step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write all scalars of a line of the metrics log."""
        scalars = {name: value for name, value in line.items() if name not in _LINE_KEYS}
        for tag, value in _flatten(scalars, line["kind"]):
            self._writer.add_scalar(tag, value, line["step"])

    def sync(self) -> None:
        """Write buffered events to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write buffered events and close the event file."""
        self._writer.close()


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield (tag, scalar) for nested values."""
    for name, value in values.items():
        tag = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, tag)
        else:
            yield tag, value
