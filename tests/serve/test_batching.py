"""The batcher: what is computed together, whose turn it is, and all ways in which a call ends."""

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


class Clock:
    """A clock that the test sets; it begins at the real time, on which deadlines are."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Machine:
    """Computes payloads when it is let, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.let = threading.Event()
        self.begun = threading.Event()

    def __call__(self, payloads: list[Any]) -> Sequence[Any]:
        """Return each payload, doubled, once it is let."""
        self.batches.append(payloads)
        self.begun.set()
        assert self.let.wait(60)
        if "bad" in payloads:
            raise ValueError("cannot be computed")
        return [own * 2 for own in payloads]


Make = Callable[..., Batcher]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a batcher of 100 tokens a batch; closed at the end."""
    made: list[Batcher] = []

    def new(**more: Any) -> Batcher:
        limits = {"batch_tokens": 100, "queue_tokens": 1000, "call_tokens": 500, "wait": 0.0}
        made.append(Batcher(**{**limits, **more}))
        return made[-1]

    yield new
    for own in made:
        own.close(60)


def busy(batcher: Batcher, machine: Machine) -> None:
    """Have the model thread hold one batch, so that what comes next waits."""
    batcher.submit("key", machine, [(1, "first")], Deadline(60))
    assert machine.begun.wait(60)


def test_what_waits_is_computed_together_up_to_the_budget(make: Make) -> None:
    """Ten calls of 25 tokens go four a batch; every call gets its own answers."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    futures = [batcher.submit("key", machine, [(25, n)], Deadline(60)) for n in range(10)]
    machine.let.set()
    assert [own.result(60) for own in futures] == [[n * 2] for n in range(10)]
    assert machine.batches[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_keys_are_not_mixed(make: Make) -> None:
    """Two models, or two ways to pool, never stand in one batch."""
    batcher, one, two = make(), Machine(), Machine()
    two.let.set()
    busy(batcher, one)
    first = batcher.submit("key", one, [(1, 1)], Deadline(60))
    second = batcher.submit("other", two, [(1, 2)], Deadline(60))
    one.let.set()
    assert (first.result(60), second.result(60)) == ([2], [4])
    assert (one.batches, two.batches) == ([["first"], [1]], [[2]])


def test_a_long_call_lets_a_short_one_in(make: Make) -> None:
    """Of a call of 400 tokens only what was due stands before a call that comes after it."""
    clock = Clock()
    batcher, machine = make(clock=clock), Machine()
    busy(batcher, machine)
    batcher._rate = 1000.0  # so that 100 tokens take a tenth of a second
    long = batcher.submit("key", machine, [(100, n) for n in range(4)], Deadline(60))
    clock.now += 0.15
    short = batcher.submit("key", machine, [(10, "short")], Deadline(60))
    machine.let.set()
    assert short.result(60) == ["shortshort"]
    assert long.result(60) == [0, 2, 4, 6]
    turns = [own for batch in machine.batches[1:] for own in batch]
    assert turns == [0, 1, "short", 2, 3]


def test_a_sequence_beyond_the_budget_stands_alone(make: Make) -> None:
    """It is computed all the same."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    future = batcher.submit("key", machine, [(300, "x"), (10, "y")], Deadline(60))
    machine.let.set()
    assert future.result(60) == ["xx", "yy"]
    assert machine.batches[1:] == [["x"], ["y"]]


def test_a_lone_call_waits_a_moment_for_others(make: Make) -> None:
    """Two calls that come one after the other are one batch."""
    batcher, machine = make(wait=60.0), Machine()
    machine.let.set()
    first = batcher.submit("key", machine, [(1, 1)], Deadline(60))
    batcher.submit("key", machine, [(99, 2)], Deadline(60))
    assert first.result(60) == [2]
    assert machine.batches == [[1, 2]]


def test_a_full_queue_refuses_and_says_when(make: Make) -> None:
    """What waits stays; a call too large for any queue is refused for good."""
    batcher, machine = make(queue_tokens=400), Machine()
    busy(batcher, machine)
    kept = batcher.submit("key", machine, [(350, 1)], Deadline(60))
    with pytest.raises(BusyError, match="350 tokens are waiting already; ask again in") as told:
        batcher.submit("key", machine, [(100, 2)], Deadline(60))
    assert told.value.retry_after > 0
    with pytest.raises(RequestTooLargeError, match="600 tokens; this server takes 500"):
        batcher.submit("key", machine, [(600, 3)], Deadline(60))
    machine.let.set()
    assert kept.result(60) == [2]
    assert batcher.waiting == 0


def test_a_call_ends_in_time(make: Make) -> None:
    """LateError, while the model thread is at something else; what was asked is never computed."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    with pytest.raises(DeadlineExceededError, match="no answer in time"):
        batcher.run("key", machine, [(1, "late")], Deadline(0.1))
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Deadline(60)) == [2]
    assert ["late"] not in machine.batches
    assert [1] in machine.batches


def test_a_client_that_leaves_frees_its_place(make: Make) -> None:
    """Its units are dropped uncomputed, and the thread that waited is free."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    patience, ended = Deadline(60), threading.Event()

    def ask() -> None:
        with pytest.raises(DisconnectedError):
            batcher.run("key", machine, [(1, "gone")], patience)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    while not batcher.waiting:
        time.sleep(0.01)
    patience.cancel()
    assert ended.wait(60)
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Deadline(60)) == [2]
    assert not any("gone" in batch for batch in machine.batches)


def test_one_that_cannot_be_computed_fails_alone(make: Make) -> None:
    """Its neighbours in the batch get their answers, and the thread goes on."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    good = batcher.submit("key", machine, [(1, 1)], Deadline(60))
    bad = batcher.submit("key", machine, [(1, "bad")], Deadline(60))
    also = batcher.submit("key", machine, [(1, 3)], Deadline(60))
    machine.let.set()
    assert (good.result(60), also.result(60)) == ([2], [6])
    with pytest.raises(ValueError, match="cannot be computed"):
        bad.result(60)
    assert batcher.is_alive


def test_closing_finishes_what_waits_and_takes_nothing_new(make: Make) -> None:
    """StoppingError for what comes after; the thread is at its end."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    waits = batcher.submit("key", machine, [(1, 1)], Deadline(60))
    closing = threading.Thread(target=batcher.close, args=(60,))
    closing.start()
    while batcher._open:
        time.sleep(0.01)
    with pytest.raises(ShuttingDownError, match="being stopped"):
        batcher.submit("key", machine, [(1, 2)], Deadline(60))
    machine.let.set()
    closing.join(60)
    assert waits.result(0) == [2]
    assert not batcher.is_alive


def test_several_at_once(make: Make) -> None:
    """A second batch begins while the first is computed, and a third waits for either."""
    batcher, one, two = make(at_once=2), Machine(), Machine()
    busy(batcher, one)
    second = batcher.submit("other", two, [(1, 2)], Deadline(60))
    assert two.begun.wait(60)
    third = batcher.submit("other", two, [(1, 3)], Deadline(60))
    two.let.set()
    assert (second.result(60), third.result(60)) == ([4], [6])
    one.let.set()


def test_what_is_beyond_a_batch_goes_to_the_next_thread(make: Make) -> None:
    """All that waits is begun at once where there are threads for it."""
    batcher, gate = make(at_once=3, wait=60.0), threading.Barrier(3)

    def compute(payloads: list[Any]) -> list[Any]:
        # Broken unless three batches meet here.
        gate.wait(60)
        return payloads

    found = batcher.submit("key", compute, [(100, n) for n in range(3)], Deadline(60))
    assert found.result(60) == [0, 1, 2]


def test_one_call_that_fails_in_several_threads_fails_once(make: Make) -> None:
    """The first error is the call's, and no thread ends of the second."""
    batcher, gate = make(at_once=2), threading.Barrier(2)

    def compute(payloads: list[Any]) -> list[Any]:
        gate.wait(60)
        raise ValueError("cannot be computed")

    failing = batcher.submit("key", compute, [(100, 1), (100, 2)], Deadline(60))
    with pytest.raises(ValueError, match="cannot be computed"):
        failing.result(60)
    machine = Machine()
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Deadline(60)) == [2]
    assert batcher.is_alive


def test_batches_at_once_share_the_cores(make: Make) -> None:
    """A lone batch has all of PyTorch's threads, the second of two half of them."""
    before, threads = torch.get_num_threads(), []
    torch.set_num_threads(4)
    try:
        batcher, one, two = make(at_once=2), Machine(), Machine()

        def compute(payloads: list[Any]) -> Sequence[Any]:
            threads.append(torch.get_num_threads())
            return two(payloads)

        busy(batcher, one)
        two.let.set()
        batcher.run("other", compute, [(1, 1)], Deadline(60))
        one.let.set()
        until = time.monotonic() + 60
        while batcher._under_way and time.monotonic() < until:
            time.sleep(0.01)
        batcher.run("other", compute, [(1, 1)], Deadline(60))
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 4]


def test_no_units_are_answered_at_once(make: Make) -> None:
    """With nothing."""
    assert make().run("key", Machine(), [], Deadline(1)) == []


@pytest.mark.parametrize("at_once", [1, 3])
def test_many_threads(make: Make, at_once: int) -> None:
    """Thirty threads with twenty calls each: every answer is its own."""
    batcher, machine = make(queue_tokens=10**6, at_once=at_once), Machine()
    machine.let.set()
    wrong: list[Any] = []

    def ask(who: int) -> None:
        for turn in range(20):
            units = [(7, (who, turn, n)) for n in range(3)]
            found = batcher.run("key", machine, units, Deadline(60))
            if found != [own * 2 for _, own in units]:
                wrong.append((who, turn))

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(30)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong
    assert batcher.waiting == 0


def test_a_call_that_would_be_late_is_refused_when_it_comes(make: Make) -> None:
    """By its own tokens and those ahead; the error says when it is worth to ask again."""
    clock = Clock()
    batcher, machine = make(clock=clock, queue_tokens=10**6, call_tokens=10**6), Machine()
    batcher._rate, batcher._measured = 100.0, 10.0
    patience = Deadline(60)
    patience.expires_at = clock.now + 30
    busy(batcher, machine)
    batcher.submit("key", machine, [(100, n) for n in range(16)], patience)
    with pytest.raises(BusyError, match="1,601 tokens are waiting or being computed") as caught:
        batcher.submit("key", machine, [(100, n) for n in range(16)], patience)
    # 3,201 tokens take 32 seconds, of which a large call may need 24.
    assert caught.value.retry_after == pytest.approx(8.01)
    # Short calls come before the last turns of large ones.
    for _ in range(13):
        batcher.submit("key", machine, [(100, "short")], patience)
    with pytest.raises(BusyError):
        batcher.submit("key", machine, [(100, "short")], patience)
    machine.let.set()


def test_tokens_under_way_count(make: Make) -> None:
    """Nothing waits, but what is computed takes its time, too."""
    clock = Clock()
    batcher, machine = make(clock=clock, queue_tokens=10**6, call_tokens=10**6), Machine()
    batcher._rate, batcher._measured = 100.0, 10.0
    patience = Deadline(60)
    patience.expires_at = clock.now + 30
    batcher.submit("key", machine, [(2000, "large")], patience)
    assert machine.begun.wait(60)
    assert batcher.waiting == 0
    with pytest.raises(BusyError, match="2,000 tokens are waiting or being computed"):
        batcher.submit("key", machine, [(500, 1)], patience)
    machine.let.set()


def test_a_lone_call_gets_its_chance(make: Make) -> None:
    """The estimate may be wrong, and nobody else wants the model."""
    batcher, machine = make(), Machine()
    machine.let.set()
    batcher._rate, batcher._measured = 0.001, 10.0
    assert batcher.run("key", machine, [(100, n) for n in range(5)], Deadline(60)) == [
        0, 2, 4, 6, 8,
    ]  # fmt: skip


def test_small_batches_tell_little_of_the_rate(make: Make) -> None:
    """A token alone takes as long as many; the first full batch tells nearly all."""
    clock = Clock()
    batcher = make(clock=clock, at_once=1)

    def compute(payloads: list[Any]) -> list[Any]:
        clock.now += 1.0
        return payloads

    batcher._rate = 1000.0
    for _ in range(5):
        batcher.run("key", compute, [(1, 1)], Deadline(60))
    assert batcher._rate > 900
    batcher.run("key", compute, [(100, 1)], Deadline(60))
    assert batcher._rate == pytest.approx(100, abs=50)


def test_what_was_promised_by_a_wrong_rate_is_refused_later(make: Make) -> None:
    """The oldest calls are answered in time, the newest refused, where all would be late."""
    clock = Clock()
    batcher, batches, let = make(clock=clock, queue_tokens=10**6), [], threading.Event()

    def compute(payloads: list[Any]) -> list[Any]:
        assert let.wait(60)
        # Ten tokens a second, far from the first guess.
        clock.now += 10.0
        batches.append(payloads)
        return payloads

    patience = [Deadline(60) for _ in range(4)]
    for own in patience:
        own.expires_at = clock.now + 100
    calls = [
        batcher.submit("call", compute, [(100, (number, n)) for n in range(4)], own)
        for number, own in enumerate(patience)
    ]
    let.set()
    for number in (0, 1):
        assert calls[number].result(60) == [(number, n) for n in range(4)]
    for call in calls[2:]:
        with pytest.raises(BusyError, match="the server is busy"):
            call.result(60)
    # Two batches measured the rate; all others are of the calls that stayed.
    assert len(batches) == 8
    assert batcher.waiting == 0


def test_tokens_of_a_client_that_left_do_not_count(make: Make) -> None:
    """At once, while the model is still at something else."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    patience = Deadline(60)
    batcher.submit("key", machine, [(100, n) for n in range(5)], patience)
    assert batcher.waiting == 500
    patience.cancel()
    assert batcher.waiting == 0
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Deadline(60)) == [2]
    assert machine.batches == [["first"], [1]]
