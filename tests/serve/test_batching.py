"""The batcher: grouping of sequences, scheduling, admission control and errors."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
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
    wait_for_result,
)
from bertsmith.serve.fair_queue import BatchFunction
from bertsmith.serve.rate_limits import TokenBucket


class FakeClock:
    """A clock that tests advance. It starts at the real time, which deadlines are computed from."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


class FakeModel:
    """Batch function that doubles payloads, pauses until ``resume`` is set and records batches.

    Attributes:
        batches: payloads of each batch.
        started: set when a batch starts.
        resume: computation continues when it is set.
    """

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.started = threading.Event()
        self.resume = threading.Event()

    def __call__(self, payloads: list[Any]) -> Sequence[Any]:
        """Return each payload times two; raise ValueError for the payload "bad"."""
        self.batches.append(payloads)
        self.started.set()
        assert self.resume.wait(60)
        if "bad" in payloads:
            raise ValueError("cannot be computed")
        return [payload * 2 for payload in payloads]


BatcherFactory = Callable[..., Batcher]


@pytest.fixture
def create_batcher() -> Iterator[BatcherFactory]:
    """A function that creates batchers with 100 tokens per batch; closes them after the test."""
    batchers: list[Batcher] = []

    def create(**overrides: Any) -> Batcher:
        options = {
            "max_batch_tokens": 100,
            "max_queue_tokens": 1000,
            "max_call_tokens": 500,
            "max_wait_seconds": 0.0,
        }
        batchers.append(Batcher(**{**options, **overrides}))
        return batchers[-1]

    yield create
    for batcher in batchers:
        batcher.close(60)


def start_first_batch(batcher: Batcher, model: FakeModel) -> None:
    """Let the model thread start a batch, so that later calls wait in the queue."""
    batcher.submit("key", model, [(1, "first")], Deadline(60))
    assert model.started.wait(60)


def compute_results(
    batcher: Batcher,
    key: Hashable,
    compute_batch: BatchFunction,
    payloads: Sequence[tuple[int, Any]],
    deadline: Deadline,
) -> list[Any]:
    """Submit a call and wait for its results, as requests do in threads."""
    return wait_for_result(batcher.submit(key, compute_batch, payloads, deadline), deadline)


def set_measured_speed(batcher: Batcher, tokens_per_second: float) -> None:
    """Set the measured speed, and pretend that enough batches were measured to reject calls."""
    batcher._scheduler._tokens_per_second = tokens_per_second
    batcher._scheduler._measured_batches = 10.0


def create_deadline(expires_at: float) -> Deadline:
    """Return a deadline that expires at a time of ``FakeClock``."""
    deadline = Deadline(60)
    deadline.expires_at = expires_at
    return deadline


def test_queued_calls_share_batches_up_to_the_token_budget(create_batcher: BatcherFactory) -> None:
    """Four calls of 25 tokens share a batch of 100 tokens, and each call gets its own result."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    futures = [batcher.submit("key", model, [(25, number)], Deadline(60)) for number in range(10)]
    model.resume.set()
    assert [future.result(60) for future in futures] == [[number * 2] for number in range(10)]
    assert model.batches[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_longest_sequence_is_computed_first(create_batcher: BatcherFactory) -> None:
    """A batch of 70 tokens has the sequence of 40 and three of 10; results keep the call's order.

    Padding does not count: with it, four sequences as long as the longest one would be 160 tokens.
    """
    batcher, model = create_batcher(max_batch_tokens=70), FakeModel()
    start_first_batch(batcher, model)
    payloads = [(10, 0), (40, 1), (10, 2), (10, 3), (10, 4)]
    future = batcher.submit("key", model, payloads, Deadline(60))
    model.resume.set()
    assert future.result(60) == [0, 2, 4, 6, 8]
    assert model.batches[1:] == [[1, 0, 2, 3], [4]]


def test_calls_with_different_keys_do_not_share_batches(create_batcher: BatcherFactory) -> None:
    """Calls of two models, which have different keys, are computed in separate batches."""
    batcher, model_1, model_2 = create_batcher(), FakeModel(), FakeModel()
    model_2.resume.set()
    start_first_batch(batcher, model_1)
    future_1 = batcher.submit("key", model_1, [(1, 1)], Deadline(60))
    future_2 = batcher.submit("other", model_2, [(1, 2)], Deadline(60))
    model_1.resume.set()
    assert (future_1.result(60), future_2.result(60)) == ([2], [4])
    assert (model_1.batches, model_2.batches) == ([["first"], [1]], [[2]])


def test_short_call_overtakes_a_long_call(create_batcher: BatcherFactory) -> None:
    """A short call waits for the running batch and one batch of a long call."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    long = batcher.submit("key", model, [(100, index) for index in range(4)], Deadline(60))
    model.resume.set()
    short = batcher.submit("key", model, [(10, "short")], Deadline(60))
    assert short.result(60) == ["shortshort"]
    assert long.result(60) == [0, 2, 4, 6]


def test_sequence_longer_than_the_budget_gets_its_own_batch(
    create_batcher: BatcherFactory,
) -> None:
    """A sequence of 300 tokens is computed alone although the maximum of a batch is 100."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    future = batcher.submit("key", model, [(300, "x"), (10, "y")], Deadline(60))
    model.resume.set()
    assert future.result(60) == ["xx", "yy"]
    assert model.batches[1:] == [["x"], ["y"]]


def test_lone_call_waits_for_others_to_share_its_batch(create_batcher: BatcherFactory) -> None:
    """Two calls that arrive within ``max_wait_seconds`` share a batch."""
    batcher, model = create_batcher(max_wait_seconds=60.0), FakeModel()
    model.resume.set()
    future = batcher.submit("key", model, [(50, 1)], Deadline(60))
    batcher.submit("key", model, [(50, 2)], Deadline(60))
    assert future.result(60) == [2]
    assert model.batches == [[1, 2]]


def test_full_queue_rejects_calls(create_batcher: BatcherFactory) -> None:
    """A call that exceeds the queue's limit gets BusyError, which says when to retry.

    A call that exceeds the limit of a call gets RequestTooLargeError. Queued calls are answered.
    """
    batcher, model = create_batcher(max_queue_tokens=400), FakeModel()
    start_first_batch(batcher, model)
    accepted = batcher.submit("key", model, [(350, 1)], Deadline(60))
    with pytest.raises(BusyError, match="350 tokens are waiting; retry in") as caught:
        batcher.submit("key", model, [(100, 2)], Deadline(60))
    assert caught.value.retry_after > 0
    with pytest.raises(RequestTooLargeError, match="500 tokens per request, got 600"):
        batcher.submit("key", model, [(600, 3)], Deadline(60))
    model.resume.set()
    assert accepted.result(60) == [2]
    assert batcher.queued_tokens == 0


def test_rejected_call_does_not_use_up_the_tokens_of_its_client(
    create_batcher: BatcherFactory,
) -> None:
    """The tokens of a call that a full queue rejects are available again."""
    batcher, model = create_batcher(max_queue_tokens=400), FakeModel()
    start_first_batch(batcher, model)
    accepted = batcher.submit("key", model, [(350, 1)], Deadline(60))
    bucket = TokenBucket(100.0, clock=lambda: 0.0)
    with pytest.raises(BusyError, match="tokens are waiting"):
        batcher.submit("key", model, [(100, 2)], Deadline(60, token_bucket=bucket))
    assert bucket.take(100) == 0
    model.resume.set()
    assert accepted.result(60) == [2]


def test_call_fails_at_its_deadline(create_batcher: BatcherFactory) -> None:
    """The caller gets DeadlineExceededError while the model is busy, and the call is dropped."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    with pytest.raises(DeadlineExceededError, match="not answered in time"):
        compute_results(batcher, "key", model, [(1, "late")], Deadline(0.1))
    model.resume.set()
    assert compute_results(batcher, "key", model, [(1, 1)], Deadline(60)) == [2]
    assert ["late"] not in model.batches
    assert [1] in model.batches


def test_disconnect_cancels_a_queued_call(create_batcher: BatcherFactory) -> None:
    """The waiting thread gets DisconnectedError, and the model does not compute the call."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    deadline, is_disconnected = Deadline(60), threading.Event()

    def submit_cancelled_call() -> None:
        with pytest.raises(DisconnectedError):
            compute_results(batcher, "key", model, [(1, "cancelled")], deadline)
        is_disconnected.set()

    threading.Thread(target=submit_cancelled_call, daemon=True).start()
    while not batcher.queued_tokens:
        time.sleep(0.01)
    deadline.cancel()
    assert is_disconnected.wait(60)
    model.resume.set()
    assert compute_results(batcher, "key", model, [(1, 1)], Deadline(60)) == [2]
    assert not any("cancelled" in batch for batch in model.batches)


def test_failing_sequence_does_not_fail_its_batch(create_batcher: BatcherFactory) -> None:
    """The other calls of the batch get their results, and the model thread keeps running."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    before = batcher.submit("key", model, [(1, 1)], Deadline(60))
    failing = batcher.submit("key", model, [(1, "bad")], Deadline(60))
    after = batcher.submit("key", model, [(1, 3)], Deadline(60))
    model.resume.set()
    assert (before.result(60), after.result(60)) == ([2], [6])
    with pytest.raises(ValueError, match="cannot be computed"):
        failing.result(60)
    assert batcher.is_alive


def test_close_finishes_queued_calls_and_rejects_new_ones(create_batcher: BatcherFactory) -> None:
    """New calls get ShuttingDownError; the model thread ends after the queued call."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
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
    """With two threads, a second batch starts while the first one is computed."""
    batcher, model_1, model_2 = create_batcher(num_threads=2), FakeModel(), FakeModel()
    start_first_batch(batcher, model_1)
    future_2 = batcher.submit("other", model_2, [(1, 2)], Deadline(60))
    assert model_2.started.wait(60)
    future_3 = batcher.submit("other", model_2, [(1, 3)], Deadline(60))
    model_2.resume.set()
    assert (future_2.result(60), future_3.result(60)) == ([4], [6])
    model_1.resume.set()


def test_batches_of_one_call_run_on_all_threads(create_batcher: BatcherFactory) -> None:
    """A call of three batches uses three threads at the same time."""
    batcher = create_batcher(num_threads=3, max_wait_seconds=60.0)
    barrier = threading.Barrier(3)

    def compute(payloads: list[Any]) -> list[Any]:
        # Fails unless three batches are computed concurrently.
        barrier.wait(60)
        return payloads

    future = batcher.submit("key", compute, [(100, index) for index in range(3)], Deadline(60))
    assert future.result(60) == [0, 1, 2]


def test_call_that_fails_on_two_threads_fails_once(create_batcher: BatcherFactory) -> None:
    """The call gets the first error, and the second error does not end its thread."""
    batcher = create_batcher(num_threads=2)
    barrier = threading.Barrier(2)

    def compute(payloads: list[Any]) -> list[Any]:
        barrier.wait(60)
        raise ValueError("cannot be computed")

    failing = batcher.submit("key", compute, [(100, 1), (100, 2)], Deadline(60))
    with pytest.raises(ValueError, match="cannot be computed"):
        failing.result(60)
    model = FakeModel()
    model.resume.set()
    assert compute_results(batcher, "key", model, [(1, 1)], Deadline(60)) == [2]
    assert batcher.is_alive


def test_concurrent_batches_share_the_cores(create_batcher: BatcherFactory) -> None:
    """On 4 cores, a second concurrent batch gets 2 PyTorch threads, and a lone batch gets 4."""
    previous_num_threads = torch.get_num_threads()
    thread_counts: list[int] = []
    torch.set_num_threads(4)
    try:
        batcher, model_1, model_2 = create_batcher(num_threads=2), FakeModel(), FakeModel()

        def compute(payloads: list[Any]) -> Sequence[Any]:
            thread_counts.append(torch.get_num_threads())
            return model_2(payloads)

        start_first_batch(batcher, model_1)
        model_2.resume.set()
        compute_results(batcher, "other", compute, [(1, 1)], Deadline(60))
        # Let the first batch end before the next one starts.
        model_1.resume.set()
        end = time.monotonic() + 60
        while batcher._scheduler.num_running_batches and time.monotonic() < end:
            time.sleep(0.01)
        compute_results(batcher, "other", compute, [(1, 1)], Deadline(60))
    finally:
        torch.set_num_threads(previous_num_threads)
    assert thread_counts == [2, 4]


def test_call_without_sequences_returns_an_empty_list(create_batcher: BatcherFactory) -> None:
    """A call without sequences does not reach the model."""
    assert compute_results(create_batcher(), "key", FakeModel(), [], Deadline(1)) == []


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
            payloads = [(7, (caller, number, index)) for index in range(3)]
            results = compute_results(batcher, "key", model, payloads, Deadline(60))
            if results != [payload * 2 for _, payload in payloads]:
                failures.append((caller, number))

    threads = [threading.Thread(target=run_calls, args=(caller,)) for caller in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert batcher.queued_tokens == 0


def test_call_that_would_be_late_is_rejected_on_arrival(create_batcher: BatcherFactory) -> None:
    """The estimated time of a call includes the queued tokens; BusyError says when to retry."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, max_queue_tokens=10**6, max_call_tokens=10**6)
    model = FakeModel()
    set_measured_speed(batcher, 100.0)
    deadline = create_deadline(clock.now + 30)
    start_first_batch(batcher, model)
    batcher.submit("key", model, [(100, index) for index in range(16)], deadline)
    with pytest.raises(BusyError, match="1,601 tokens are waiting or being computed") as caught:
        batcher.submit("key", model, [(100, index) for index in range(16)], deadline)
    # 3,201 tokens take 32 seconds; a large call may need 90 % of its 30 seconds.
    assert caught.value.retry_after == pytest.approx(5.01, abs=0.05)
    # Short calls may use all of their 30 seconds, in which both size classes receive up to 1,500
    # tokens. One token is being computed.
    for _ in range(14):
        batcher.submit("key", model, [(100, "short")], deadline)
    with pytest.raises(BusyError):
        batcher.submit("key", model, [(100, "short")], deadline)
    model.resume.set()


def test_estimated_time_includes_running_batches(create_batcher: BatcherFactory) -> None:
    """With an empty queue, a call can be rejected because of the batch being computed."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, max_queue_tokens=10**6, max_call_tokens=10**6)
    model = FakeModel()
    set_measured_speed(batcher, 100.0)
    deadline = create_deadline(clock.now + 30)
    batcher.submit("key", model, [(2000, "large")], deadline)
    assert model.started.wait(60)
    assert batcher.queued_tokens == 0
    with pytest.raises(BusyError, match="2,000 tokens are waiting or being computed"):
        batcher.submit("key", model, [(500, 1)], deadline)
    model.resume.set()


def test_idle_server_accepts_any_call(create_batcher: BatcherFactory) -> None:
    """A call that seems too slow is accepted if no other is pending: the speed may be wrong."""
    batcher, model = create_batcher(), FakeModel()
    model.resume.set()
    set_measured_speed(batcher, 0.001)
    results = compute_results(
        batcher, "key", model, [(100, index) for index in range(5)], Deadline(60)
    )
    assert results == [0, 2, 4, 6, 8]


def test_small_batches_hardly_change_the_measured_speed(create_batcher: BatcherFactory) -> None:
    """Five batches of one token hardly change the measured speed; the first full batch sets it."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, num_threads=1)

    def compute(payloads: list[Any]) -> list[Any]:
        clock.now += 1.0
        return payloads

    # Each batch takes a second, so that a full batch has a speed of 100 tokens per second.
    batcher._scheduler._tokens_per_second = 1000.0
    for _ in range(5):
        compute_results(batcher, "key", compute, [(1, 1)], Deadline(60))
    assert batcher._scheduler._tokens_per_second > 900
    compute_results(batcher, "key", compute, [(100, 1)], Deadline(60))
    assert batcher._scheduler._tokens_per_second == pytest.approx(100, abs=50)


def test_newest_large_calls_are_rejected_when_the_speed_drops(
    create_batcher: BatcherFactory,
) -> None:
    """At a measured speed too low for all queued calls, only the oldest ones are answered."""
    clock = FakeClock()
    batcher = create_batcher(clock=clock, max_queue_tokens=10**6)
    batches: list[list[Any]] = []
    resume = threading.Event()

    def compute(payloads: list[Any]) -> list[Any]:
        assert resume.wait(60)
        # 100 tokens in 10 seconds are far slower than the initial estimate of 4,000 per second.
        clock.now += 10.0
        batches.append(payloads)
        return payloads

    # Each call has four batches, which take 40 of its 100 seconds.
    calls = []
    for number in range(4):
        payloads = [(100, (number, index)) for index in range(4)]
        deadline = create_deadline(clock.now + 100)
        calls.append(batcher.submit("call", compute, payloads, deadline))
    resume.set()
    for number in (0, 1):
        assert calls[number].result(60) == [(number, index) for index in range(4)]
    for call in calls[2:]:
        with pytest.raises(BusyError, match="the server is busy"):
            call.result(60)
    # No batch of the rejected calls was computed.
    assert len(batches) == 8
    assert batcher.queued_tokens == 0


def test_disconnect_removes_queued_tokens_at_once(create_batcher: BatcherFactory) -> None:
    """Tokens of a cancelled call no longer count, although the model is still busy."""
    batcher, model = create_batcher(), FakeModel()
    start_first_batch(batcher, model)
    deadline = Deadline(60)
    batcher.submit("key", model, [(100, index) for index in range(5)], deadline)
    assert batcher.queued_tokens == 500
    deadline.cancel()
    assert batcher.queued_tokens == 0
    model.resume.set()
    assert compute_results(batcher, "key", model, [(1, 1)], Deadline(60)) == [2]
    assert model.batches == [["first"], [1]]
