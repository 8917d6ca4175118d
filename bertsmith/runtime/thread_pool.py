"""Compute several batches at once on the CPU, each in a thread with a share of PyTorch's threads.

Threads that split one matrix product wait for the slowest of them after every operation, and idle
while Python runs. Threads with batches of their own do neither.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

#: More workers need more memory, and only one of them at a time can run Python code.
_MAX_WORKERS = 4
_NUM_THREADS_LOCK = threading.Lock()


def choose_num_workers(device: torch.device) -> int:
    """Return the number of batches to compute at once on a device.

    It is the number of equal shares that leaves the fewest threads idle. Shares are equal so that
    results do not depend on which worker computed them.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:
        return 1
    sizes = range(2, min(num_threads, _MAX_WORKERS) + 1)
    return max(sizes, key=lambda size: (size * (num_threads // size), size))


def set_local_num_threads(num_threads: int) -> None:
    """Set PyTorch's number of threads for the calling thread only.

    ``torch.set_num_threads`` also changes the default of threads that start later; this function
    restores that default.
    """
    # A thread's first read also fixes its own count, so it must come before the default changes.
    if torch.get_num_threads() == num_threads:
        return
    with _NUM_THREADS_LOCK:
        default = _run_in_new_thread(torch.get_num_threads)
        torch.set_num_threads(num_threads)
        _run_in_new_thread(lambda: torch.set_num_threads(default))


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Generator[tuple[Item, Result]]:
    """Apply a function to items in parallel and yield each item and its result, in order.

    On the CPU up to four items are computed at once, each with a share of PyTorch's threads. Items
    are read only a few ahead of the results. Workers inherit the caller's autocast mode, but no
    other thread-local modes such as ``inference_mode``. An exception of ``function`` is raised when
    the item's result is due.

    Args:
        function: Computes the result of an item.
        items: May be endless.
        device: Where ``function`` computes; on other devices than the CPU, items run one by one.
    """
    remaining, max_workers = iter(items), choose_num_workers(device)
    first = list(islice(remaining, max_workers))
    # A single item runs in the calling thread, with all of PyTorch's threads.
    if len(first) < 2:
        for item in chain(first, remaining):
            yield item, function(item)
        return
    pool = _ThreadPool(function, len(first))
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in chain(first, remaining):
            pending.append((item, pool.submit(item)))
            if len(pending) > 2 * max_workers:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    finally:
        pool.shut_down()


class _ThreadPool:
    """Worker threads that share the calling thread's number of PyTorch threads.

    Unlike ThreadPoolExecutor it can be created in a thread that outlives the main thread.
    """

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        self._function = function
        self._tasks: SimpleQueue[tuple[Any, Future[Any]] | None] = SimpleQueue()
        self._is_stopping = False
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        threads_per_worker = torch.get_num_threads() // num_workers
        self._workers = [
            threading.Thread(
                target=self._run_tasks,
                args=(threads_per_worker,),
                name="bertsmith-worker",
                daemon=True,
            )
            for _ in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, item: Any) -> Future[Any]:
        """Queue an item and return the future of its result."""
        future: Future[Any] = Future()
        self._tasks.put((item, future))
        return future

    def shut_down(self) -> None:
        """Drop the queued items and wait for those in progress."""
        self._is_stopping = True
        for _ in self._workers:
            self._tasks.put(None)
        interrupt: KeyboardInterrupt | None = None
        for worker in self._workers:
            while worker.is_alive():
                try:
                    worker.join()
                except KeyboardInterrupt as error:
                    # Exiting while a worker is inside a matrix product would crash the process.
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run_tasks(self, num_threads: int) -> None:
        set_local_num_threads(num_threads)
        enabled, dtype = self._autocast
        with torch.autocast("cpu", dtype, enabled=enabled):
            while (task := self._tasks.get()) is not None and not self._is_stopping:
                item, future = task
                try:
                    future.set_result(self._function(item))
                except BaseException as error:  # noqa: BLE001 - raised again by future.result()
                    future.set_exception(error)


def _run_in_new_thread(function: Callable[[], Any]) -> Any:
    """Return the function's result, computed in a new thread."""
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(function()), name="bertsmith-num-threads"
    )
    thread.start()
    thread.join()
    return results[0]
