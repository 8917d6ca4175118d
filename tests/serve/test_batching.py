"""Batcher: packing, scheduling, admission control and errors."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import (
    BusyError,
    Deadline,
    DeadlineExceededError,
    DisconnectedError,
    RequestTooLargeError,
    ShuttingDownError,
)


class FakeClock:
    """A clock that tests advance; it starts at the real time, because deadlines use that."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


class FakeModel:
    """Doubles payloads once ``resume`` is set, and records its batches.

    Attributes:
        batches: payloads of each batch.
        started: set when a batch starts.
        resume: batches wait until it is set.
    """

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.started, self.resume = threading.Event(), threading.Event()

    def __call__(self, payloads: list[Any]) -> Sequence[Any]:
        """Return each payload times two; fail for a payload "bad"."""
        self.batches.append(payloads)
        self.started.set()
        assert self.resume.wait(60)
        if "bad" in payloads:
            raise ValueError("cannot be computed")
        return [payload * 2 for payload in payloads]


BatcherFactory = Callable[..., Batcher]


@pytest.fixture
def create_batcher() -> Iterator[BatcherFactory]:
    """Factory of batchers with 100 tokens per batch by default; closes them after the test."""
    batchers: list[Batcher] = []

    def create(**overrides: Any) -> Batcher:
        options = {"batch_tokens": 100, "queue_tokens": 1000, "call_tokens": 500, "max_wait": 0.0}
        batchers.append(Batcher(**{**options, **overrides}))
        return batchers[-1]

    yield create
    for batcher in batchers:
        batcher.close(60)


def occupy(batcher: Batcher, model: FakeModel) -> None:
    """Occupy the model thread with a batch, so that later calls are queued."""
    batcher.submit("key", model, [(1, "first")], Deadline(60))
    assert model.started.wait(60)


def set_rate(batcher: Batcher, tokens_per_second: float) -> None:
    """Set the measured rate, with enough measurements to reject calls by it."""
    batcher._tokens_per_second, batcher._measured_batches = tokens_per_second, 10.0


def deadline_at(expires_at: float) -> Deadline:
    """Return a deadline at a time of the clock."""
    deadline = Deadline(60)
    deadline.expires_at = expires_at
    return deadline


def test_queued_calls_share_batches_up_to_the_token_budget(create_batcher: BatcherFactory) -> None:
    """Ten calls of 25 tokens run at most four per batch of 100, and each gets its own result."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    futures = [batcher.submit("key", model, [(25, n)], Deadline(60)) for n in range(10)]
    model.resume.set()
    assert [future.result(60) for future in futures] == [[n * 2] for n in range(10)]
    assert model.batches[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_short_units_count_like_the_longest_of_their_batch(create_batcher: BatcherFactory) -> None:
    """With 40 tokens in the longest unit, a batch of 100 has two units, however short the other.

    The longest unit of a call is computed first, and results keep the order of the call.
    """
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    units = [(10, 0), (40, 1), (10, 2), (10, 3)]
    future = batcher.submit("key", model, units, Deadline(60))
    model.resume.set()
    assert future.result(60) == [0, 2, 4, 6]
    assert model.batches[1:] == [[1, 0], [2, 3]]


def test_long_unit_does_not_join_a_batch_of_short_units(create_batcher: BatcherFactory) -> None:
    """Three units of 20 tokens and one of 60 are 140 tokens, but 240 with padding."""
    batcher, model = create_batcher(max_batch_tokens=150), FakeModel()
    occupy(batcher, model)
    lengths = (20, 20, 20, 60)
    futures = [batcher.submit("key", model, [(n, n)], Deadline(60)) for n in lengths]
    model.resume.set()
    assert [future.result(60) for future in futures] == [[40], [40], [40], [120]]
    assert model.batches[1:] == [[20, 20, 20], [60]]


def test_calls_with_different_keys_do_not_share_batches(create_batcher: BatcherFactory) -> None:
    """Calls of two models are computed in separate batches."""
    batcher, model_1, model_2 = create_batcher(), FakeModel(), FakeModel()
    model_2.resume.set()
    occupy(batcher, model_1)
    future_1 = batcher.submit("key", model_1, [(1, 1)], Deadline(60))
    future_2 = batcher.submit("other", model_2, [(1, 2)], Deadline(60))
    model_1.resume.set()
    assert (future_1.result(60), future_2.result(60)) == ([2], [4])
    assert (model_1.batches, model_2.batches) == ([["first"], [1]], [[2]])


def test_short_call_overtakes_later_units_of_long_call(create_batcher: BatcherFactory) -> None:
    """A short call waits only for the units of a long call that are scheduled before it."""
    clock = FakeClock()
    batcher, model = create_batcher(clock=clock), FakeModel()
    occupy(batcher, model)
    batcher._tokens_per_second = 1000.0  # 100 tokens take 0.1 seconds
    long = batcher.submit("key", model, [(100, n) for n in range(4)], Deadline(60))
    clock.now += 0.15
    short = batcher.submit("key", model, [(10, "short")], Deadline(60))
    model.resume.set()
    assert short.result(60) == ["shortshort"]
    assert long.result(60) == [0, 2, 4, 6]
    order = [payload for batch in model.batches[1:] for payload in batch]
    assert order == [0, 1, "short", 2, 3]


def test_sequence_longer_than_the_budget_gets_its_own_batch(
    create_batcher: BatcherFactory,
) -> None:
    """A unit of 300 tokens is computed alone although a batch has 100."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    future = batcher.submit("key", model, [(300, "x"), (10, "y")], Deadline(60))
    model.resume.set()
    assert future.result(60) == ["xx", "yy"]
    assert model.batches[1:] == [["x"], ["y"]]


def test_lone_call_waits_for_others_to_share_its_batch(create_batcher: BatcherFactory) -> None:
    """Two calls within ``max_wait_seconds`` share a batch."""
    batcher, model = create_batcher(max_wait_seconds=60.0), FakeModel()
    model.resume.set()
    future = batcher.submit("key", model, [(50, 1)], Deadline(60))
    batcher.submit("key", model, [(50, 2)], Deadline(60))
    assert future.result(60) == [2]
    assert model.batches == [[1, 2]]


def test_full_queue_rejects_calls(create_batcher: BatcherFactory) -> None:
    """BusyError says when to retry; queued calls are still answered."""
    batcher, model = create_batcher(max_queue_tokens=400), FakeModel()
    occupy(batcher, model)
    accepted = batcher.submit("key", model, [(350, 1)], Deadline(60))
    with pytest.raises(BusyError, match="350 tokens are waiting; retry in") as caught:
        batcher.submit("key", model, [(100, 2)], Deadline(60))
    assert caught.value.retry_after > 0
    with pytest.raises(RequestTooLargeError, match="500 tokens per request, got 600"):
        batcher.submit("key", model, [(600, 3)], Deadline(60))
    model.resume.set()
    assert accepted.result(60) == [2]
    assert batcher.queued_tokens == 0


def test_call_fails_at_its_deadline(create_batcher: BatcherFactory) -> None:
    """The caller gets DeadlineExceededError while the model is busy; the unit is not computed."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    with pytest.raises(DeadlineExceededError, match="not answered in time"):
        batcher.submit_and_wait("key", model, [(1, "late")], Deadline(0.1))
    model.resume.set()
    assert batcher.submit_and_wait("key", model, [(1, 1)], Deadline(60)) == [2]
    assert ["late"] not in model.batches
    assert [1] in model.batches


def test_disconnect_cancels_a_queued_call(create_batcher: BatcherFactory) -> None:
    """The waiting thread gets DisconnectedError, and the unit is not computed."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    deadline, ended = Deadline(60), threading.Event()

    def run() -> None:
        with pytest.raises(DisconnectedError):
            batcher.submit_and_wait("key", model, [(1, "cancelled")], deadline)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    while not batcher.queued_tokens:
        time.sleep(0.01)
    deadline.cancel()
    assert ended.wait(60)
    model.resume.set()
    assert batcher.submit_and_wait("key", model, [(1, 1)], Deadline(60)) == [2]
    assert not any("cancelled" in batch for batch in model.batches)


def test_failing_unit_does_not_fail_its_batch(create_batcher: BatcherFactory) -> None:
    """Other calls of the batch get their results, and the thread survives."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    before = batcher.submit("key", model, [(1, 1)], Deadline(60))
    failing = batcher.submit("key", model, [(1, "bad")], Deadline(60))
    after = batcher.submit("key", model, [(1, 3)], Deadline(60))
    model.resume.set()
    assert (before.result(60), after.result(60)) == ([2], [6])
    with pytest.raises(ValueError, match="cannot be computed"):
        failing.result(60)
    assert batcher.is_alive


def test_close_finishes_queued_calls_and_rejects_new_ones(create_batcher: BatcherFactory) -> None:
    """New calls get ShuttingDownError; the thread ends after the queued call."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    queued = batcher.submit("key", model, [(1, 1)], Deadline(60))
    closing = threading.Thread(target=batcher.close, args=(60,))
    closing.start()
    while batcher._is_open:
        time.sleep(0.01)
    with pytest.raises(ShuttingDownError, match="shutting down"):
        batcher.submit("key", model, [(1, 2)], Deadline(60))
    model.resume.set()
    closing.join(60)
    assert queued.result(0) == [2]
    assert not batcher.is_alive


def test_two_threads_compute_two_batches_concurrently(create_batcher: BatcherFactory) -> None:
    """With ``num_threads=2``, a second batch starts while the first is computed."""
    batcher, model_1, model_2 = create_batcher(num_threads=2), FakeModel(), FakeModel()
    occupy(batcher, model_1)
    future_2 = batcher.submit("other", model_2, [(1, 2)], Deadline(60))
    assert model_2.started.wait(60)
    future_3 = batcher.submit("other", model_2, [(1, 3)], Deadline(60))
    model_2.resume.set()
    assert (future_2.result(60), future_3.result(60)) == ([4], [6])
    model_1.resume.set()


def test_batches_of_one_call_run_on_all_threads(create_batcher: BatcherFactory) -> None:
    """A call of three batches uses three threads at the same time."""
    batcher, barrier = create_batcher(num_threads=3, max_wait_seconds=60.0), threading.Barrier(3)

    def compute(payloads: list[Any]) -> list[Any]:
        # Fails unless three batches are computed concurrently.
        barrier.wait(60)
        return payloads

    future = batcher.submit("key", compute, [(100, n) for n in range(3)], Deadline(60))
    assert future.result(60) == [0, 1, 2]


def test_call_that_fails_on_two_threads_fails_once(create_batcher: BatcherFactory) -> None:
    """The call gets the first error, and the second error does not end a thread."""
    batcher, barrier = create_batcher(num_threads=2), threading.Barrier(2)

    def compute(payloads: list[Any]) -> list[Any]:
        barrier.wait(60)
        raise ValueError("cannot be computed")

    failing = batcher.submit("key", compute, [(100, 1), (100, 2)], Deadline(60))
    with pytest.raises(ValueError, match="cannot be computed"):
        failing.result(60)
    model = FakeModel()
    model.resume.set()
    assert batcher.submit_and_wait("key", model, [(1, 1)], Deadline(60)) == [2]
    assert batcher.is_alive


def test_concurrent_batches_share_the_cores(create_batcher: BatcherFactory) -> None:
    """With 4 cores, the second of two batches gets 2 PyTorch threads, and a lone batch gets 4."""
    previous_threads, used_threads = torch.get_num_threads(), []
    torch.set_num_threads(4)
    try:
        batcher, model_1, model_2 = create_batcher(num_threads=2), FakeModel(), FakeModel()

        def compute(payloads: list[Any]) -> Sequence[Any]:
            used_threads.append(torch.get_num_threads())
            return model_2(payloads)

        occupy(batcher, model_1)
        model_2.resume.set()
        batcher.submit_and_wait("other", compute, [(1, 1)], Deadline(60))
        model_1.resume.set()
        end = time.monotonic() + 60
        while batcher._running_batches and time.monotonic() < end:
            time.sleep(0.01)
        batcher.submit_and_wait("other", compute, [(1, 1)], Deadline(60))
    finally:
        torch.set_num_threads(previous_threads)
    assert used_threads == [2, 4]


def test_empty_call_returns_an_empty_list(create_batcher: BatcherFactory) -> None:
    """A call without units does not reach the model."""
    assert create_batcher().submit_and_wait("key", FakeModel(), [], Deadline(1)) == []


@pytest.mark.parametrize("num_threads", [1, 3])
def test_concurrent_callers_get_their_own_results(
    create_batcher: BatcherFactory, num_threads: int
) -> None:
    """30 threads make 20 calls each, and every result belongs to its call."""
    batcher, model = create_batcher(max_queue_tokens=10**6, num_threads=num_threads), FakeModel()
    model.resume.set()
    failures: list[Any] = []

    def run_calls(caller: int) -> None:
        for number in range(20):
            units = [(7, (caller, number, n)) for n in range(3)]
            results = batcher.submit_and_wait("key", model, units, Deadline(60))
            if results != [payload * 2 for _, payload in units]:
                failures.append((caller, number))

    threads = [threading.Thread(target=run_calls, args=(caller,)) for caller in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert batcher.queued_tokens == 0


def test_call_that_would_be_late_is_rejected_on_arrival(create_batcher: BatcherFactory) -> None:
    """The estimate includes the tokens ahead; BusyError says when to retry."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, max_queue_tokens=10**6, max_call_tokens=10**6)
    model = FakeModel()
    set_rate(batcher, 100.0)
    deadline = deadline_at(clock.now + 30)
    occupy(batcher, model)
    batcher.submit("key", model, [(100, n) for n in range(16)], deadline)
    with pytest.raises(BusyError, match="1,601 tokens are waiting or being computed") as caught:
        batcher.submit("key", model, [(100, n) for n in range(16)], deadline)
    # 3,201 tokens take 32 seconds; a large call may need 80 % of its 30 seconds.
    assert caught.value.retry_after == pytest.approx(8.01)
    # Short calls may use all of their time, because they overtake large calls.
    for _ in range(13):
        batcher.submit("key", model, [(100, "short")], deadline)
    with pytest.raises(BusyError):
        batcher.submit("key", model, [(100, "short")], deadline)
    model.resume.set()


def test_estimate_includes_running_batches(create_batcher: BatcherFactory) -> None:
    """With an empty queue, a call is rejected because of the batch being computed."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, max_queue_tokens=10**6, max_call_tokens=10**6)
    model = FakeModel()
    set_rate(batcher, 100.0)
    deadline = deadline_at(clock.now + 30)
    batcher.submit("key", model, [(2000, "large")], deadline)
    assert model.started.wait(60)
    assert batcher.queued_tokens == 0
    with pytest.raises(BusyError, match="2,000 tokens are waiting or being computed"):
        batcher.submit("key", model, [(500, 1)], deadline)
    model.resume.set()


def test_idle_server_accepts_any_call(create_batcher: BatcherFactory) -> None:
    """A call that seems too slow is accepted if nothing else is pending: the rate may be wrong."""
    batcher, model = create_batcher(), FakeModel()
    model.resume.set()
    set_rate(batcher, 0.001)
    results = batcher.submit_and_wait("key", model, [(100, n) for n in range(5)], Deadline(60))
    assert results == [0, 2, 4, 6, 8]


def test_small_batches_hardly_change_the_rate(create_batcher: BatcherFactory) -> None:
    """Five batches of one token leave the rate nearly unchanged; a full batch determines it."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, num_threads=1)

    def compute(payloads: list[Any]) -> list[Any]:
        clock.now += 1.0
        return payloads

    batcher._tokens_per_second = 1000.0
    for _ in range(5):
        batcher.submit_and_wait("key", compute, [(1, 1)], Deadline(60))
    assert batcher._tokens_per_second > 900
    batcher.submit_and_wait("key", compute, [(100, 1)], Deadline(60))
    assert batcher._tokens_per_second == pytest.approx(100, abs=50)


def test_newest_large_calls_are_shed_when_the_rate_drops(create_batcher: BatcherFactory) -> None:
    """Once the measured rate is too low for all queued calls, the oldest are answered in time."""
    clock = FakeClock()
    batcher, batches = create_batcher(clock=clock, max_queue_tokens=10**6), []
    resume = threading.Event()

    def compute(payloads: list[Any]) -> list[Any]:
        assert resume.wait(60)
        # 10 tokens per second, far below the initial estimate.
        clock.now += 10.0
        batches.append(payloads)
        return payloads

    calls = [
        batcher.submit(
            "call", compute, [(100, (number, n)) for n in range(4)], deadline_at(clock.now + 100)
        )
        for number in range(4)
    ]
    resume.set()
    for number in (0, 1):
        assert calls[number].result(60) == [(number, n) for n in range(4)]
    for call in calls[2:]:
        with pytest.raises(BusyError, match="the server is busy"):
            call.result(60)
    # No batch was computed for the rejected calls.
    assert len(batches) == 8
    assert batcher.queued_tokens == 0


def test_disconnect_removes_queued_tokens_at_once(create_batcher: BatcherFactory) -> None:
    """Tokens of a cancelled call stop counting while the model is still busy."""
    batcher, model = create_batcher(), FakeModel()
    occupy(batcher, model)
    deadline = Deadline(60)
    batcher.submit("key", model, [(100, n) for n in range(5)], deadline)
    assert batcher.queued_tokens == 500
    deadline.cancel()
    assert batcher.queued_tokens == 0
    model.resume.set()
    assert batcher.submit_and_wait("key", model, [(1, 1)], Deadline(60)) == [2]
    assert model.batches == [["first"], [1]]
