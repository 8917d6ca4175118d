"""Overload, fairness and the order of calls, on a simulated model and clock."""

import pytest

from bertsmith.serve.clients import ConcurrencyLimit, get_address_group
from bertsmith.serve.deadline import BusyError, DeadlineExceededError
from bertsmith.serve.fair_queue import Call, FairQueue
from bertsmith.serve.scheduling import CallScheduler
from tests.serve.simulation import TOKENS_PER_SECOND, Simulation, Traffic

#: Texts of 512 tokens, which need eight seconds of the model.
LARGE = (512,) * 64
MEDIUM = (128,) * 16
SHORT = (200,)
WORD = Traffic("word", (3,), 15.0)


def create_call(client: str, *lengths: int, key: str = "key", expires_at: float = 30.0) -> Call:
    """Return a call whose payloads are the lengths of its sequences."""
    return Call(key, client, list, expires_at, list(lengths), list(lengths), 0.0)


def create_scheduler(now: list[float], max_queue_tokens: int = 10_000) -> CallScheduler:
    """Return a scheduler of a model that computes 100 tokens per second, in batches of 100."""
    scheduler = CallScheduler(
        max_batch_tokens=100, max_queue_tokens=max_queue_tokens, clock=lambda: now[0]
    )
    scheduler._tokens_per_second = 100.0
    scheduler._measured_batches = 10.0
    return scheduler


def pop_clients(queue: FairQueue) -> list[str]:
    """Empty a queue; return the clients of each batch, joined."""
    batches = []
    while queue:
        batch = queue.pop_batch(lambda _: True)
        batches.append("".join(sequence.call.client for sequence in batch))
    return batches


@pytest.mark.parametrize("load", [2.0, 10.0])
@pytest.mark.parametrize(
    "sizes",
    [(SHORT,), (MEDIUM,), (LARGE,), (LARGE, MEDIUM, SHORT)],
    ids=["short", "medium", "large", "mixed"],
)
def test_goodput_does_not_fall_under_overload(load: float, sizes: tuple[tuple[int, ...]]) -> None:
    """At 2x and 10x the sustainable load, 90 % of the work is answered in time."""
    rate = load * TOKENS_PER_SECOND / len(sizes)
    traffic = [
        Traffic(f"size {number} ", lengths, rate, num_clients=8)
        for number, lengths in enumerate(sizes)
    ]
    simulation = Simulation(traffic, seconds=90 if SHORT in sizes else 180)
    assert simulation.get_goodput() > 0.9
    assert all(outcome.num_rejected for outcome in simulation.outcomes.values())
    # Accepted calls are answered, except for a few whose time was estimated too low.
    num_late = sum(outcome.num_late for outcome in simulation.outcomes.values())
    num_answered = sum(len(outcome.seconds) for outcome in simulation.outcomes.values())
    assert num_late < 0.15 * num_answered


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("load", [0.8, 10.0])
def test_one_word_requests_are_fast_next_to_large_ones(load: float, num_threads: int) -> None:
    """99 % of the requests with one word wait less than a second, and none is rejected."""
    traffic = [WORD, Traffic("large", (512,) * 128, load * TOKENS_PER_SECOND, num_clients=8)]
    word = Simulation(traffic, 180, num_threads).outcomes["word"]
    assert len(word.seconds) == word.num_requests > 500
    assert word.get_p99_seconds() < 1.0


def test_one_word_requests_are_fast_next_to_requests_of_all_sizes() -> None:
    """A client with one-word requests waits for a few batches, not for other clients' requests."""
    traffic = [WORD] + [
        Traffic(f"size {len(lengths)}", lengths, 3 * TOKENS_PER_SECOND, num_clients=4)
        for lengths in (LARGE, MEDIUM, SHORT)
    ]
    word = Simulation(traffic, 100).outcomes["word"]
    assert len(word.seconds) == word.num_requests
    assert word.get_p99_seconds() < 1.5


def test_one_word_requests_are_fast_next_to_large_ones_of_the_same_client() -> None:
    """Large requests do not delay the short requests of their client."""
    traffic = [
        Traffic("same", LARGE, 5 * TOKENS_PER_SECOND),
        Traffic("same", (3,), 15.0, start=1.0),
    ]
    outcome = Simulation(traffic, 100).outcomes["same"]
    # The large requests take more than five seconds.
    num_short = sum(seconds < 1.0 for seconds in outcome.seconds)
    assert num_short > 400


def test_short_requests_leave_time_for_large_ones() -> None:
    """Large requests are answered although short ones use 30 % of the model."""
    traffic = [
        Traffic("large", (512,) * 96, 10 * TOKENS_PER_SECOND, num_clients=4),
        Traffic("short", SHORT, 0.3 * TOKENS_PER_SECOND, num_clients=8),
    ]
    outcomes = Simulation(traffic, 300).outcomes
    assert outcomes["large"].num_late <= 1
    assert outcomes["large"].num_tokens > 0.6 * 300 * TOKENS_PER_SECOND
    assert len(outcomes["short"].seconds) == outcomes["short"].num_requests


@pytest.mark.parametrize("lengths", [SHORT, MEDIUM], ids=["short", "medium"])
def test_client_below_its_share_is_not_rejected(lengths: tuple[int, ...]) -> None:
    """A client that uses 30 % of the model is answered next to one that sends 10x its speed."""
    traffic = [
        Traffic("heavy", lengths, 10 * TOKENS_PER_SECOND),
        Traffic("light", lengths, 0.3 * TOKENS_PER_SECOND, start=20.0),
    ]
    light = Simulation(traffic, 100).outcomes["light"]
    assert len(light.seconds) == light.num_requests > 30
    assert light.get_p99_seconds() < 3.0


def test_clients_of_a_size_class_take_turns() -> None:
    """A second client's call is computed after the first call of a client with many calls."""
    queue = FairQueue(100)
    for _ in range(3):
        queue.push(create_call("a", 100))
    for _ in range(2):
        queue.push(create_call("b", 100))
    assert pop_clients(queue) == ["a", "b", "a", "b", "a"]


def test_size_classes_take_turns_by_tokens() -> None:
    """Calls of one batch and a large call receive the same number of tokens."""
    queue = FairQueue(100)
    queue.push(create_call("L", *[100] * 4))
    assert len(queue.pop_batch(lambda _: True)) == 1
    for _ in range(5):
        queue.push(create_call("s", 50))
    assert pop_clients(queue) == ["ss", "ss", "L", "s", "L", "L"]


def test_large_calls_of_a_size_class_do_not_alternate() -> None:
    """A started call is finished first, also before the calls of lighter clients and other keys."""
    queue = FairQueue(100)
    queue.push(create_call("a", *[100] * 3))
    queue.push(create_call("a", *[100] * 3))
    assert len(queue.pop_batch(lambda _: True)) == 1
    queue.push(create_call("b", *[100] * 3, key="other"))
    assert pop_clients(queue) == ["a", "a", "b", "b", "b", "a", "a", "a"]


def test_idle_clients_gain_no_credit() -> None:
    """A client that was idle does not overtake more than its share afterwards."""
    queue = FairQueue(100)
    for _ in range(6):
        queue.push(create_call("a", 100))
    for _ in range(3):
        queue.pop_batch(lambda _: True)
    for _ in range(3):
        queue.push(create_call("b", 100))
    assert pop_clients(queue) == ["b", "a", "b", "a", "b", "a"]


def test_full_queue_replaces_the_newest_call_of_the_heaviest_client() -> None:
    """The replaced call gets BusyError; a client that is as heavy as the others is rejected."""
    scheduler = create_scheduler([0.0], max_queue_tokens=300)
    calls = [create_call("heavy", 100) for _ in range(3)]
    for call in calls:
        scheduler.add(call)
    with pytest.raises(BusyError, match="queue is full: 300 tokens are waiting"):
        scheduler.add(create_call("heavy", 10))
    scheduler.add(create_call("light", 100))
    assert [call.future.done() for call in calls] == [False, False, True]
    assert isinstance(calls[2].future.exception(), BusyError)
    with pytest.raises(BusyError):
        scheduler.add(create_call("third", 201))
    assert scheduler.queued_tokens == 300


def test_started_calls_are_not_replaced() -> None:
    """The computed part of a call is not wasted for a call of a lighter client."""
    scheduler = create_scheduler([0.0], max_queue_tokens=450)
    started = create_call("heavy", *[100] * 4)
    scheduler.add(started)
    scheduler.start_batch()
    with pytest.raises(BusyError):
        scheduler.add(create_call("light", *[60] * 3))
    assert not started.future.done()


def test_expired_calls_are_not_computed() -> None:
    """A queued call fails at its deadline, and the next call is computed."""
    now = [0.0]
    scheduler = create_scheduler(now)
    expired, call = create_call("a", 60, expires_at=1.0), create_call("a", 60, expires_at=60.0)
    scheduler.add(expired)
    scheduler.add(call)
    now[0] = 2.0
    assert [sequence.call for sequence in scheduler.start_batch()] == [call]
    assert isinstance(expired.future.exception(), DeadlineExceededError)
    assert scheduler.queued_tokens == 0


def test_large_call_does_not_start_too_late() -> None:
    """A large call fails without computing a part of it if it cannot end by its deadline."""
    now = [0.0]
    scheduler = create_scheduler(now)
    first, second = create_call("a", *[100] * 4), create_call("a", *[100] * 4, expires_at=10.0)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(4):
        batch = scheduler.start_batch()
        # Each batch takes two seconds instead of one.
        now[0] += 2.0
        scheduler.end_batch(batch)
    assert scheduler.start_batch() == []
    assert isinstance(second.future.exception(), BusyError)


def test_one_client_cannot_use_all_concurrent_requests() -> None:
    """A lone client runs at most 4/5 of the requests, and others still have room."""
    limit = ConcurrencyLimit(10)
    heavy = [limit.count("heavy") for _ in range(8)]
    for count in heavy:
        assert limit.has_room("heavy")
        count.__enter__()
    assert not limit.has_room("heavy")
    assert limit.has_room("light")
    with limit.count("light"):
        assert limit.num_active == 9
    heavy.pop().__exit__(None, None, None)
    assert limit.has_room("heavy")


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("unix", "unix"),
    ],
)
def test_addresses_of_one_client_are_grouped(address: str, group: str) -> None:
    """An IPv6 client owns a network of 2**64 addresses, which count as one client."""
    assert get_address_group(address) == group
