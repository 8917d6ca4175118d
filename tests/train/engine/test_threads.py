"""The number of threads on a busy machine: it is chosen by timing steps, stored and restored."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad, measure_cpu_load
from bertsmith.settings import read_toml
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.threads import (
    ThreadChoice,
    choose_thread_count,
    count_free_cores,
    is_machine_busy,
    list_candidate_thread_counts,
    restore_torch_settings,
)
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.pretraining import speed
from bertsmith.train.pretraining.session import Session
from tests.model.examples import make_prime_size_config
from tests.train.conftest import WORDS, TrainFunction, make_tokenizer

IDLE, BUSY = CpuLoad(0.05, 0.1), CpuLoad(1.0, 1.0)


@pytest.fixture(autouse=True)
def use_two_threads() -> Iterator[None]:
    """Run a test with two threads, then restore the number of threads."""
    previous = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(previous)


@pytest.mark.parametrize(
    ("seconds", "num_threads", "expected_timed"),
    [
        ({2: [1.0] * 3, 1: [1.9] * 3}, 2, [2, 1] * 3),
        ({2: [1.9] * 3, 1: [1.0] * 3}, 1, [2, 1] * 3),
        # Neither a small difference nor a single slow timing changes the number.
        ({2: [1.0] * 3, 1: [0.95] * 3}, 2, [2, 1] * 3),
        ({2: [1.0, 9.0, 1.0], 1: [1.9] * 3}, 2, [2, 1] * 3),
        # A candidate that takes more than twice as long as another one is not timed again.
        ({2: [4.0], 1: [1.0]}, 1, [2, 1]),
        ({16: [4.0], 15: [1.1] * 3, 8: [1.5] * 3}, 15, [16, 15, 8, 15, 8, 15, 8]),
    ],
)
def test_fewer_threads_are_chosen_only_if_clearly_faster(
    seconds: dict[int, list[float]], num_threads: int, expected_timed: list[int]
) -> None:
    """The fewer threads are chosen if the median of their three timings is clearly lower."""
    timed: list[int] = []

    def time_step(threads: int) -> float:
        timed.append(threads)
        return seconds[threads][timed.count(threads) - 1]

    choice = choose_thread_count(time_step, list(seconds))
    assert choice.num_threads == num_threads
    assert timed == expected_timed
    assert "1 thread " in choice.describe() or 1 not in seconds


def test_slow_steps_are_timed_once() -> None:
    """After the maximum duration, no candidate is timed again."""
    now = 0.0
    timed: list[int] = []

    def time_step(threads: int) -> float:
        nonlocal now
        timed.append(threads)
        now += 6.0
        return 6.0

    choice = choose_thread_count(time_step, [4, 3, 2], 10.0, clock=lambda: now)
    assert (choice.num_threads, timed) == (4, [4, 3, 2])


def test_candidates_leave_busy_cores_free() -> None:
    """The candidates are all threads, as many as there are free cores, and half of all."""
    assert list_candidate_thread_counts(2, BUSY) == [2, 1]
    assert list_candidate_thread_counts(16, BUSY) == [16, 15, 8]
    assert list_candidate_thread_counts(16, CpuLoad(3.2, 0.0)) == [16, 12, 8]
    assert list_candidate_thread_counts(4, CpuLoad(40.0, 40.0)) == [4, 2]
    assert list_candidate_thread_counts(1, BUSY) == [1]


def test_short_load_makes_a_machine_busy_but_takes_no_core() -> None:
    """A load now or in the last minute makes a machine busy; a core is in use only with both."""
    assert is_machine_busy(CpuLoad(0.4, 0.0))
    assert is_machine_busy(CpuLoad(0.0, 0.4))
    assert not is_machine_busy(IDLE)
    assert count_free_cores(CpuLoad(1.0, 1.2), 2) == 1
    assert count_free_cores(CpuLoad(1.0, 0.2), 2) == 2
    assert count_free_cores(CpuLoad(0.0, 2.0), 2) == 2
    assert count_free_cores(CpuLoad(9.0, 9.0), 4) == 1
    assert count_free_cores(CpuLoad(2.6, 3.4), 16) == 13


def test_load_without_proc_is_the_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc/stat, the load average replaces the current load."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert measure_cpu_load().current >= 0
    monkeypatch.setattr(device, "_get_busy_core_seconds", lambda: None)
    load = measure_cpu_load()
    assert load.current == load.last_minute


def _choose_one_thread(*_: Any) -> ThreadChoice:
    """Replaces ``speed.choose_thread_count``."""
    torch.set_num_threads(1)
    return ThreadChoice(1, {2: 4.0, 1: 1.0})


def _fail_if_called(*_: Any) -> Any:
    raise AssertionError("called unnecessarily")


def test_busy_machine_trains_with_fewer_threads(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower number of threads is stored, used again by a resumed run, and reset at the end."""
    monkeypatch.setattr(device, "measure_cpu_load", lambda: BUSY)
    monkeypatch.setattr(speed, "choose_thread_count", _choose_one_thread)
    arguments: dict[str, Any] = {"steps": 2, "run__threads": None}
    thread_counts: list[int] = []
    build_objective = Session.build_objective

    def record_num_threads(self: Session, *arguments: Any) -> Any:
        thread_counts.append(torch.get_num_threads())
        return build_objective(self, *arguments)

    monkeypatch.setattr(Session, "build_objective", record_num_threads)
    train(**arguments)
    assert thread_counts == [1]
    assert torch.get_num_threads() == 2
    assert read_toml(tmp_path / "run" / "settings.toml")["run"]["threads"] == 1
    monkeypatch.setattr(device, "measure_cpu_load", _fail_if_called)
    # As if the run had been interrupted before it wrote its model.
    shutil.rmtree(tmp_path / "run" / "model")
    train(**arguments)
    assert thread_counts == [1, 1]


def test_threads_are_not_timed_without_need(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads are not timed on an idle machine, nor if run.threads is set."""
    monkeypatch.setattr(speed, "choose_thread_count", _fail_if_called)
    monkeypatch.setattr(device, "measure_cpu_load", lambda: IDLE)
    train("idle", steps=1, run__threads=None)
    assert read_toml(tmp_path / "idle" / "settings.toml")["run"]["threads"] == 2
    monkeypatch.setattr(device, "measure_cpu_load", _fail_if_called)
    train("set", steps=1, run__threads=1)


def test_timing_threads_does_not_change_the_weights(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the chosen number is set as run.threads, a run without timing ends with the same bytes."""
    monkeypatch.setattr(device, "measure_cpu_load", lambda: BUSY)
    train("timed", steps=3, run__threads=None)
    threads = read_toml(tmp_path / "timed" / "settings.toml")["run"]["threads"]
    train("set", steps=3, run__threads=threads)
    name = "model/model.safetensors"
    assert (tmp_path / "timed" / name).read_bytes() == (tmp_path / "set" / name).read_bytes()


def test_noisy_step_times_lead_to_fewer_threads(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If step times are noisy on a machine that seems idle, fewer threads are tried."""
    monkeypatch.setattr(device, "measure_cpu_load", lambda: IDLE)
    noisy_cost = Cost(
        step_seconds=8.0,
        evaluation_seconds=0.0,
        peak_memory_bytes=0,
        peak_macs_per_second=1e9,
        mfu=0.1,
        tokens_per_step=100.0,
        is_noisy=True,
    )
    costs = iter([noisy_cost, replace(noisy_cost, step_seconds=2.0, is_noisy=False)])
    monkeypatch.setattr(speed, "measure_cost", lambda *_: next(costs))
    monkeypatch.setattr(speed, "choose_thread_count", _choose_one_thread)
    train(minutes=1e-6, run__threads=None)
    assert read_toml(tmp_path / "run" / "settings.toml")["run"]["threads"] == 1


def test_fine_tuning_leaves_busy_cores_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning on a busy machine uses fewer threads; a resumed run uses the stored number."""
    tokenizer = make_tokenizer()
    config = make_prime_size_config(
        vocab_size=tokenizer.vocab_size, width=32, heads=2, feed_forward=61
    )
    bundle.save(tmp_path / "start", BertForPreTraining(config), tokenizer, {})
    rng = np.random.default_rng(0)
    table = tmp_path / "table.jsonl"
    rows = [
        {"text": " ".join(rng.choice(WORDS, 3)), "label": ("yes", "no")[index % 2]}
        for index in range(20)
    ]
    table.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(device, "measure_cpu_load", lambda: BUSY)
    values = {"schedule": {"steps": 2}}
    finetune("classify", tmp_path / "start", tmp_path / "run", data=table, values=values)
    assert read_toml(tmp_path / "run" / "settings.toml")["run"]["threads"] == 1
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(device, "measure_cpu_load", _fail_if_called)
    (tmp_path / "run" / "model").rename(tmp_path / "model")
    finetune("classify", tmp_path / "start", tmp_path / "run", data=table, values=values)


def test_settings_of_the_process_are_restored() -> None:
    """Training does not change determinism, precision and threads for the caller."""

    def read_settings() -> tuple[object, ...]:
        return (
            torch.get_num_threads(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )  # fmt: skip

    with restore_torch_settings(None):
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("medium")
        before = read_settings()
        with restore_torch_settings(None):
            device.configure_determinism(is_cuda=False)
            torch.set_num_threads(before[0] + 1)  # type: ignore[operator]
            assert read_settings() != before
        assert read_settings() == before
