"""Runs that start with a bias of attention towards neighboring tokens."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.data.store import Store
from bertsmith.errors import SettingsError
from bertsmith.model.ops import neighbor_bias
from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining import speed
from bertsmith.train.pretraining.recipes import resolve_steps
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import TrainFunction, assert_same_weights, copy_interrupted_run

#: Eight steps, the first four of which have a bias.
ARGUMENTS: dict[str, Any] = {
    "steps": 8,
    "model__layers": 2,
    "schedule__neighbor_bias_steps": 4,
    "run__initialization": "match-heads",
    "checkpoint__steps": 1,
    "checkpoint__keep": 9,
    "checkpoint__keep_optimizer": "true",
    "run__micro_batch_tokens": 64,
}


@pytest.fixture
def strengths(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The strengths of all biases that a test computes, in order; inf for those of evaluations."""
    values: list[float] = []
    build_neighbor_bias = neighbor_bias.build_neighbor_bias

    def record(strength: torch.Tensor, *arguments: Any) -> torch.Tensor:
        values.append(float(strength) if torch.is_grad_enabled() else math.inf)
        return build_neighbor_bias(strength, *arguments)

    monkeypatch.setattr(neighbor_bias, "build_neighbor_bias", record)
    return values


def test_bias_falls_linearly_and_evaluation_has_none(
    train: TrainFunction, strengths: list[float]
) -> None:
    """The bias falls from 1 to 0 over its steps; evaluations have none."""
    train(**ARGUMENTS, run__eval_every=1)
    assert len(strengths) > 4
    expected = [1, 0.75, 0.5, 0.25]
    assert list(dict.fromkeys(strengths)) == pytest.approx(expected)


def test_bias_takes_at_most_half_of_the_run(train: TrainFunction, strengths: list[float]) -> None:
    """In a run that is shorter than twice the steps of the bias, it falls over half of the run."""
    train(**ARGUMENTS | {"schedule__neighbor_bias_steps": 100})
    assert list(dict.fromkeys(strengths)) == pytest.approx([1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("initialization", "num_heads", "expected"),
    [
        ("match-heads", 4, 0),
        ("neighbor-heads", 4, 1),
        ("cross-segment-heads", 4, 1),
        ("neighbor-heads", 2, 1),
        ("cross-segment-heads", 2, 2),
        ("cross-segment-heads", 256, 0),
    ],
)
def test_layers_with_neighbor_heads_have_no_bias(
    resolve: Any, store: Path, initialization: str, num_heads: int, expected: int
) -> None:
    """Their heads attend to neighbors from the start; other layers have the bias."""
    assignments = [f"run.initialization={initialization}", f"model.heads={num_heads}"]
    settings = resolve_steps(resolve(assignments=assignments), 4)
    session = Session(settings, Store.open(store))
    assert session.model.bert.num_unbiased_layers == expected


@pytest.mark.parametrize(
    "options",
    [
        {"schedule__causal_fraction": 0.3},
        {"data__objective": "left-to-right", "data__nsp": "false", "model__attention": "causal"},
    ],
    ids=["causal phase", "causal model"],
)
def test_left_to_right_training_with_bias_is_rejected(
    train: TrainFunction, tmp_path: Path, options: dict[str, str]
) -> None:
    """The bias would have no effect in left-to-right steps."""
    with pytest.raises(SettingsError, match=r"schedule\.neighbor_bias_steps is 4, but .*; set "):
        train(**ARGUMENTS, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_steps", [0, 4])
def test_graph_with_the_bias_is_compiled_before_training(
    resolve: Any, store: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """If a compiled model has static shapes (on a GPU), the measurement takes a biased step."""
    steps_have_bias: list[bool] = []
    num_biased_predictions: list[int] = []

    def record(_session: Session, _objective: Any, _step: int, batches: list[Any]) -> None:
        steps_have_bias.append(batches[0].neighbor_bias is not None)
        if steps_have_bias[-1]:
            num_biased_predictions.append(len(batches[0].masked_labels))

    monkeypatch.setattr(speed, "_take_step", record)
    assignments = [f"schedule.neighbor_bias_steps={num_steps}", "run.max_eval_sequences=8"]
    assignments += ["data.masking_rate=0.6", "data.final_masking_rate=0.1"]
    assignments += ["model.layers=1", "model.width=16", "model.heads=2", "model.feed_forward=32"]
    settings = resolve_steps(resolve(assignments=assignments), 8)
    session = Session(settings, Store.open(store))
    speed.measure_cost(session, 0.2)
    assert not any(steps_have_bias)
    session.has_static_shapes = True
    speed.measure_cost(session, 0.2)
    assert any(steps_have_bias) == (num_steps > 0)
    # The graph depends on the number of predictions, and the masking rate of the run falls.
    first_batch = next(session.build_objective(StepDuration(1000)).iter_batches(0))
    assert num_biased_predictions == [len(first_batch[0].masked_labels)] * (num_steps > 0)


def test_resumed_run_has_the_same_bytes(train: TrainFunction, tmp_path: Path) -> None:
    """A run resumed with and without the bias ends with the bytes of an uninterrupted one."""
    train("uninterrupted", **ARGUMENTS)
    for last_step in (2, 5):
        run = tmp_path / f"run-{last_step}"
        copy_interrupted_run(tmp_path / "uninterrupted", run, last_step)
        train(run.name, **ARGUMENTS)
        for folder in ("model", f"{CHECKPOINTS_DIR}/step-8"):
            assert_same_weights(run / folder, tmp_path / "uninterrupted" / folder)


def test_compiled_losses_are_those_of_eager_mode(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled graph with the bias has the losses of eager mode, other than without bias.

    The graph is the one that torch.compile records; test_resume.py also generates code from it.
    """
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def list_losses(name: str, **options: Any) -> list[float]:
        train(name, **ARGUMENTS | options)
        lines = read_metrics(tmp_path / name)
        return [line["mlm_loss"] for line in lines if line["kind"] == "train"]

    eager = list_losses("eager")
    assert list_losses("compiled", run__compile="true") == pytest.approx(eager, rel=1e-5)
    assert list_losses("unbiased", schedule__neighbor_bias_steps=0) != pytest.approx(
        eager, rel=1e-5
    )
