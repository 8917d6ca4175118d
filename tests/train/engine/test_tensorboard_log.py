"""TensorBoard event files: tags, values, resumed runs, and the missing package."""

import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bertsmith.errors import MissingExtraError
from bertsmith.train.engine.metrics_log import MetricsLog, read_metrics
from bertsmith.train.engine.tensorboard_log import TENSORBOARD_DIR
from tests.train.conftest import TrainFunction


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test without tensorboard, and prevent the slow import of tensorflow."""
    pytest.importorskip("tensorboard")
    # TensorBoard does not import tensorflow if a module of this name exists.
    name = "tensorboard.compat.notf"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))


def _read_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of all events of each tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / TENSORBOARD_DIR)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.usefixtures("tensorboard")
def test_event_files_have_the_scalars_of_the_metrics_log(tmp_path: Path) -> None:
    """The tag has the kind and the name of a metric; nested metrics have one tag each."""
    log = MetricsLog(tmp_path, 0, use_tensorboard=True)
    log.write({"step": 1, "kind": "train", "loss": 2.5, "grad_norms": {"embeddings": 0.5}})
    log.write({"step": 2, "kind": "train", "loss": 1.5, "grad_norms": {"embeddings": 0.25}})
    log.write({"step": 2, "kind": "heldout", "mlm_loss": 1.25, "nsp_loss": math.inf})
    log.close()
    assert _read_scalars(tmp_path) == {
        "train/loss": [(1, 2.5), (2, 1.5)],
        "train/grad_norms/embeddings": [(1, 0.5), (2, 0.25)],
        "heldout/mlm_loss": [(2, 1.25)],
        "heldout/nsp_loss": [(2, math.inf)],
    }


@pytest.mark.usefixtures("tensorboard")
def test_resumed_run_replaces_events_after_its_checkpoint(tmp_path: Path) -> None:
    """No step is shown twice when a run resumes from an earlier step."""
    log = MetricsLog(tmp_path, 0, use_tensorboard=True)
    for step in (1, 2, 3):
        log.write({"step": step, "kind": "train", "loss": 5.0})
    log.close()
    resumed_log = MetricsLog(tmp_path, 1, use_tensorboard=True)
    resumed_log.write({"step": 2, "kind": "train", "loss": 4.0})
    resumed_log.close()
    assert _read_scalars(tmp_path) == {"train/loss": [(1, 5.0), (2, 4.0)]}


@pytest.mark.usefixtures("tensorboard")
def test_run_writes_event_files_only_with_the_setting(train: TrainFunction) -> None:
    """With run.tensorboard=true, the event files have the losses of the metrics log."""
    result = train(steps=2, run__tensorboard="true")
    losses = [line["loss"] for line in read_metrics(result.run) if line["kind"] == "train"]
    assert [step for step, _ in _read_scalars(result.run)["train/loss"]] == [1, 2]
    assert [value for _, value in _read_scalars(result.run)["train/loss"]] == pytest.approx(losses)
    assert not (train("other", steps=1).run / TENSORBOARD_DIR).exists()


def test_missing_tensorboard_is_an_error_before_training(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra to install, and no run directory is created."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bertsmith\[tensorboard\]'"):
        train(steps=2, run__tensorboard="true")
    assert not (tmp_path / "run").exists()
