"""Several batches at once: their order, their errors, and the threads they leave behind."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bertsmith.runtime.thread_pool import map_in_threads, pool_size, set_local_num_threads

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 5, 6])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Have PyTorch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_order_is_the_items(threads: int) -> None:
    """However long each takes; and PyTorch has its threads again, in new ones too."""

    def slow(number: int) -> int:
        time.sleep(0.02 * (number % 3 == 0))
        return number * 2

    assert list(map_in_threads(slow, range(20), CPU)) == [
        (number, number * 2) for number in range(20)
    ]
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    asking.start()
    asking.join()
    assert [torch.get_num_threads(), *found] == [threads, threads]


def test_each_has_its_share(threads: int) -> None:
    """As many at once as leave the fewest threads idle, four at most; on CUDA one."""
    workers = pool_size(CPU)
    assert workers == {1: 1, 2: 2, 5: 4, 6: 3}[threads]
    assert pool_size(torch.device("cuda")) == 1
    gate = threading.Barrier(workers)

    def meet(_: int) -> int:
        gate.wait(20)
        return torch.get_num_threads()

    shares = [share for _, share in map_in_threads(meet, range(workers), CPU)]
    assert shares == [threads // workers] * workers


def test_few_items_share_all_threads() -> None:
    """Two at five threads have two each: alike, so that it is no matter which has what."""
    before, gate = torch.get_num_threads(), threading.Barrier(2)

    def meet(_: int) -> int:
        gate.wait(20)
        return torch.get_num_threads()

    torch.set_num_threads(5)
    try:
        assert [share for _, share in map_in_threads(meet, range(2), CPU)] == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_a_share_is_the_taker_s_alone(threads: int) -> None:
    """Threads that were there keep theirs, new ones begin with PyTorch's, and shares stay."""
    found: dict[str, int] = {}
    taken, over = threading.Event(), threading.Event()

    def ask(name: str) -> None:
        found[name] = torch.get_num_threads()

    def own() -> None:
        set_local_num_threads(7)
        taken.set()
        assert over.wait(20)
        ask("own")

    one = threading.Thread(target=own)
    one.start()
    assert taken.wait(20)
    set_local_num_threads(threads)
    for name in ("new", "newer"):
        other = threading.Thread(target=ask, args=(name,))
        other.start()
        other.join()
    over.set()
    one.join()
    assert found == {"own": 7, "new": threads, "newer": threads}
    assert torch.get_num_threads() == threads


def test_two_at_a_time(threads: int) -> None:
    """Threads of a user's own may do so at once; each has its results, and nobody loses threads."""
    found: list[list[tuple[int, int]]] = []

    def own() -> None:
        found.append(list(map_in_threads(lambda number: number + 1, range(200), CPU)))

    users = [threading.Thread(target=own) for _ in range(4)]
    for one in users:
        one.start()
    for one in users:
        one.join(60)
    assert found == [[(number, number + 1) for number in range(200)]] * 4
    assert torch.get_num_threads() == threads


def test_autocast_is_the_caller_s() -> None:
    """Whether there is one batch or there are many."""
    before, x = torch.get_num_threads(), torch.ones(2, 2)
    torch.set_num_threads(2)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            kinds = {own.dtype for _, own in map_in_threads(lambda _: x @ x, range(4), CPU)}
        assert kinds == {torch.bfloat16}
        assert {own.dtype for _, own in map_in_threads(lambda _: x @ x, range(4), CPU)} == {
            torch.float32
        }
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1])
def test_one_item_is_computed_here(threads: int, count: int) -> None:
    """With all of PyTorch's threads."""
    found = list(map_in_threads(lambda _: threading.current_thread(), range(count), CPU))
    assert found == [(number, threading.current_thread()) for number in range(count)]


def test_an_error_comes_in_its_turn(threads: int) -> None:
    """What stands before it is yielded, and what was not begun never is."""
    begun: list[int] = []

    def compute(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    results = map_in_threads(compute, range(1000), CPU)
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert len(begun) < 50
    assert torch.get_num_threads() == threads


def test_it_stays_a_few_ahead(threads: int) -> None:
    """Endless items are taken as their results are, and leaving early ends the threads."""
    given: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            given.append(len(given))
            yield given[-1]

    results = map_in_threads(lambda number: number, endless(), CPU)
    for _ in range(10):
        next(results)
    results.close()
    assert len(given) <= 10 + 2 * pool_size(CPU) + 1
    assert not any(own.name.startswith("abreast") for own in threading.enumerate())
    assert torch.get_num_threads() == threads
