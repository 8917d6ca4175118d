"""The batcher: what is computed together, whose turn it is, and every way in which a call can end.

These tests never load a model.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from bertsmith.serve.batching import Batcher
from bertsmith.serve.patience import (
    BusyError,
    GoneError,
    LargeError,
    LateError,
    Patience,
    StoppingError,
)


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
        assert self.let.wait(20)
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
        own.close(5)


def busy(batcher: Batcher, machine: Machine) -> None:
    """Have the model thread hold one batch, so that what comes next waits."""
    batcher.submit("key", machine, [(1, "first")], Patience(20))
    assert machine.begun.wait(20)


def test_what_waits_is_computed_together_up_to_the_budget(make: Make) -> None:
    """Ten calls of 25 tokens go four a batch; every call gets its own answers."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    futures = [batcher.submit("key", machine, [(25, n)], Patience(20)) for n in range(10)]
    machine.let.set()
    assert [own.result(20) for own in futures] == [[n * 2] for n in range(10)]
    assert machine.batches[1:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_keys_are_not_mixed(make: Make) -> None:
    """Two models, or two ways to pool, never stand in one batch."""
    batcher, one, two = make(), Machine(), Machine()
    two.let.set()
    busy(batcher, one)
    first = batcher.submit("key", one, [(1, 1)], Patience(20))
    second = batcher.submit("other", two, [(1, 2)], Patience(20))
    one.let.set()
    assert (first.result(20), second.result(20)) == ([2], [4])
    assert (one.batches, two.batches) == ([["first"], [1]], [[2]])


def test_a_long_call_lets_a_short_one_in(make: Make) -> None:
    """Of a call of 400 tokens only what was due stands before a call that comes after it."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    batcher._rate = 1000.0  # so that 100 tokens take a tenth of a second
    long = batcher.submit("key", machine, [(100, n) for n in range(4)], Patience(20))
    time.sleep(0.15)
    short = batcher.submit("key", machine, [(10, "short")], Patience(20))
    machine.let.set()
    assert short.result(20) == ["shortshort"]
    assert long.result(20) == [0, 2, 4, 6]
    turns = [own for batch in machine.batches[1:] for own in batch]
    assert turns == [0, 1, "short", 2, 3]


def test_a_sequence_beyond_the_budget_stands_alone(make: Make) -> None:
    """It is computed all the same."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    future = batcher.submit("key", machine, [(300, "x"), (10, "y")], Patience(20))
    machine.let.set()
    assert future.result(20) == ["xx", "yy"]
    assert machine.batches[1:] == [["x"], ["y"]]


def test_a_lone_call_waits_a_moment_for_others(make: Make) -> None:
    """Two calls that come one after the other are one batch."""
    batcher, machine = make(wait=1.0), Machine()
    machine.let.set()
    first = batcher.submit("key", machine, [(1, 1)], Patience(20))
    time.sleep(0.05)
    batcher.submit("key", machine, [(99, 2)], Patience(20))
    assert first.result(20) == [2]
    assert machine.batches == [[1, 2]]


def test_a_full_queue_refuses_and_says_when(make: Make) -> None:
    """What waits stays; a call too large for any queue is refused for good."""
    batcher, machine = make(queue_tokens=400), Machine()
    busy(batcher, machine)
    kept = batcher.submit("key", machine, [(350, 1)], Patience(20))
    with pytest.raises(BusyError, match="350 tokens are waiting already; ask again in") as told:
        batcher.submit("key", machine, [(100, 2)], Patience(20))
    assert told.value.seconds > 0
    with pytest.raises(LargeError, match="600 tokens; this server takes 500"):
        batcher.submit("key", machine, [(600, 3)], Patience(20))
    machine.let.set()
    assert kept.result(20) == [2]
    assert batcher.waiting == 0


def test_a_call_ends_in_time(make: Make) -> None:
    """LateError, while the model thread is at something else; what was asked is never computed."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    began = time.monotonic()
    with pytest.raises(LateError, match="no answer in time"):
        batcher.run("key", machine, [(1, "late")], Patience(0.1))
    assert time.monotonic() - began < 5
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Patience(20)) == [2]
    assert ["late"] not in machine.batches
    assert [1] in machine.batches


def test_a_client_that_leaves_frees_its_place(make: Make) -> None:
    """Its units are dropped uncomputed, and the thread that waited is free."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    patience, ended = Patience(20), threading.Event()

    def ask() -> None:
        with pytest.raises(GoneError):
            batcher.run("key", machine, [(1, "gone")], patience)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    while not batcher.waiting:
        time.sleep(0.01)
    patience.cancel()
    assert ended.wait(5)
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Patience(20)) == [2]
    assert not any("gone" in batch for batch in machine.batches)


def test_one_that_cannot_be_computed_fails_alone(make: Make) -> None:
    """Its neighbours in the batch get their answers, and the thread goes on."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    good = batcher.submit("key", machine, [(1, 1)], Patience(20))
    bad = batcher.submit("key", machine, [(1, "bad")], Patience(20))
    also = batcher.submit("key", machine, [(1, 3)], Patience(20))
    machine.let.set()
    assert (good.result(20), also.result(20)) == ([2], [6])
    with pytest.raises(ValueError, match="cannot be computed"):
        bad.result(20)
    assert batcher.alive


def test_closing_finishes_what_waits_and_takes_nothing_new(make: Make) -> None:
    """StoppingError for what comes after; the thread is at its end."""
    batcher, machine = make(), Machine()
    busy(batcher, machine)
    waits = batcher.submit("key", machine, [(1, 1)], Patience(20))
    closing = threading.Thread(target=batcher.close, args=(20,))
    closing.start()
    while batcher._open:
        time.sleep(0.01)
    with pytest.raises(StoppingError, match="being stopped"):
        batcher.submit("key", machine, [(1, 2)], Patience(20))
    machine.let.set()
    closing.join(20)
    assert waits.result(0) == [2]
    assert not batcher.alive


def test_several_at_once(make: Make) -> None:
    """A second batch begins while the first is computed, and a third waits for either."""
    batcher, one, two = make(at_once=2), Machine(), Machine()
    busy(batcher, one)
    second = batcher.submit("other", two, [(1, 2)], Patience(20))
    assert two.begun.wait(20)
    third = batcher.submit("other", two, [(1, 3)], Patience(20))
    two.let.set()
    assert (second.result(20), third.result(20)) == ([4], [6])
    one.let.set()


def test_what_is_beyond_a_batch_goes_to_the_next_thread(make: Make) -> None:
    """All that waits is begun at once where there are threads for it."""
    batcher, gate = make(at_once=3, wait=0.5), threading.Barrier(3)

    def compute(payloads: list[Any]) -> list[Any]:
        # Broken unless three batches meet here.
        gate.wait(10)
        return payloads

    found = batcher.submit("key", compute, [(100, n) for n in range(3)], Patience(20))
    assert found.result(20) == [0, 1, 2]


def test_one_call_that_fails_in_several_threads_fails_once(make: Make) -> None:
    """The first error is the call's, and no thread ends of the second."""
    batcher, gate = make(at_once=2), threading.Barrier(2)

    def compute(payloads: list[Any]) -> list[Any]:
        gate.wait(10)
        raise ValueError("cannot be computed")

    failing = batcher.submit("key", compute, [(100, 1), (100, 2)], Patience(20))
    with pytest.raises(ValueError, match="cannot be computed"):
        failing.result(20)
    machine = Machine()
    machine.let.set()
    assert batcher.run("key", machine, [(1, 1)], Patience(20)) == [2]
    assert batcher.alive


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
        batcher.run("other", compute, [(1, 1)], Patience(20))
        one.let.set()
        until = time.monotonic() + 20
        while batcher._under_way and time.monotonic() < until:
            time.sleep(0.01)
        batcher.run("other", compute, [(1, 1)], Patience(20))
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 4]


def test_no_units_are_answered_at_once(make: Make) -> None:
    """With nothing."""
    assert make().run("key", Machine(), [], Patience(1)) == []


@pytest.mark.parametrize("at_once", [1, 3])
def test_many_threads(make: Make, at_once: int) -> None:
    """Thirty threads with twenty calls each: every answer is its own."""
    batcher, machine = make(queue_tokens=10**6, at_once=at_once), Machine()
    machine.let.set()
    wrong: list[Any] = []

    def ask(who: int) -> None:
        for turn in range(20):
            units = [(7, (who, turn, n)) for n in range(3)]
            found = batcher.run("key", machine, units, Patience(20))
            if found != [own * 2 for _, own in units]:
                wrong.append((who, turn))

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(30)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong
    assert batcher.waiting == 0
