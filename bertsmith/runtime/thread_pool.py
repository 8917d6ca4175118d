"""Parallel computation of batches on the CPU, in workers that divide PyTorch's threads.

PyTorch splits each operation over its threads. The threads wait for the slowest one after every
operation, and are idle while Python code runs. With a worker for each batch, other workers compute
in the meantime.
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

#: Maximum number of workers. More workers need more memory, and only one of them at a time can run
#: Python code.
_MAX_WORKERS = 4
_NUM_THREADS_LOCK = threading.Lock()


def choose_num_workers(device: torch.device) -> int:
    """Return the number of workers that compute batches in parallel on a device.

    All workers get the same number of threads, so that a result does not depend on the worker that
    computed it. The chosen number leaves the fewest threads unused; of several such numbers, it is
    the largest.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:
        return 1

    def count_used_threads(num_workers: int) -> int:
        return num_workers * (num_threads // num_workers)

    # ``max`` returns the first of equally good candidates, so the largest candidate is first.
    candidates = range(min(num_threads, _MAX_WORKERS), 1, -1)
    return max(candidates, key=count_used_threads)


def set_local_num_threads(num_threads: int) -> None:
    """Set PyTorch's number of threads for the calling thread only.

    ``torch.set_num_threads`` also changes the default of threads that start later; this function
    restores that default.
    """
    # The first call of get_num_threads in a thread also fixes the number for this thread. It must
    # therefore be called before the default changes.
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

    On the CPU up to four items are computed at once, each with an equal number of PyTorch's
    threads. Workers use the caller's autocast mode, but no other thread-local modes such as
    ``inference_mode``. An exception raised by ``function`` is raised when the item's result would
    be yielded.

    Args:
        function: Computes the result of an item.
        items: The items, possibly endless: only a few are read ahead of the results.
        device: Device on which ``function`` computes. Items are computed one by one unless it is
            the CPU.
    """
    max_workers = choose_num_workers(device)
    remaining = iter(items)
    first_items = list(islice(remaining, max_workers))
    # With a single worker, the calling thread computes the items, with all of PyTorch's threads.
    if len(first_items) < 2:
        for item in chain(first_items, remaining):
            yield item, function(item)
        return
    pool = _ThreadPool(function, len(first_items))
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in chain(first_items, remaining):
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
    """Worker threads that divide the calling thread's number of PyTorch threads.

    Unlike ThreadPoolExecutor, a pool can be created in a thread that outlives the main thread.
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
        """Drop the queued items, and wait until the items in progress have been computed."""
        self._is_stopping = True
        for _ in self._workers:
            self._tasks.put(None)
        interrupt: BaseException | None = None
        for worker in self._workers:
            while worker.is_alive():
                try:
                    worker.join()
                except BaseException as error:  # noqa: BLE001 - raised again below
                    # A signal such as Ctrl-C must not end the wait: exiting while a worker is
                    # inside a matrix product would crash the process.
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run_tasks(self, num_threads: int) -> None:
        """Compute queued items until the pool is shut down."""
        set_local_num_threads(num_threads)
        is_autocast, dtype = self._autocast
        with torch.autocast("cpu", dtype, enabled=is_autocast):
            while True:
                task = self._tasks.get()
                if task is None or self._is_stopping:
                    return
                item, future = task
                try:
                    future.set_result(self._function(item))
                except BaseException as error:  # noqa: BLE001 - raised again by future.result()
                    future.set_exception(error)


def _run_in_new_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread and return its result."""
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(function()), name="bertsmith-num-threads"
    )
    thread.start()
    thread.join()
    return results[0]
