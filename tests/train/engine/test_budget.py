"""Time budgets: how many steps and evaluations fit, and one new plan if the pace differs."""

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
from bertsmith.train.pretraining.recipes import PretrainSettings, with_budget
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import Train

COST = Cost(
    step_seconds=0.1,
    evaluation_seconds=0.0,
    peak_memory_bytes=0,
    peak_macs=1e9,
    mfu=0.1,
    tokens_per_step=100.0,
    eval_sequences=512,
)


def _settings(**run: Any) -> PretrainSettings:
    return PretrainSettings.parse(
        {"model": {"vocab_size": 9}, "schedule": {"minutes": 0.5}, "run": run}, "the test"
    )


@pytest.mark.parametrize("seconds", [6.0, 30.0, 180.0, 3600.0])
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.5, 1.5, 10.0, 100.0])
@pytest.mark.parametrize("every", [None, 1, 250])
def test_evaluations_take_a_tenth_of_the_time_at_most(
    seconds: float, pause: float, every: int | None
) -> None:
    """However long an evaluation is, one of them fits, and the other time is left for steps."""
    settings = with_budget(
        _settings(eval_every=every), replace(COST, evaluation_seconds=pause), seconds
    )
    steps, chosen = settings.schedule.total_steps(), settings.run.eval_every
    assert chosen is not None
    share = settings.run.eval_sequences / 512
    evaluating = math.ceil(steps / chosen) * pause * share
    assert evaluating <= 0.1 * seconds + 1e-9
    # An interval that is rounded down may give some evaluations more.
    most = seconds + 3 * pause * share + 1e-9
    assert 0.88 * seconds <= steps * COST.step_seconds + evaluating <= most


def test_half_a_minute_is_not_spent_on_evaluations() -> None:
    """Evaluations of 1.5 s, twenty of which take half a minute, left time for a single step."""
    settings = with_budget(_settings(), replace(COST, evaluation_seconds=1.5), 30.0)
    assert settings.schedule.total_steps() == 270
    assert (settings.run.eval_every, settings.run.eval_sequences) == (135, 512)
    slow = with_budget(_settings(), replace(COST, evaluation_seconds=6.0), 30.0)
    assert (slow.run.eval_every, slow.run.eval_sequences) == (slow.schedule.total_steps(), 256)


def test_short_evaluations_stay_as_usual() -> None:
    """Where evaluations are short, each twentieth of the run has one; so has a checkpoint.

    In a short run checkpoints are half a minute apart.
    """
    settings = with_budget(_settings(), replace(COST, evaluation_seconds=0.01), 1800.0)
    steps = settings.schedule.total_steps()
    assert steps == 17998
    assert (settings.run.eval_every, settings.checkpoint.every) == (steps // 20, steps // 20)
    assert with_budget(_settings(), COST, 60.0).checkpoint.every == 300


class Machine:
    """A fake clock, and a run on it: steps of so many seconds, and a pause after some of them."""

    def __init__(self, seconds: float = 100.0, min_steps: int = 1) -> None:
        self.now = 10.0
        self.budget = TimeBudget(seconds, 0.0, min_steps, clock=lambda: self.now)
        self.budget.start(0.0)

    def run(
        self, step_seconds: Callable[[int], float], steps: int, pause: float = 0.0
    ) -> RevisedSchedule | None:
        """Take steps until there is a new plan or all are taken."""
        for step in range(steps):
            self.now += step_seconds(step)
            self.budget.add_step(step_seconds(step))
            if step % 10 == 9:
                self.now += pause
            if (replan := self.budget.revise(step + 1, steps)) is not None:
                return replan
        return None


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.2, 1.4])
def test_a_run_near_its_plan_goes_on(factor: float) -> None:
    """Ten seconds of start-up and a pace within the tolerance: the plan stays."""
    assert Machine().run(lambda _: 0.1 * factor, 900) is None


def test_a_slow_run_gets_fewer_steps_that_meet_the_budget() -> None:
    """Five times slower than planned: after a tenth of the time, steps for the rest of it."""
    machine = Machine()
    replan = machine.run(lambda _: 0.5, 900)
    assert replan is not None
    assert replan.step_seconds == pytest.approx(0.5)
    assert replan.step == 21
    assert replan.expected_seconds == pytest.approx(10 + 21 * 0.5 + 879 * 0.525)
    finish = machine.now + (replan.steps - replan.step) * 0.5
    assert 93 < finish <= 100


def test_a_fast_run_gets_more_steps() -> None:
    """A probe on a machine that was busy: twice as fast gives about twice the steps."""
    machine = Machine()
    replan = machine.run(lambda _: 0.05, 900)
    assert replan is not None
    assert replan.steps > 1600
    assert 93 < machine.now + (replan.steps - replan.step) * 0.05 <= 100


def test_a_machine_that_becomes_slow_later_is_noticed() -> None:
    """The pace is that of the steps since it changed, not of the whole run."""
    machine = Machine()
    replan = machine.run(lambda step: 0.1 if step < 450 else 1.0, 900)
    assert replan is not None
    assert 450 < replan.step < 470
    assert replan.step_seconds == pytest.approx(1.0)
    assert machine.now + (replan.steps - replan.step) * 1.0 < 106


def test_a_short_disturbance_changes_nothing() -> None:
    """Some slow steps are noticed, but not confirmed by those that follow."""
    assert Machine().run(lambda step: 1.0 if 100 <= step < 104 else 0.1, 850) is None


def test_the_learning_rate_has_steps_to_fall_however_late_it_is() -> None:
    """Stopped for longer than its budget, a run still ends with a twentieth of its steps."""
    machine = Machine()
    replan = machine.run(lambda step: 0.1 if step != 400 else 400.0, 900)
    assert replan is not None
    assert replan.steps == replan.step + math.ceil(0.05 * replan.step)


def test_long_evaluations_count() -> None:
    """Pauses that were measured are part of what the remaining steps take."""
    machine = Machine()
    replan = machine.run(lambda _: 0.1, 900, pause=2.0)
    assert replan is not None
    assert replan.steps < 400


def test_the_first_steps_decide_nothing() -> None:
    """A first step that warms up, and less than a tenth of the time, are no measurement."""
    machine = Machine()
    assert machine.run(lambda _: 50.0, 1) is None
    assert Machine().run(lambda step: 9.0 if step == 0 else 0.1, 90) is None
    assert Machine(min_steps=900).run(lambda _: 0.5, 900) is None


def test_noise_is_a_quarter_of_slow_steps() -> None:
    """One slow step is none; a quarter of them at twice the time is."""
    assert not is_noisy([1.0, 1.1, 1.0, 1.2, 5.0])
    assert is_noisy([1.0, 2.0, 1.0, 2.1, 1.0, 2.0])
    assert not is_noisy([1.0, 9.0])


def _replans_once(self: TimeBudget, step: int, steps: int) -> RevisedSchedule | None:
    return RevisedSchedule(4, 8, 1.0, 60.0) if step == 4 and steps > 8 else None


def _refuses(*_: Any) -> Any:
    raise AssertionError("planned or probed again")


def test_a_new_plan_is_recorded_and_a_resumed_run_follows_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the new plan, a run ends with the bytes of one that was not killed."""
    many = {"minutes": 1.0, "checkpoint__every": 2, "checkpoint__keep": 9,
            "checkpoint__keep_optimizer": "true"}  # fmt: skip
    monkeypatch.setattr(
        Session, "measure", lambda *_: replace(COST, step_seconds=2.0, evaluation_seconds=0.3)
    )
    monkeypatch.setattr(TimeBudget, "replan", _replans_once)
    result = train(**many)
    stored = read_toml(tmp_path / "run" / "settings.toml")["schedule"]
    planned = stored["planned_steps"]
    assert (stored["steps"], stored["replanned_at"]) == (8, 4)
    assert 10 < planned <= 30
    assert (result.steps, result.outcome.state.step) == (8, 8)
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [*range(1, 9)]
    rates = [line["lr"] for line in lines]
    assert all(second < first for first, second in pairwise(rates[4:]))
    assert rates[4] > 0.5 * max(rates)
    assert [line["step"] for line in read_metrics(tmp_path / "run") if line["kind"] == "heldout"][
        -1
    ] == 8
    name = "model/model.safetensors"
    weights = (tmp_path / "run" / name).read_bytes()
    monkeypatch.setattr(Session, "measure", _refuses)
    monkeypatch.setattr(TimeBudget, "replan", _refuses)
    for last in (6, 4, 2):
        for step, directory in list_checkpoints(tmp_path / "run"):
            if step > last:
                directory.rename(tmp_path / f"{last}-{step}")
        (tmp_path / "run" / "model").rename(tmp_path / f"model-{last}")
        train(**many)
        assert (tmp_path / "run" / name).read_bytes() == weights
    with pytest.raises(RunError, match=r"schedule\.minutes: 1\.0 there, 2\.0 now"):
        train(**{**many, "minutes": 2.0})


def test_settings_of_evaluations_are_those_of_the_budget(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations that were asked for are limited too; the same command resumes the run."""
    monkeypatch.setattr(
        Session,
        "measure",
        lambda *_: replace(COST, step_seconds=0.5, evaluation_seconds=4.0, eval_sequences=8),
    )
    monkeypatch.setattr(TimeBudget, "replan", lambda *_: None)
    many = {"minutes": 0.2, "run__eval_every": 2, "run__eval_sequences": 8}
    first = train(**many)
    stored = read_toml(tmp_path / "run" / "settings.toml")
    assert stored["run"]["eval_every"] == stored["schedule"]["steps"] == first.steps
    assert 1 <= stored["run"]["eval_sequences"] <= 2
    assert [
        line["step"] for line in read_metrics(tmp_path / "run") if line["kind"] == "heldout"
    ] == [first.steps]
    monkeypatch.setattr(Session, "measure", _refuses)
    assert train(**many).steps == first.steps
