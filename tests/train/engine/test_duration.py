"""Durations: runs by steps, and runs by wall-clock time simulated with a fake clock."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bertsmith.train.engine import run_clock
from bertsmith.train.engine.duration import StepDuration, get_default_interval
from bertsmith.train.engine.run_clock import ELAPSED_FILE, RunClock
from bertsmith.train.engine.schedule import ScheduleSettings, compute_lr_factor
from bertsmith.train.engine.time_duration import TimeDuration


class SimulatedRun:
    """Simulates a run with a fake clock, without sleeping.

    Attributes:
        now: Current time; the command starts at 0.
        load: Factor by which everything takes longer.
        step: Completed steps.
        evaluations: Time at the end of each evaluation, without the final one.
        checkpoints: Time at the end of each checkpoint, without the final one.
        factors: Learning rate factor of each step.
        fractions: Completed fraction before each step.
    """

    def __init__(
        self,
        run: Path,
        seconds: float,
        step_seconds: Callable[[int], float] = lambda _: 0.05,
        evaluation_seconds: float = 0.2,
        min_steps: int = 1,
        start: float = 8.0,
        warmup_steps: int = 10_000,
        load: float = 1.0,
        is_step_time_known: bool = True,
    ) -> None:
        self.now = start
        self.load = load
        self.step = 0
        self.seconds = seconds
        self.step_seconds = step_seconds
        self.evaluation_seconds = evaluation_seconds
        self.clock = RunClock(run, 0.0, clock=lambda: self.now)
        self.duration = TimeDuration(
            seconds,
            self.clock,
            step_seconds=step_seconds(0) * load * is_step_time_known,
            evaluation_seconds=evaluation_seconds * load,
            checkpoint_seconds=0.3 * load,
            curve_seconds=0.3 * load,
            min_steps=min_steps,
            max_checkpoint_seconds=600.0,
        )
        self.settings = ScheduleSettings(minutes=seconds / 60, warmup_steps=warmup_steps)
        self.evaluations: list[float] = []
        self.checkpoints: list[float] = []
        self.factors: list[float] = []
        self.fractions: list[float] = []

    def _spend(self, seconds: float) -> float:
        """Advance the clock by ``seconds`` without load, and return the time with load."""
        self.now += seconds * self.load
        return seconds * self.load

    def train(
        self,
        load: Callable[[float], float] = lambda _: 1.0,
        stop: float = float("inf"),
        eval_every: int | None = None,
        pause: tuple[int, float] = (-1, 0.0),
    ) -> None:
        """Take steps until the run is finished or the time is ``stop``.

        Args:
            load: Returns the load at a time.
            stop: Time at which the process is killed.
            eval_every: Steps between two evaluations; None: the default.
            pause: A step, and the seconds for which the process is stopped during this step.
        """
        while not self.duration.is_finished(self.step) and self.now < stop:
            self.load = load(self.now)
            self.fractions.append(self.duration.compute_completed_fraction(self.step))
            self.factors.append(compute_lr_factor(self.step, self.settings, self.duration))
            macs = self.step_seconds(self.step) * 1e9
            seconds = self._spend(self.step_seconds(self.step))
            if self.step == pause[0]:
                self.now += pause[1]
                seconds += pause[1]
            self.duration.record_step(seconds, macs)
            self.step += 1
            if self.duration.is_finished(self.step):
                break
            if self.duration.is_evaluation_due(self.step, eval_every):
                self.duration.record_evaluation(self._spend(self.evaluation_seconds))
                self.evaluations.append(self.now)
            if self.duration.is_checkpoint_due(self.step, None, is_best=False):
                self.duration.start_checkpoint()
                self.duration.record_checkpoint(self._spend(0.3))
                self.checkpoints.append(self.now)

    def finish(self, load: Callable[[float], float] = lambda _: 1.0) -> float:
        """Return the time at the end of the process: after the final evaluation and the files."""
        for _ in range(100):
            self.load = load(self.now)
            self._spend((self.evaluation_seconds + 0.3 + 0.15 + 4 * 0.3) / 100)
        return self.now


def _start(run: SimulatedRun) -> SimulatedRun:
    """Start a new run, and return it."""
    run.duration.start(step=0, seconds=0.0, elapsed_seconds=0.0, start_seconds=None)
    return run


@pytest.mark.parametrize("seconds", [60.0, 300.0, 3600.0])
@pytest.mark.parametrize("evaluation_seconds", [0.01, 0.5, 2.0])
@pytest.mark.parametrize(
    "load",
    [
        lambda _: 1.0,
        lambda _: 4.0,
        lambda time: 1.0 if time < 30 else 2.5,
        lambda time: 3.0 if time < 30 else 1.0,
        lambda time: 1.0 + int(time) % 2,
    ],
)
def test_run_ends_within_two_percent_of_its_budget(
    tmp_path: Path, seconds: float, evaluation_seconds: float, load: Callable[[float], float]
) -> None:
    """Under constant, rising, falling and changing load, a run ends within 2 % of its budget."""
    run = SimulatedRun(
        tmp_path, seconds, lambda _: seconds / 1200, evaluation_seconds, load=load(8.0)
    )
    _start(run).train(load)
    assert run.finish(load) == pytest.approx(seconds, rel=0.02)


def test_first_step_changes_the_weights(tmp_path: Path) -> None:
    """In a run of three steps, the rate of the first one is not 0."""
    run = _start(SimulatedRun(tmp_path, 30.0, lambda _: 8.0, start=4.0))
    run.train()
    assert run.step == 3
    assert run.factors[0] > 0.5


@pytest.mark.parametrize("slow_step", [1, 2, 300])
def test_slow_step_does_not_change_the_time_of_the_end(tmp_path: Path, slow_step: int) -> None:
    """A pause of 25 s in a step of 0.1 s is not mistaken for a load that lasts."""
    run = SimulatedRun(tmp_path, 100.0, lambda _: 0.1)
    _start(run).train(pause=(slow_step, 25.0))
    assert run.finish() == pytest.approx(100.0, rel=0.02)
    assert run.factors[-1] < 0.01


def test_run_that_was_stopped_beyond_its_end_trains_until_the_rate_is_zero(tmp_path: Path) -> None:
    """After a pause of 200 s, a run of 100 s trains for another tenth of its budget."""
    run = SimulatedRun(tmp_path, 100.0, lambda _: 0.1)
    _start(run).train(pause=(300, 200.0))
    assert run.now == pytest.approx(8.0 + 30.0 + 200.0 + 10.0, rel=0.02)
    assert run.factors[299] > 0.6
    assert run.factors[-1] < 0.01


def test_longer_sequences_do_not_change_the_time_of_the_end(tmp_path: Path) -> None:
    """Steps that become 6 times as expensive are not mistaken for a higher load."""
    run = _start(SimulatedRun(tmp_path, 60.0, lambda step: 0.05 if step < 500 else 0.3, 3.0))
    run.train()
    assert run.step > 500
    assert run.finish() == pytest.approx(60.0, rel=0.02)


def test_learning_rate_rises_for_a_tenth_of_the_time_and_falls_to_zero(tmp_path: Path) -> None:
    """The factor is a function of the time between the first and the last step."""
    run = _start(SimulatedRun(tmp_path, 120.0))
    run.train()
    peak = run.factors.index(max(run.factors))
    assert run.factors[peak] == pytest.approx(1.0, abs=0.02)
    assert run.fractions[peak] == pytest.approx(0.1, abs=0.01)
    assert run.factors[:peak] == sorted(run.factors[:peak])
    assert 0 < run.factors[0] < 0.01
    decay = list(zip(run.fractions[peak + 1 :], run.factors[peak + 1 :], strict=True))
    assert all(factor == pytest.approx(1.0 - fraction) for fraction, factor in decay)
    assert 0 <= run.factors[-1] < 0.01


def test_trapezoidal_rate_follows_the_time(tmp_path: Path) -> None:
    """With a time budget, the rate is constant until a fifth of the time is left."""
    run = SimulatedRun(tmp_path, 120.0)
    run.settings = run.settings.model_copy(update={"decay": "trapezoidal"})
    _start(run).train()
    pairs = list(zip(run.fractions, run.factors, strict=True))
    assert {factor for fraction, factor in pairs if 0.1 < fraction <= 0.8} == {1.0}
    assert all(
        factor == pytest.approx((1 - fraction) / 0.2)
        for fraction, factor in pairs
        if fraction > 0.8
    )


def test_warmup_takes_at_most_the_warmup_steps(tmp_path: Path) -> None:
    """With 20 warm-up steps, the factor is 1 in step 19, much earlier than a tenth of the time."""
    run = _start(SimulatedRun(tmp_path, 600.0, warmup_steps=20))
    run.train(stop=30.0)
    assert run.factors[:20] == [pytest.approx((step + 1) / 20) for step in range(20)]
    assert run.factors[20] == pytest.approx(1.0 - run.fractions[20])


@pytest.mark.parametrize("eval_every", [None, 1, 250])
@pytest.mark.parametrize(
    ("evaluation_seconds", "expected"), [(0.01, 20), (0.5, 9), (1.5, 3), (6.0, 1)]
)
def test_evaluations_take_at_most_a_tenth_of_the_time(
    tmp_path: Path, evaluation_seconds: float, expected: int, eval_every: int | None
) -> None:
    """There are about 20 evaluations, or fewer if they would take more than a tenth of the time."""
    run = _start(SimulatedRun(tmp_path, 60.0, evaluation_seconds=evaluation_seconds))
    run.train(eval_every=eval_every)
    num_evaluations = len(run.evaluations) + 1
    assert num_evaluations * evaluation_seconds <= 0.1 * 60.0 + evaluation_seconds / 2
    if eval_every is None:
        assert num_evaluations == expected


def test_checkpoints_are_due_by_time(tmp_path: Path) -> None:
    """A minute has a checkpoint every 10 s, an hour every 3 minutes, a day every 10 minutes."""
    minute = _start(SimulatedRun(tmp_path, 60.0))
    minute.train()
    assert minute.checkpoints == pytest.approx([18.3, 28.3, 38.4, 48.4], abs=0.5)
    for seconds, interval in ((3600.0, 180.0), (86400.0, 600.0)):
        run = _start(SimulatedRun(tmp_path, seconds, lambda _: 5.0))
        run.train(stop=9 * interval)
        gaps = [b - a for a, b in zip(run.checkpoints, run.checkpoints[1:], strict=False)]
        assert len(gaps) >= 7
        assert all(gap == pytest.approx(interval, abs=8) for gap in gaps)


def test_best_evaluation_causes_a_checkpoint_after_30_seconds(tmp_path: Path) -> None:
    """The best evaluation is saved, unless the last checkpoint is newer than 30 s."""
    run = _start(SimulatedRun(tmp_path, 3600.0, start=0.0))
    run.now = 29.0
    assert not run.duration.is_checkpoint_due(7, None, is_best=True)
    run.now = 31.0
    assert run.duration.is_checkpoint_due(7, None, is_best=True)
    assert not run.duration.is_checkpoint_due(7, None, is_best=False)
    assert run.duration.is_checkpoint_due(8, 4, is_best=False)


def test_killed_run_ends_at_the_same_time(tmp_path: Path) -> None:
    """A run killed after 40 s of a minute, with a checkpoint at 38 s, has 20 s left.

    The second process reads the used time from the file, and continues the decay of the rate.
    """
    first = SimulatedRun(tmp_path, 60.0)
    with first.clock:
        _start(first).train(stop=40.0)
        start_seconds = first.duration.start_seconds
    second = SimulatedRun(tmp_path, 60.0, start=5.0)
    second.step = 300
    second.duration.start(step=300, seconds=15.0, elapsed_seconds=38.0, start_seconds=start_seconds)
    assert second.duration.elapsed_seconds == pytest.approx(first.now + 5.0, abs=0.01)
    second.train()
    assert first.now + second.finish() == pytest.approx(60.0, rel=0.02)
    assert second.factors[0] == pytest.approx(first.factors[-1] - 5.0 / 50, abs=0.02)


def _resume(run: Path, elapsed: float, remaining: float | None) -> SimulatedRun:
    """Return a run of a minute whose second process starts 5 s after ``elapsed``."""
    second = SimulatedRun(run, 60.0, start=5.0)
    second.step = 300
    second.duration.start(
        step=300,
        seconds=15.0,
        elapsed_seconds=elapsed,
        start_seconds=8.0,
        remaining_seconds=remaining,
    )
    return second


@pytest.mark.parametrize(("remaining", "expected"), [(None, 6.0), (20.0, 6.0), (2.5, 2.5)])
@pytest.mark.parametrize("elapsed", [53.2, 58.0])
def test_resumed_process_trains_until_the_rate_is_zero(
    tmp_path: Path, elapsed: float, remaining: float | None, expected: float
) -> None:
    """A process trains for a tenth of the budget, or the time that was left at its checkpoint."""
    run = _resume(tmp_path, elapsed, remaining)
    run.train()
    assert run.now - 5.0 == pytest.approx(expected, abs=0.1)
    assert run.factors[-1] < 0.01
    assert run.factors == sorted(run.factors, reverse=True)
    assert run.factors[0] == pytest.approx(expected / (elapsed + 5.0 + expected - 8.0), rel=0.02)


def test_repeatedly_killed_run_ends_with_a_rate_of_zero(tmp_path: Path) -> None:
    """A process that continues from a checkpoint beyond the budget has the time left there."""
    second = _resume(tmp_path, 58.0, 20.0)
    second.train(stop=7.0)
    remaining = second.duration.remaining_seconds
    assert remaining == pytest.approx(4.0, abs=0.1)
    third = _resume(tmp_path, 58.0 + second.now, remaining)
    third.train()
    assert third.now - 5.0 == pytest.approx(4.0, abs=0.1)
    assert third.factors[-1] < 0.01


@pytest.mark.parametrize("step_seconds", [0.05, 18.0, 40.0])
def test_run_without_a_checkpoint_measures_its_first_step(
    tmp_path: Path, step_seconds: float
) -> None:
    """A run that was killed before its first checkpoint has no estimate of the step time."""
    run = SimulatedRun(tmp_path, 3600.0, lambda _: step_seconds, evaluation_seconds=30.0,
                       is_step_time_known=False)  # fmt: skip
    _start(run).train()
    assert run.finish() == pytest.approx(3600.0, rel=0.02)
    assert run.checkpoints[0] < 600.0
    assert len(run.evaluations) >= 9


def test_process_after_the_last_step_is_finished_at_once(tmp_path: Path) -> None:
    """A run that was killed in its final evaluation takes no further step."""
    assert _resume(tmp_path, 58.0, 0.02).duration.is_finished(300)


def test_lost_time_file_is_replaced_by_the_checkpoint(tmp_path: Path) -> None:
    """Without an intact elapsed.json, the time of the checkpoint counts."""
    (tmp_path / ELAPSED_FILE).write_bytes(b"\0\0\0")
    run = SimulatedRun(tmp_path, 60.0, start=5.0)
    run.duration.start(step=300, seconds=15.0, elapsed_seconds=38.0, start_seconds=8.0)
    assert run.duration.elapsed_seconds == 38.0 + 5.0


def test_time_file_is_updated_until_the_end(tmp_path: Path) -> None:
    """RunClock writes the time on exit, and the next process continues from it."""
    with RunClock(tmp_path, start_time=0.5, clock=lambda: 1.0):
        pass
    next_clock = RunClock(tmp_path, start_time=7.0, clock=lambda: 9.0)
    assert next_clock.elapsed_seconds == (1.0 - 0.5) + (9.0 - 7.0)


def test_failed_update_of_the_time_file_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file cannot be written, for example on NFS, the thread tries again later."""
    monkeypatch.setattr(run_clock, "_UPDATE_SECONDS", 0.001)
    run = tmp_path / "run"
    with RunClock(run, start_time=0.5, clock=lambda: 1.0):
        time.sleep(0.02)
        run.mkdir()
        deadline = time.monotonic() + 10.0
        while not (run / ELAPSED_FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (run / ELAPSED_FILE).exists()


def test_error_of_the_time_file_does_not_replace_another_one(tmp_path: Path) -> None:
    """An error of the last update is raised, unless the run has failed with another error."""
    clock = RunClock(tmp_path / "missing", start_time=0.0)
    with pytest.raises(FileNotFoundError), clock:
        pass
    clock = RunClock(tmp_path / "missing", start_time=0.0)
    with pytest.raises(RuntimeError, match="training failed"), clock:
        raise RuntimeError("training failed")


def test_slow_start_leaves_a_tenth_of_the_budget_for_training(tmp_path: Path) -> None:
    """A run whose start takes the whole budget exceeds it by a tenth."""
    run = _start(SimulatedRun(tmp_path, 6.0, start=6.0))
    run.train()
    assert run.now == pytest.approx(6.6, abs=0.05)
    assert run.factors[-1] < 0.1


def test_minimum_of_steps_is_taken_without_time(tmp_path: Path) -> None:
    """A run with a budget of microseconds takes ``min_steps`` steps with a falling rate."""
    run = _start(SimulatedRun(tmp_path, 1e-4, min_steps=5, warmup_steps=0))
    run.train()
    assert run.step == 5
    assert run.factors == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_last_fraction_of_a_run() -> None:
    """By steps, the last fraction is rounded to steps; a fraction of 0 is empty."""
    duration = StepDuration(15)
    assert [step for step in range(15) if duration.is_in_last(step, 0.1)] == [13, 14]
    assert not any(duration.is_in_last(step, 0.0) for step in range(15))


def test_last_fraction_of_the_time(tmp_path: Path) -> None:
    """By time, a step is in the last fraction if less than this fraction of the time is left."""
    run = _start(SimulatedRun(tmp_path, 100.0, start=0.0))
    run.step = 10
    run.now = 89.0 - 1.4
    assert not run.duration.is_in_last(10, 0.1)
    run.now = 91.0
    assert run.duration.is_in_last(10, 0.1)


def test_default_interval_is_a_twentieth_of_the_steps() -> None:
    """Evaluations and checkpoints are due every twentieth of a run by steps, at least 10 steps."""
    assert [get_default_interval(steps) for steps in (5, 100, 1000)] == [5, 10, 50]
    assert StepDuration(1000).is_evaluation_due(150, None)
    assert not StepDuration(1000).is_evaluation_due(151, None)
    assert StepDuration(1000).is_checkpoint_due(151, None, is_best=True)


def _make_process(
    run: Path, clock: Callable[[], float], messages: list[Sequence[float]], *, is_main: bool
) -> TimeDuration:
    """Return the duration of one of two processes; the main one sends numbers by ``messages``."""

    def share_numbers(numbers: Sequence[float]) -> Sequence[float]:
        if is_main:
            messages.append(numbers)
        return messages[-1]

    return TimeDuration(
        600.0,
        RunClock(run, 0.0, clock=clock),
        step_seconds=1.0,
        evaluation_seconds=1.0,
        checkpoint_seconds=0.3,
        curve_seconds=0.3,
        share_numbers=share_numbers,
    )


def test_processes_with_different_clocks_make_the_same_decisions(tmp_path: Path) -> None:
    """A process whose clock is 29 s late saves, evaluates and ends in the steps of process 0.

    Otherwise one process would wait forever for the other, which is in another part of the loop.
    """
    now = [8.0]
    messages: list[Sequence[float]] = []
    processes = [
        _make_process(tmp_path, lambda: now[0], messages, is_main=True),
        _make_process(tmp_path, lambda: 0.7 * now[0] - 29.0, messages, is_main=False),
    ]
    for duration in processes:
        duration.start(step=0, seconds=0.0, elapsed_seconds=0.0, start_seconds=None)
    num_checkpoints = step = 0
    while not processes[0].is_finished(step):
        now[0] += 1.0
        step += 1
        for duration in processes:
            duration.record_step(1.0, 1e9)
        # Times that pass in between must not matter.
        now[0] += 0.5
        first, second = (
            (
                duration.is_checkpoint_due(step, None, is_best=step % 7 == 0),
                duration.is_checkpoint_due(step, 50, is_best=False),
                duration.is_evaluation_due(step, None),
                duration.is_finished(step),
            )
            for duration in processes
        )
        assert first == second, step
        if first[0]:
            num_checkpoints += 1
            for duration in processes:
                duration.start_checkpoint()
            # Only process 0 writes checkpoints. Later ones take longer.
            processes[0].record_checkpoint(0.3 * num_checkpoints)
    assert processes[1].is_finished(step)
    assert num_checkpoints > 5
