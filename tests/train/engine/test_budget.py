"""Time budgets: number of steps and evaluations, and the revision of the number of steps."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import RunError
from bertsmith.settings import read_toml
from bertsmith.train.engine.budget import RevisedSchedule, TimeBudget
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.probe import Cost, is_noisy
from bertsmith.train.pretraining.recipes import PretrainSettings, resolve_time_budget
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import TrainFunction

COST = Cost(
    step_seconds=0.1,
    evaluation_seconds=0.0,
    peak_memory_bytes=0,
    peak_macs_per_second=1e9,
    mfu=0.1,
    tokens_per_step=100.0,
    num_eval_sequences=512,
)


def _make_settings(**run: Any) -> PretrainSettings:
    """Return settings with a time budget; keywords are settings of the section run."""
    return PretrainSettings.parse(
        {"model": {"vocab_size": 9}, "schedule": {"minutes": 0.5}, "run": run}, "the test"
    )


@pytest.mark.parametrize("seconds", [6.0, 30.0, 180.0, 3600.0])
@pytest.mark.parametrize("evaluation_seconds", [0.0, 0.01, 0.5, 1.5, 10.0, 100.0])
@pytest.mark.parametrize("eval_every", [None, 1, 250])
def test_evaluations_take_at_most_a_tenth_of_the_budget(
    seconds: float, evaluation_seconds: float, eval_every: int | None
) -> None:
    """Slow evaluations take at most a tenth of the budget, and steps take the rest."""
    settings = resolve_time_budget(
        _make_settings(eval_every=eval_every),
        replace(COST, evaluation_seconds=evaluation_seconds),
        seconds,
    )
    steps, resolved_every = settings.schedule.total_steps(), settings.run.eval_every
    assert resolved_every is not None
    seconds_per_evaluation = evaluation_seconds * settings.run.max_eval_sequences / 512
    eval_seconds = math.ceil(steps / resolved_every) * seconds_per_evaluation
    assert eval_seconds <= 0.1 * seconds + 1e-9
    # Rounding the interval down may add a few evaluations.
    max_seconds = seconds + 3 * seconds_per_evaluation + 1e-9
    assert 0.88 * seconds <= steps * COST.step_seconds + eval_seconds <= max_seconds


def test_short_budget_has_few_evaluations() -> None:
    """A budget of 30 s has two evaluations of 1.5 s; one that takes 6 s gets fewer sequences."""
    settings = resolve_time_budget(_make_settings(), replace(COST, evaluation_seconds=1.5), 30.0)
    assert settings.schedule.total_steps() == 270
    assert (settings.run.eval_every, settings.run.max_eval_sequences) == (135, 512)
    slow = resolve_time_budget(_make_settings(), replace(COST, evaluation_seconds=6.0), 30.0)
    assert (slow.run.eval_every, slow.run.max_eval_sequences) == (slow.schedule.total_steps(), 256)


def test_fast_evaluations_keep_the_default_interval() -> None:
    """With fast evaluations, both intervals are a twentieth of the run.

    A run of a minute has a checkpoint every 30 s, which is 300 steps of 0.1 s.
    """
    settings = resolve_time_budget(_make_settings(), replace(COST, evaluation_seconds=0.01), 1800.0)
    steps = settings.schedule.total_steps()
    assert steps == 17998
    assert (settings.run.eval_every, settings.checkpoint.every) == (steps // 20, steps // 20)
    assert resolve_time_budget(_make_settings(), COST, 60.0).checkpoint.every == 300


class SimulatedRun:
    """Simulates a run with a fake clock; its first step starts after 10 s of the budget."""

    def __init__(self, seconds: float = 100.0, min_steps: int = 1) -> None:
        self.now = 10.0
        self.budget = TimeBudget(seconds, 0.0, min_steps, clock=lambda: self.now)
        self.budget.start(0.0)

    def take_steps(
        self, step_seconds: Callable[[int], float], steps: int, evaluation_seconds: float = 0.0
    ) -> RevisedSchedule | None:
        """Take steps until the budget revises their number, or to the last step.

        Args:
            step_seconds: Returns the duration of a step.
            steps: Number of steps.
            evaluation_seconds: Duration of an evaluation, every 10 steps.
        """
        for step in range(steps):
            self.now += step_seconds(step)
            self.budget.add_step(step_seconds(step))
            if step % 10 == 9:
                self.now += evaluation_seconds
            revision = self.budget.revise(step + 1, steps)
            if revision is not None:
                return revision
        return None


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.2, 1.4])
def test_run_within_the_tolerance_is_not_revised(factor: float) -> None:
    """A run whose steps take 0.75 to 1.4 times the expected time keeps its number of steps."""
    assert SimulatedRun().take_steps(lambda _: 0.1 * factor, 900) is None


def test_slow_run_gets_fewer_steps() -> None:
    """A run with steps 5 times slower than expected gets fewer steps and meets its budget."""
    simulation = SimulatedRun()
    revision = simulation.take_steps(lambda _: 0.5, 900)
    assert revision is not None
    assert revision.step_seconds == pytest.approx(0.5)
    assert revision.step == 21
    assert revision.expected_seconds == pytest.approx(10 + 21 * 0.5 + 879 * 0.525)
    end_time = simulation.now + (revision.steps - revision.step) * 0.5
    assert 93 < end_time <= 100


def test_fast_run_gets_more_steps() -> None:
    """A run with steps twice as fast as expected gets about twice the steps."""
    simulation = SimulatedRun()
    revision = simulation.take_steps(lambda _: 0.05, 900)
    assert revision is not None
    assert revision.steps > 1600
    assert 93 < simulation.now + (revision.steps - revision.step) * 0.05 <= 100


def test_late_slowdown_is_detected() -> None:
    """Steps that become slow late in the run cause a revision, based on the recent step times."""
    simulation = SimulatedRun()
    revision = simulation.take_steps(lambda step: 0.1 if step < 450 else 1.0, 900)
    assert revision is not None
    assert 450 < revision.step < 470
    assert revision.step_seconds == pytest.approx(1.0)
    assert simulation.now + (revision.steps - revision.step) * 1.0 < 106


def test_short_disturbance_is_ignored() -> None:
    """A few slow steps cause no revision, because the following steps are fast again."""
    assert SimulatedRun().take_steps(lambda step: 1.0 if 100 <= step < 104 else 0.1, 850) is None


def test_late_run_keeps_steps_for_the_decay() -> None:
    """A run that has used up its budget still gets 5 % more steps, in which the rate decays."""
    revision = SimulatedRun().take_steps(lambda step: 0.1 if step != 400 else 400.0, 900)
    assert revision is not None
    assert revision.steps == revision.step + math.ceil(0.05 * revision.step)


def test_slow_evaluations_cause_a_revision() -> None:
    """A run with slow evaluations gets fewer steps, although its steps are as fast as expected."""
    revision = SimulatedRun().take_steps(lambda _: 0.1, 900, evaluation_seconds=2.0)
    assert revision is not None
    assert revision.steps < 400


def test_first_step_and_minimum_steps_cause_no_revision() -> None:
    """The first step is not measured, and the number of steps never falls below ``min_steps``."""
    assert SimulatedRun().take_steps(lambda _: 50.0, 1) is None
    assert SimulatedRun().take_steps(lambda step: 9.0 if step == 0 else 0.1, 90) is None
    assert SimulatedRun(min_steps=900).take_steps(lambda _: 0.5, 900) is None


def test_times_are_noisy_if_a_quarter_of_the_steps_is_slow() -> None:
    """One slow step in five is no noise; if half of the steps take twice as long, that is noise."""
    assert not is_noisy([1.0, 1.1, 1.0, 1.2, 5.0])
    assert is_noisy([1.0, 2.0, 1.0, 2.1, 1.0, 2.0])
    assert not is_noisy([1.0, 9.0])


def _revise_at_step_4(self: TimeBudget, step: int, steps: int) -> RevisedSchedule | None:
    return RevisedSchedule(4, 8, 1.0, 60.0) if step == 4 and steps > 8 else None


def _fail_if_called(*_: Any) -> Any:
    raise AssertionError("called again")


def test_revision_is_stored_and_used_by_a_resumed_run(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed after a revision ends with the same weights as an uninterrupted run."""
    arguments = {"minutes": 1.0, "checkpoint__every": 2, "checkpoint__keep": 9,
                 "checkpoint__keep_optimizer": "true"}  # fmt: skip
    cost = replace(COST, step_seconds=2.0, evaluation_seconds=0.3)
    monkeypatch.setattr(Session, "measure_cost", lambda *_: cost)
    monkeypatch.setattr(TimeBudget, "revise", _revise_at_step_4)
    result = train(**arguments)
    run = tmp_path / "run"
    schedule = read_toml(run / "settings.toml")["schedule"]
    assert (schedule["steps"], schedule["replanned_at"]) == (8, 4)
    assert 10 < schedule["planned_steps"] <= 30
    assert (result.steps, result.outcome.state.step) == (8, 8)
    train_lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == [*range(1, 9)]
    lrs = [line["lr"] for line in train_lines]
    assert all(second < first for first, second in pairwise(lrs[4:]))
    assert lrs[4] > 0.5 * max(lrs)
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "heldout"][-1] == 8
    weights = (run / "model" / "model.safetensors").read_bytes()
    monkeypatch.setattr(Session, "measure_cost", _fail_if_called)
    monkeypatch.setattr(TimeBudget, "revise", _fail_if_called)
    for last_step in (6, 4, 2):
        for step, directory in list_checkpoints(run):
            if step > last_step:
                directory.rename(tmp_path / f"{last_step}-{step}")
        (run / "model").rename(tmp_path / f"model-{last_step}")
        train(**arguments)
        assert (run / "model" / "model.safetensors").read_bytes() == weights
    with pytest.raises(RunError, match=r"schedule\.minutes: 1\.0 in the run, 2\.0 now"):
        train(**{**arguments, "minutes": 2.0})


def test_budget_overrides_the_evaluation_settings_of_the_user(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow evaluations are fewer and shorter than the user has set, to meet the time budget."""
    cost = replace(COST, step_seconds=0.5, evaluation_seconds=4.0, num_eval_sequences=8)
    monkeypatch.setattr(Session, "measure_cost", lambda *_: cost)
    monkeypatch.setattr(TimeBudget, "revise", lambda *_: None)
    arguments = {"minutes": 0.2, "run__eval_every": 2, "run__max_eval_sequences": 8}
    result = train(**arguments)
    settings = read_toml(tmp_path / "run" / "settings.toml")
    assert settings["run"]["eval_every"] == settings["schedule"]["steps"] == result.steps
    assert 1 <= settings["run"]["max_eval_sequences"] <= 2
    heldout = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "heldout"]
    assert [line["step"] for line in heldout] == [result.steps]
    monkeypatch.setattr(Session, "measure_cost", _fail_if_called)
    assert train(**arguments).steps == result.steps
