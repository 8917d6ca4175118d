"""Draws the loss curve of a run, ``curve.png``, with the unigram entropy as baseline."""

import io
from pathlib import Path
from typing import Any

from bertsmith.errors import require_extra
from bertsmith.files import write_atomic
from bertsmith.train.engine import metrics_log

CURVE_FILE = "curve.png"
#: Number of lines of the metrics log over which the running mean of the loss is computed.
_WINDOW = 20
#: Name of the loss in the left-to-right part of a run.
_CAUSAL_LOSS = "causal_lm_loss"


def draw(run: Path, title: str, *, is_masked_lm: bool = True) -> Path:
    """Draw RUN/curve.png from RUN/metrics.jsonl.

    Args:
        run: Run directory.
        title: Title of the figure.
        is_masked_lm: Whether the loss is that of masked tokens; otherwise left to right.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    path = run / CURVE_FILE
    lines = metrics_log.read_metrics(run)
    write_atomic(path, render(lines, title, is_masked_lm=is_masked_lm))
    return path


def render(lines: list[dict[str, Any]], title: str, *, is_masked_lm: bool = True) -> bytes:
    """Return the loss curve as a PNG image.

    Args:
        lines: Lines of the metrics log.
        title: Title of the figure.
        is_masked_lm: Whether the loss is that of masked tokens; otherwise left to right.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    with require_extra("plot", "drawing the loss curve", package="matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    training = [line for line in lines if line["kind"] == "train"]
    heldout = [line for line in lines if line["kind"] == "heldout"]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    causal = [line for line in training if _CAUSAL_LOSS in line]
    masked = [line for line in training if _CAUSAL_LOSS not in line]
    if causal:
        _draw_training(axes, causal, _CAUSAL_LOSS, ("#bcd9c0", "#3f8f4f"), ", left to right")
    _draw_training(axes, masked, "mlm_loss", ("#b8c4d6", "#3b6ea8"), "")
    _draw_heldout(axes, heldout)
    axes.set_xlabel("steps")
    loss_name = "masked-LM loss" if is_masked_lm else "left-to-right loss"
    axes.set_ylabel(f"{'loss' if causal else loss_name} (nats per token)")
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


def _draw_training(
    axes: Any, lines: list[dict[str, Any]], name: str, colors: tuple[str, str], suffix: str
) -> None:
    """Draw a loss of training batches and its running mean.

    Args:
        axes: Axes of matplotlib.
        lines: Lines of the metrics log.
        name: Name of the loss in the lines.
        colors: Colors of the loss and of the running mean.
        suffix: Text after the labels in the legend.
    """
    steps = [line["step"] for line in lines]
    losses = [line[name] for line in lines]
    axes.plot(steps, losses, color=colors[0], linewidth=0.8, label=f"training batches{suffix}")
    means = _running_mean(losses)
    axes.plot(steps, means, color=colors[1], linewidth=1.4, label=f"running mean{suffix}")


def _draw_heldout(axes: Any, heldout: list[dict[str, Any]]) -> None:
    """Draw the held-out masked-LM losses, and the unigram entropy as a dashed line."""
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
