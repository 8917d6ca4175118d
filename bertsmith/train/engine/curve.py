"""The picture of a run, ``curve.png``: losses against steps, beside the unigram entropy.

It never knows how the figures came about: it reads the journal.
"""

import io
from pathlib import Path
from typing import Any

from bertsmith.errors import MissingExtraError
from bertsmith.files import write_atomic
from bertsmith.train.engine import metrics_log

CURVE_FILE = "curve.png"
#: Journal lines over which the training loss is averaged for the eye.
_WINDOW = 20


def draw(run: Path, title: str) -> Path:
    """Draw RUN/curve.png from RUN/metrics.jsonl; MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing the loss curve") from None
    lines = metrics_log.read_metrics(run)
    training = [line for line in lines if line["kind"] == "train"]
    heldout = [line for line in lines if line["kind"] == "heldout"]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [line["step"] for line in training]
    losses = [line["masked_lm"] for line in training]
    axes.plot(steps, losses, color="#b8c4d6", linewidth=0.8, label="training batches")
    axes.plot(steps, _smooth(losses), color="#3b6ea8", linewidth=1.4, label="their running mean")
    _heldout(axes, heldout)
    axes.set_xlabel("steps")
    axes.set_ylabel("masked-LM loss (nats a word)")
    # A run's name is no formula, whatever dollar signs it has.
    shown = title.encode("utf-8", "replace").decode()
    axes.set_title(shown, loc="left", fontsize=11, parse_math=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # Over the line of the entropy, which may pass behind it.
    axes.legend(facecolor="white", framealpha=0.9, edgecolor="none")
    picture = io.BytesIO()
    figure.savefig(picture)
    path = run / CURVE_FILE
    write_atomic(path, picture.getvalue())
    return path


def _heldout(axes: Any, heldout: list[dict[str, Any]]) -> None:
    if not heldout:
        return
    axes.plot(
        [line["step"] for line in heldout], [line["masked_lm"] for line in heldout],
        color="#c8501e", marker="o", markersize=3.5, linewidth=1.4, label="held out",
    )  # fmt: skip
    entropy = heldout[-1]["unigram_entropy"]
    axes.axhline(
        entropy, color="#444444", linestyle="--", linewidth=1,
        label=f"unigram entropy of the held-out tokens, {entropy:.2f}",
    )  # fmt: skip


def _smooth(values: list[float]) -> list[float]:
    """Return the mean of the last ``_WINDOW`` values at each place."""
    return [
        sum(window) / len(window)
        for window in (values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1))
    ]
