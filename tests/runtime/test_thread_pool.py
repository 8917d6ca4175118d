"""``map_in_threads``: order of results, errors, and numbers of threads."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bertsmith.runtime.thread_pool import choose_num_workers, map_in_threads, set_local_num_threads

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 5, 6])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set PyTorch's number of threads for a test; return it."""
    original = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(original)


def test_results_are_in_order(num_threads: int) -> None:
    """Results are in the order of the items, and PyTorch's number of threads is restored."""

    def double_slowly(number: int) -> int:
        time.sleep(0.02 * (number % 3 == 0))
        return number * 2

    results = list(map_in_threads(double_slowly, range(20), CPU))
    assert results == [(number, number * 2) for number in range(20)]
    new_thread_counts: list[int] = []
    thread = threading.Thread(target=lambda: new_thread_counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *new_thread_counts] == [num_threads, num_threads]


def test_workers_have_equal_numbers_of_threads(num_threads: int) -> None:
    """Threads are divided equally between at most four workers; on CUDA there is one worker."""
    num_workers = choose_num_workers(CPU)
    expected_num_workers = {1: 1, 2: 2, 5: 4, 6: 3}
    assert num_workers == expected_num_workers[num_threads]
    assert choose_num_workers(torch.device("cuda")) == 1
    # All items must be in progress at the same time, each in its own worker.
    barrier = threading.Barrier(num_workers)

    def get_num_threads(_: int) -> int:
        barrier.wait(20)
        return torch.get_num_threads()

    thread_counts = [count for _, count in map_in_threads(get_num_threads, range(num_workers), CPU)]
    assert thread_counts == [num_threads // num_workers] * num_workers


def test_two_items_use_two_workers() -> None:
    """Two items are computed with two threads each if PyTorch has five threads."""
    original = torch.get_num_threads()
    # Both items must be in progress at the same time.
    barrier = threading.Barrier(2)

    def get_num_threads(_: int) -> int:
        barrier.wait(20)
        return torch.get_num_threads()

    torch.set_num_threads(5)
    try:
        assert [count for _, count in map_in_threads(get_num_threads, range(2), CPU)] == [2, 2]
    finally:
        torch.set_num_threads(original)


def test_local_thread_count_does_not_affect_other_threads(num_threads: int) -> None:
    """``set_local_num_threads`` does not change the number of other threads, existing or new."""
    thread_counts: dict[str, int] = {}
    has_set, may_finish = threading.Event(), threading.Event()

    def record(name: str) -> None:
        thread_counts[name] = torch.get_num_threads()

    def set_and_wait() -> None:
        set_local_num_threads(7)
        has_set.set()
        assert may_finish.wait(20)
        record("changed")

    changed = threading.Thread(target=set_and_wait)
    changed.start()
    assert has_set.wait(20)
    set_local_num_threads(num_threads)
    for name in ("first new", "second new"):
        new = threading.Thread(target=record, args=(name,))
        new.start()
        new.join()
    may_finish.set()
    changed.join()
    assert thread_counts == {"changed": 7, "first new": num_threads, "second new": num_threads}
    assert torch.get_num_threads() == num_threads


def test_pools_can_run_concurrently(num_threads: int) -> None:
    """``map_in_threads`` gives correct results in four threads at the same time."""
    results: list[list[tuple[int, int]]] = []

    def run_pool() -> None:
        results.append(list(map_in_threads(lambda number: number + 1, range(200), CPU)))

    threads = [threading.Thread(target=run_pool) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[(number, number + 1) for number in range(200)]] * 4
    assert torch.get_num_threads() == num_threads


def test_workers_inherit_autocast() -> None:
    """Workers compute in the caller's autocast dtype, or in float32 without autocast."""
    original = torch.get_num_threads()
    x = torch.ones(2, 2)
    torch.set_num_threads(2)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            dtypes = {y.dtype for _, y in map_in_threads(lambda _: x @ x, range(4), CPU)}
        assert dtypes == {torch.bfloat16}
        dtypes = {y.dtype for _, y in map_in_threads(lambda _: x @ x, range(4), CPU)}
        assert dtypes == {torch.float32}
    finally:
        torch.set_num_threads(original)


@pytest.mark.parametrize("count", [0, 1])
def test_single_item_runs_in_the_calling_thread(num_threads: int, count: int) -> None:
    """A single item is computed in the calling thread, with all of PyTorch's threads."""
    results = list(map_in_threads(lambda _: threading.current_thread(), range(count), CPU))
    assert results == [(number, threading.current_thread()) for number in range(count)]


def test_error_is_raised_in_order(num_threads: int) -> None:
    """Results before the failing item are yielded, and items in the queue are not computed."""
    started: list[int] = []

    def fail_at_three(number: int) -> int:
        started.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    results = map_in_threads(fail_at_three, range(1000), CPU)
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert len(started) < 50
    assert torch.get_num_threads() == num_threads


def test_endless_items_are_read_a_few_at_a_time(num_threads: int) -> None:
    """Endless items are read a few ahead of the results; closing the generator ends all workers."""
    read_items: list[int] = []

    def count_forever() -> Iterator[int]:
        while True:
            read_items.append(len(read_items))
            yield read_items[-1]

    results = map_in_threads(lambda number: number, count_forever(), CPU)
    for _ in range(10):
        next(results)
    results.close()
    assert len(read_items) <= 10 + 2 * choose_num_workers(CPU) + 1
    assert not any(thread.name.startswith("bertsmith-worker") for thread in threading.enumerate())
    assert torch.get_num_threads() == num_threads
