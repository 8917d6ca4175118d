"""Several batches at once: their order, their errors, and the threads they leave behind."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bertsmith.model.abreast import abreast, at_once

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 5])
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

    assert list(abreast(slow, range(20), CPU)) == [(number, number * 2) for number in range(20)]
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    asking.start()
    asking.join()
    assert [torch.get_num_threads(), *found] == [threads, threads]


def test_each_has_its_share(threads: int) -> None:
    """As many at once as there are threads, four at most; on CUDA one."""
    workers = at_once(CPU)
    assert workers == min(threads, 4)
    assert at_once(torch.device("cuda")) == 1
    gate = threading.Barrier(workers)

    def meet(_: int) -> int:
        gate.wait(20)
        return torch.get_num_threads()

    shares = {share for _, share in abreast(meet, range(2 * workers), CPU)}
    assert shares == {threads // workers}


@pytest.mark.parametrize("count", [0, 1])
def test_one_item_is_computed_here(threads: int, count: int) -> None:
    """With all of PyTorch's threads."""
    found = list(abreast(lambda _: threading.current_thread(), range(count), CPU))
    assert found == [(number, threading.current_thread()) for number in range(count)]


def test_an_error_comes_in_its_turn(threads: int) -> None:
    """What stands before it is yielded, and what was not begun never is."""
    begun: list[int] = []

    def compute(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    results = abreast(compute, range(1000), CPU)
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

    results = abreast(lambda number: number, endless(), CPU)
    for _ in range(10):
        next(results)
    results.close()
    assert len(given) <= 10 + 2 * at_once(CPU) + 1
    assert not any(own.name.startswith("abreast") for own in threading.enumerate())
    assert torch.get_num_threads() == threads
