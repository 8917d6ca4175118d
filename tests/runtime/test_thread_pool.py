"""The thread pool keeps the order, passes on errors, and restores PyTorch's thread counts."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bertsmith.runtime.thread_pool import choose_num_workers, map_in_threads, set_local_num_threads

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 5, 6])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set PyTorch's number of threads."""
    original = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(original)


def test_results_are_in_order(num_threads: int) -> None:
    """Results keep the order of the items, and PyTorch's thread counts are unchanged afterwards."""

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


def test_workers_have_equal_shares_of_the_threads(num_threads: int) -> None:
    """At most four workers leave the fewest threads idle; on CUDA there is one."""
    num_workers = choose_num_workers(CPU)
    assert num_workers == {1: 1, 2: 2, 5: 4, 6: 3}[num_threads]
    assert choose_num_workers(torch.device("cuda")) == 1
    barrier = threading.Barrier(num_workers)

    def get_share(_: int) -> int:
        barrier.wait(20)
        return torch.get_num_threads()

    shares = [share for _, share in map_in_threads(get_share, range(num_workers), CPU)]
    assert shares == [num_threads // num_workers] * num_workers


def test_few_items_share_all_threads() -> None:
    """Two items with five threads get two threads each."""
    original, barrier = torch.get_num_threads(), threading.Barrier(2)

    def get_share(_: int) -> int:
        barrier.wait(20)
        return torch.get_num_threads()

    torch.set_num_threads(5)
    try:
        assert [share for _, share in map_in_threads(get_share, range(2), CPU)] == [2, 2]
    finally:
        torch.set_num_threads(original)


def test_local_thread_count_does_not_affect_other_threads(num_threads: int) -> None:
    """``set_local_num_threads`` changes neither existing threads nor the default of new ones."""
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
    """Several threads may each run a pool; all get correct results."""
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
    """Workers use the caller's autocast mode."""
    original, x = torch.get_num_threads(), torch.ones(2, 2)
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
    """Results before the error are yielded, and items that have not started are dropped."""
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


def test_items_are_read_only_a_few_ahead(num_threads: int) -> None:
    """Items may be endless; closing the generator ends the workers."""
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
