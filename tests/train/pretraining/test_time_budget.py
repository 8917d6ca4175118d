"""Runs with a time budget: resuming, the data of a resumed run, and runs of earlier versions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.stream import EndlessStream
from bertsmith.errors import RunError
from bertsmith.settings import read_toml
from bertsmith.train.engine import loop, probe
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.probe import Cost, is_noisy
from bertsmith.train.engine.step import take_step
from bertsmith.train.engine.time_duration import TimeDuration
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.train.pretraining import speed
from bertsmith.train.pretraining.estimate import estimate_run
from bertsmith.train.pretraining.recipes import (
    PretrainSettings,
    estimate_num_steps,
    limit_evaluation,
)
from tests.train.conftest import RecordingProgress, TrainFunction, make_assignments

COST = Cost(
    step_seconds=0.1,
    evaluation_seconds=0.0,
    peak_memory_bytes=0,
    peak_macs_per_second=1e9,
    mfu=0.1,
    tokens_per_step=100.0,
    num_eval_sequences=512,
)
#: A budget without time for a step, so that the minimum of steps is taken.
NO_TIME = {"minutes": 1e-6, "schedule__warmup_steps": 0}
#: A budget that is not used up in the tests.
MUCH_TIME = {"minutes": 60.0, "checkpoint__steps": 2, "checkpoint__keep_optimizer": "true"}


class KilledError(Exception):
    """Ends a run where a test simulates a SIGKILL."""


@pytest.fixture(autouse=True)
def skip_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the probe before a run."""
    monkeypatch.setattr(speed, "measure_cost", lambda *_: COST)


def _kill_before_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the run with KilledError before ``step`` (from 0)."""

    def take_step_or_raise(*arguments: Any, **options: Any) -> Any:
        if options["step"] == step:
            raise KilledError
        return take_step(*arguments, **options)

    monkeypatch.setattr(loop, "take_step", take_step_or_raise)


def _finish_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Finish a run with a time budget after ``steps`` steps."""
    monkeypatch.setattr(TimeDuration, "is_finished", lambda _, step: step >= steps)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Records (first epoch, first example, size) of each batch that is computed."""
    recorded_batches: list[tuple[int, int, int]] = []
    compute_batch: Callable[..., Any] = EndlessStream.batch

    def record(
        self: EndlessStream, first: int, count: int, *rate: float | None, **options: bool
    ) -> Any:
        recorded_batches.append((self._first_epoch, first, count))
        return compute_batch(self, first, count, *rate, **options)

    monkeypatch.setattr(EndlessStream, "batch", record)
    return recorded_batches


def test_finished_run_stores_its_number_of_steps(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run has a number of steps, in its settings and its model; it is not repeated."""
    result = train(**NO_TIME, schedule__min_steps=3)
    assert (result.steps, result.outcome.state.step) == (3, 3)
    schedule = read_toml(tmp_path / "run" / "settings.toml")["schedule"]
    assert (schedule["steps"], schedule["minutes"]) == (3, 1e-6)
    info = json.loads((tmp_path / "run" / "model" / "bertsmith.json").read_text())
    assert info["provenance"]["settings"]["schedule"]["steps"] == 3
    # The time of the evaluation is not a metric of the model.
    assert "mlm_loss" in info["heldout_metrics"]
    assert "elapsed_seconds" not in info["heldout_metrics"]
    lines = read_metrics(tmp_path / "run")
    assert [(line["step"], line["kind"]) for line in lines][-2:] == [(3, "train"), (3, "heldout")]
    assert all(line["elapsed_seconds"] > 0 for line in lines)
    monkeypatch.setattr(loop, "take_step", None)
    assert train(**NO_TIME, schedule__min_steps=3).steps == 3
    assert read_metrics(tmp_path / "run") == lines
    with pytest.raises(RunError, match=r"schedule\.minutes: 1e-06 in the run, 0\.2 now"):
        train(**{**NO_TIME, "minutes": 0.2}, schedule__min_steps=3)


def test_resumed_run_continues_data_and_time(
    train: TrainFunction,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batches: list[tuple[int, int, int]],
) -> None:
    """A run killed in step 5 continues with the examples after step 4 and with its used time.

    The second phase starts with step 3, and keeps its examples when the run is resumed.
    """
    arguments = {**MUCH_TIME, "schedule__phase2_max_seqlen": 64, "schedule__phase2_fraction": 0.5}
    monkeypatch.setattr(TimeDuration, "is_in_last", lambda _self, step, _fraction: step >= 3)
    with monkeypatch.context() as patch:
        _kill_before_step(patch, 5)
        with pytest.raises(KilledError):
            train(**arguments)
    run = tmp_path / "run"
    assert [step for step, _ in list_checkpoints(run)] == [2, 4]
    assert "steps" not in read_toml(run / "settings.toml")["schedule"]
    assert batches[:5] == [(0, 0, 4), (0, 4, 4), (0, 8, 4), (1, 0, 4), (1, 4, 4)]
    state = json.loads((run / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["data_state"] == {
        "phase": 1, "first_epoch": 1, "example": 4, "num_epochs": 0, "epoch_start": 0,
        "is_causal_over": True,
    }  # fmt: skip
    assert 0 < state["start_seconds"] < state["elapsed_seconds"]
    (run / "elapsed.json").write_text('{"elapsed_seconds": 1000.0}')
    batches.clear()
    # The second phase does not end, even if a new measurement says that it has not started.
    monkeypatch.setattr(TimeDuration, "is_in_last", lambda *_: False)
    _finish_after(monkeypatch, 6)
    monkeypatch.setattr(speed, "measure_cost", None)
    assert train(**arguments).steps == 6
    assert batches[:2] == [(1, 4, 4), (1, 8, 4)]
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [*range(1, 7)]
    # Step 4 is in the warm-up. Step 5 comes after 1000 s, which are 28 % of the budget.
    peak_lr = read_toml(run / "settings.toml")["optim"]["lr"]
    assert lines[3]["lr"] < 0.01 * peak_lr
    assert lines[4]["lr"] == pytest.approx((1 - 1000 / 3600) * peak_lr, rel=0.02)
    assert json.loads((run / "elapsed.json").read_text())["elapsed_seconds"] > 1000


def test_used_up_budget_ends_with_an_evaluation_and_a_model(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed after its last step takes no further step, is evaluated, and writes its model.

    Its last checkpoint says that no time was left.
    """
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        _kill_before_step(patch, 5)
        patch.setattr(TimeDuration, "remaining_seconds", 0.0)
        with pytest.raises(KilledError):
            train(**MUCH_TIME)
    assert write_latest_snapshot(run, tmp_path / "snapshot") == (4, None)
    (run / "elapsed.json").write_text('{"elapsed_seconds": 3600.0}')
    monkeypatch.setattr(loop, "take_step", None)
    result = train(**MUCH_TIME)
    assert result.steps == 4
    assert result.heldout["mlm_loss"] > 0
    assert (run / "model" / "model.safetensors").exists()
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "heldout"] == [4]
    assert train(**MUCH_TIME).steps == 4
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "heldout"] == [4]


def test_run_killed_after_its_budget_trains_until_the_rate_is_zero(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed before its last step takes more steps, in which the learning rate falls to 0."""
    arguments = {**MUCH_TIME, "minutes": 0.1, "schedule__warmup_steps": 0}
    with monkeypatch.context() as patch:
        _kill_before_step(patch, 5)
        with pytest.raises(KilledError):
            train(**arguments)
    run = tmp_path / "run"
    (run / "elapsed.json").write_text('{"elapsed_seconds": 6.0}')
    train(**arguments)
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    rates = [line["lr"] for line in lines if line["elapsed_seconds"] > 6]
    assert len(rates) >= 2
    peak_lr = read_toml(run / "settings.toml")["optim"]["lr"]
    assert rates[0] < 0.2 * peak_lr
    assert rates[-1] < 0.5 * rates[0]


def test_run_of_an_earlier_version_is_resumed(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with a number of steps that an earlier version revised keeps this number."""
    with monkeypatch.context() as patch:
        _kill_before_step(patch, 5)
        with pytest.raises(KilledError):
            train(**{**MUCH_TIME, "minutes": None, "steps": 8})
    path = tmp_path / "run" / "settings.toml"
    old = "[schedule]\nminutes = 60.0\nreplanned_at = 3\nplanned_steps = 20"
    path.write_text(path.read_text().replace("[schedule]", old))
    result = train(**MUCH_TIME)
    assert (result.steps, result.outcome.state.step) == (8, 8)
    assert not (tmp_path / "run" / "elapsed.json").exists()


def test_probe_does_not_change_the_weights(
    train: TrainFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with a time budget ends with the same bytes as one with that number of steps."""
    monkeypatch.undo()
    monkeypatch.setattr(probe, "_MAX_STEPS", 3)
    with_budget = train("budget", **NO_TIME, schedule__min_steps=5)
    with_steps = train("steps", steps=5, schedule__warmup_steps=0)
    name = "model/model.safetensors"
    assert (with_budget.run / name).read_bytes() == (with_steps.run / name).read_bytes()


def test_plan_of_slow_steps_measures_a_part(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If steps are slow, the plan is extrapolated from a part of a step, and says so."""
    monkeypatch.undo()
    monkeypatch.setattr(probe, "_MAX_STEPS", 3)
    arguments: dict[str, Any] = {"steps": 8, "assignments": make_assignments()}
    fast = estimate_run(store, **arguments)
    monkeypatch.setattr(probe, "measure_slow_step", lambda *_: 500.0)
    slow = estimate_run(store, **arguments)
    assert (fast["is_extrapolated"], slow["is_extrapolated"]) == (False, True)
    assert slow["minutes"] == pytest.approx(8 * 500 / 60, rel=0.01)
    assert slow["tokens"] == pytest.approx(fast["tokens"], rel=0.2)


def _make_settings(**run: Any) -> PretrainSettings:
    """Return settings with a time budget; keywords are settings of the section run."""
    return PretrainSettings.parse(
        {"model": {"vocab_size": 9}, "schedule": {"minutes": 0.5}, "run": run}, "the test"
    )


def test_slow_evaluations_have_fewer_sequences() -> None:
    """An evaluation takes at most a fortieth of the budget."""
    settings = _make_settings()
    assert limit_evaluation(settings, replace(COST, evaluation_seconds=0.75), 30.0) == settings
    slow = limit_evaluation(settings, replace(COST, evaluation_seconds=1.5), 30.0)
    assert slow.run.max_eval_sequences == 256


@pytest.mark.parametrize(
    ("eval_every", "evaluation_seconds", "expected"),
    [(None, 0.0, (300, 20)), (None, 1.5, (270, 2)), (100, 0.01, (299, 2)), (None, 3.0, (270, 1))],
)
def test_steps_and_evaluations_are_estimated(
    eval_every: int | None, evaluation_seconds: float, expected: tuple[int, int]
) -> None:
    """The estimated steps fill 30 s, together with evaluations that take at most a tenth of it."""
    settings = _make_settings(eval_every=eval_every)
    cost = replace(COST, evaluation_seconds=evaluation_seconds)
    assert estimate_num_steps(settings, cost, 30.0) == expected


def test_expected_steps_are_logged(train: TrainFunction) -> None:
    """A run with a time budget logs the expected number of steps."""
    progress = RecordingProgress()
    train(minutes=1e-6, progress=progress)
    assert any(message.startswith("about 1 step in 1e-06 minutes") for message in progress.messages)


def test_times_are_noisy_if_a_quarter_of_the_steps_is_slow() -> None:
    """One slow step in five is not noise, but three slow steps in six are."""
    assert not is_noisy([1.0, 1.1, 1.0, 1.2, 5.0])
    assert is_noisy([1.0, 2.0, 1.0, 2.1, 1.0, 2.0])
    assert not is_noisy([1.0, 9.0])
