"""The loss curve of a run."""

import signal
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import MissingExtraError
from bertsmith.files import dump_json
from bertsmith.train.engine import curve, loop
from bertsmith.train.engine.curve import CURVE_FILE, draw
from bertsmith.train.engine.step import take_step
from tests.train.conftest import RecordingProgress, TrainFunction


@pytest.mark.parametrize("title", ["run: 2 layers", "r$x^{$: 2 layers", "\\frac $", "n\udcff"])
def test_any_run_name_can_be_the_title(tmp_path: Path, title: str) -> None:
    """Dollar signs and invalid characters in the name of a run do not prevent the drawing."""
    pytest.importorskip("matplotlib")
    lines = [
        {"step": 1, "kind": "train", "mlm_loss": 2.0},
        {"step": 1, "kind": "heldout", "mlm_loss": 2.0, "unigram_entropy": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(dump_json(line) + "\n" for line in lines))
    draw(tmp_path, title)
    assert (tmp_path / CURVE_FILE).read_bytes().startswith(b"\x89PNG")


def test_left_to_right_losses_are_drawn_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of the left-to-right part have a curve; the axis names a single objective."""
    axes_module = pytest.importorskip("matplotlib.axes")
    curves: dict[str, tuple[list[int], list[float]]] = {}
    labels: list[str] = []
    plot = axes_module.Axes.plot

    def record_plot(axes: Any, x: Any, y: Any, **options: Any) -> Any:
        curves[options["label"]] = (x, y)
        return plot(axes, x, y, **options)

    monkeypatch.setattr(axes_module.Axes, "plot", record_plot)
    monkeypatch.setattr(axes_module.Axes, "set_ylabel", lambda _, label: labels.append(label))
    lines = [
        {"step": 1, "kind": "train", "causal_lm_loss": 5.0},
        {"step": 2, "kind": "train", "mlm_loss": 2.0},
    ]
    curve.render(lines, "run")
    curve.render(lines[1:], "run")
    curve.render(lines[1:], "run", is_masked_lm=False)
    assert curves["training batches, left to right"] == ([1], [5.0])
    assert curves["training batches"] == ([2], [2.0])
    assert labels == [
        "loss (nats per token)", "masked-LM loss (nats per token)",
        "left-to-right loss (nats per token)",
    ]  # fmt: skip


def test_missing_matplotlib_is_logged_when_the_run_is_finished(
    train: TrainFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run does not log how to install matplotlib; a finished run logs it once."""

    def fail(*_: object, **__: object) -> None:
        raise MissingExtraError("matplotlib", "plot", "drawing the loss curve")

    monkeypatch.setattr(curve, "draw", fail)
    progress = RecordingProgress()

    def take_step_and_interrupt(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 1:
            signal.raise_signal(signal.SIGINT)
        return take_step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", take_step_and_interrupt)
        assert train(steps=3, progress=progress).model is None
    hint = "drawing the loss curve"
    assert not any(hint in message for message in progress.messages)
    assert train(steps=3, progress=progress).curve is None
    assert sum(hint in message for message in progress.messages) == 1
