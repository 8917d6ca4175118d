"""The number of threads on a busy machine: chosen from injected timings, recorded, restored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad, measure_load
from bertsmith.settings import read_toml
from bertsmith.train.engine.budget import TimeBudget
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.threads import (
    ThreadChoice,
    candidate_thread_counts,
    choose_thread_count,
    count_free_cores,
    is_machine_busy,
)
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.pretraining import pretrain
from bertsmith.train.pretraining.session import Session
from tests.model.examples import prime_config
from tests.train.conftest import WORDS, Train, make_tokenizer

IDLE, BUSY = CpuLoad(0.05, 0.1), CpuLoad(1.0, 1.0)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Give the process two threads, and its own number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({2: [1.0] * 3, 1: [1.9] * 3}, 2),
        ({2: [4.0] * 3, 1: [1.0] * 3}, 1),
        # Hardly faster is no reason, and neither is a single disturbed round.
        ({2: [1.0] * 3, 1: [0.95] * 3}, 2),
        ({2: [1.0, 9.0, 1.0], 1: [1.9] * 3}, 2),
        ({2: [4.0] * 3, 1: [1.0, 30.0, 1.0]}, 1),
        ({16: [4.0] * 3, 15: [1.1] * 3, 8: [1.5] * 3}, 15),
    ],
)
def test_fewer_threads_only_where_they_are_clearly_faster(
    seconds: dict[int, list[float]], threads: int
) -> None:
    """Of three rounds in turns the medians decide."""
    order: list[int] = []

    def time_step(number: int) -> float:
        order.append(number)
        return seconds[number][order.count(number) - 1]

    choice = choose_thread_count(time_step, list(seconds))
    assert choice.num_threads == threads
    assert order == [*seconds] * 3
    assert "1 thread " in choice.describe() or 1 not in seconds


def test_candidates_leave_the_busy_cores_to_others() -> None:
    """All threads first, then those that the load leaves, and half of them."""
    assert candidate_thread_counts(2, BUSY) == [2, 1]
    assert candidate_thread_counts(16, BUSY) == [16, 15, 8]
    assert candidate_thread_counts(16, CpuLoad(3.2, 0.0)) == [16, 12, 8]
    assert candidate_thread_counts(4, CpuLoad(40.0, 40.0)) == [4, 2]
    assert candidate_thread_counts(1, BUSY) == [1]


def test_busy_is_now_or_in_the_last_minute_but_fine_tuning_wants_both() -> None:
    """Steps are timed at the least sign of load; without timing, only lasting load counts."""
    assert is_machine_busy(CpuLoad(0.4, 0.0))
    assert is_machine_busy(CpuLoad(0.0, 0.4))
    assert not is_machine_busy(IDLE)
    assert count_free_cores(CpuLoad(1.0, 1.2), 2) == 1
    assert count_free_cores(CpuLoad(1.0, 0.2), 2) == 2
    assert count_free_cores(CpuLoad(0.0, 2.0), 2) == 2
    assert count_free_cores(CpuLoad(9.0, 9.0), 4) == 1
    assert count_free_cores(CpuLoad(2.6, 3.4), 16) == 13


def test_the_load_is_not_negative_and_needs_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no /proc/stat the load average speaks for now too."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert measure_load().current >= 0
    monkeypatch.setattr(device, "_busy_seconds", lambda: None)
    load = measure_load()
    assert load.current == load.last_minute


def _choose_one(*_: Any) -> ThreadChoice:
    torch.set_num_threads(1)
    return ThreadChoice(1, {2: 4.0, 1: 1.0})


def _never(*_: Any) -> Any:
    raise AssertionError("timed or measured without need")


def test_a_busy_machine_trains_with_fewer_threads_also_when_resumed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is recorded; a resumed run takes it; afterwards the process has its own back."""
    monkeypatch.setattr(device, "measure_load", lambda: BUSY)
    monkeypatch.setattr(Session, "choose_threads", _choose_one)
    changes: dict[str, Any] = {"steps": 2, "run__threads": None}
    used: list[int] = []
    work = Session.build_objective

    def recorded(self: Session, *arguments: Any) -> Any:
        used.append(torch.get_num_threads())
        return work(self, *arguments)

    monkeypatch.setattr(Session, "work", recorded)
    train(**changes)
    assert used == [1]
    assert torch.get_num_threads() == 2
    assert read_toml(tmp_path / "run" / "settings.toml")["run"]["threads"] == 1
    monkeypatch.setattr(device, "measure_load", _never)
    train(**changes)
    assert used == [1, 1]


def test_threads_that_were_set_or_a_quiet_machine_need_no_timing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed where run.threads is set, and nothing where no other process works."""
    monkeypatch.setattr(Session, "choose_threads", _never)
    monkeypatch.setattr(device, "measure_load", lambda: IDLE)
    train("quiet", steps=1, run__threads=None)
    assert read_toml(tmp_path / "quiet" / "settings.toml")["run"]["threads"] == 2
    monkeypatch.setattr(device, "measure_load", _never)
    train("set", steps=1, run__threads=1)


def test_timing_threads_leaves_no_trace(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose threads were timed ends with the bytes of one with that number from the start."""
    monkeypatch.setattr(device, "measure_load", lambda: BUSY)
    train("timed", steps=3, run__threads=None)
    threads = read_toml(tmp_path / "timed" / "settings.toml")["run"]["threads"]
    train("set", steps=3, run__threads=threads)
    name = "model/model.safetensors"
    assert (tmp_path / "timed" / name).read_bytes() == (tmp_path / "set" / name).read_bytes()


def test_unlike_times_in_the_probe_lead_to_fewer_threads(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that the system does not show, as in a container, is found by its effect."""
    monkeypatch.setattr(device, "measure_load", lambda: IDLE)
    steady = Cost(2.0, 0.0, 0, 1e9, 0.1, 100.0)
    costs = iter([Cost(8.0, 0.0, 0, 1e9, 0.1, 100.0, is_noisy=True), steady])
    monkeypatch.setattr(Session, "measure", lambda *_: next(costs))
    monkeypatch.setattr(Session, "choose_threads", _choose_one)
    monkeypatch.setattr(TimeBudget, "replan", lambda *_: None)
    monkeypatch.setattr(pretrain, "perf_counter", lambda: 0.0)
    train(minutes=0.2, run__threads=None)
    stored = read_toml(tmp_path / "run" / "settings.toml")
    assert (stored["run"]["threads"], stored["schedule"]["steps"]) == (1, 6)


def test_fine_tuning_leaves_busy_cores_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lasting load takes a thread away; the number is recorded, and resumed with."""
    words = make_tokenizer()
    config = prime_config(vocab_size=words.vocab_size, width=32, heads=2, feed_forward=61)
    bundle.save(tmp_path / "start", BertForPreTraining(config), words, {})
    chance = np.random.default_rng(0)
    table = tmp_path / "table.jsonl"
    rows = [
        f'{{"text": "{" ".join(chance.choice(WORDS, 3))}", "label": "{"no" if i % 2 else "yes"}"}}'
        for i in range(20)
    ]
    table.write_text("\n".join(rows))
    monkeypatch.setattr(device, "measure_load", lambda: BUSY)
    values = {"schedule": {"steps": 2}}
    finetune("classify", tmp_path / "start", tmp_path / "run", data=table, values=values)
    assert read_toml(tmp_path / "run" / "settings.toml")["run"]["threads"] == 1
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(device, "measure_load", _never)
    (tmp_path / "run" / "model").rename(tmp_path / "model")
    finetune("classify", tmp_path / "start", tmp_path / "run", data=table, values=values)
