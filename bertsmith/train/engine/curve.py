"""Draws the loss curve of a run, ``curve.png``, with the unigram entropy as baseline."""

import io
from pathlib import Path
from typing import Any

from bertsmith.errors import MissingExtraError
from bertsmith.files import write_atomic
from bertsmith.train.engine import metrics_log

CURVE_FILE = "curve.png"
#: Number of lines of the metrics log over which the running mean of the loss is computed.
_WINDOW = 20


def draw(run: Path, title: str) -> Path:
    """Draw RUN/curve.png from RUN/metrics.jsonl.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    path = run / CURVE_FILE
    write_atomic(path, render(metrics_log.read_metrics(run), title))
    return path


def render(lines: list[dict[str, Any]], title: str) -> bytes:
    """Return the loss curve as a PNG image.

    Args:
        lines: Lines of the metrics log.
        title: Title of the figure.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing the loss curve") from None
    training = [line for line in lines if line["kind"] == "train"]
    heldout = [line for line in lines if line["kind"] == "heldout"]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [line["step"] for line in training]
    losses = [line["mlm_loss"] for line in training]
    axes.plot(steps, losses, color="#b8c4d6", linewidth=0.8, label="training batches")
    axes.plot(steps, _running_mean(losses), color="#3b6ea8", linewidth=1.4, label="running mean")
    _draw_heldout(axes, heldout)
    axes.set_xlabel("steps")
    axes.set_ylabel("masked LM loss (nats per token)")
    # With parse_math=True, a dollar sign in the name of the run would start a formula.
    axes.set_title(
        title.encode("utf-8", "replace").decode(), loc="left", fontsize=11, parse_math=False
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # The opaque legend covers the entropy line where they overlap.
    axes.legend(facecolor="white", framealpha=0.9, edgecolor="none")
    image = io.BytesIO()
    figure.savefig(image)
    return image.getvalue()


def _draw_heldout(axes: Any, heldout: list[dict[str, Any]]) -> None:
    """Draw the held-out losses, and the unigram entropy as a dashed line."""
    if not heldout:
        return
    axes.plot(
        [line["step"] for line in heldout],
        [line["mlm_loss"] for line in heldout],
        color="#c8501e",
        marker="o",
        markersize=3.5,
        linewidth=1.4,
        label="held out",
    )
    entropy = heldout[-1]["unigram_entropy"]
    axes.axhline(
        entropy,
        color="#444444",
        linestyle="--",
        linewidth=1,
        label=f"unigram entropy of the held-out tokens, {entropy:.2f}",
    )


def _running_mean(values: list[float]) -> list[float]:
    """Return the mean of the last ``_WINDOW`` values up to each value."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - _WINDOW) : end]
        means.append(sum(window) / len(window))
    return means
