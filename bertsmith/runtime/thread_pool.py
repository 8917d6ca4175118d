"""Several batches at once on the CPU, each on its share of PyTorch's threads.

Threads that part one product wait for the slowest of them after every product, and while Python
goes from one to the next; threads with batches of their own do not. It never knows what is
computed.
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

#: More at once want more memory, and Python runs only one of them at a time.
_MOST = 4
_TAKING = threading.Lock()


def pool_size(device: torch.device) -> int:
    """Return how many batches the calling thread should have computed at once on a device.

    The share of each is the same, so that what is computed does not depend on who computes it:
    as many as leave the fewest threads idle.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return 1
    sizes = range(2, min(threads, _MOST) + 1)
    return max(sizes, key=lambda size: (size * (threads // size), size))


def set_local_num_threads(threads: int) -> None:
    """Have the calling thread compute with so many threads of PyTorch's, and nobody else.

    ``torch.set_num_threads`` alone would say with how many all new threads begin, too.
    """
    # A thread begins with the number that holds when it first asks, which so is before it is set.
    if torch.get_num_threads() == threads:
        return
    with _TAKING:
        usual = _elsewhere(torch.get_num_threads)
        torch.set_num_threads(threads)
        _elsewhere(lambda: torch.set_num_threads(usual))


def map_in_threads(
    compute: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Generator[tuple[Item, Result]]:
    """Yield each item and what ``compute`` makes of it, in their order.

    On the CPU up to four are computed at once, in threads with their share of PyTorch's threads
    and the caller's autocast, a few ahead of what was taken. ``compute`` sets PyTorch's other
    modes itself: they hold for a thread. What it raises comes up in its item's turn.
    """
    rest, most = iter(items), pool_size(device)
    first = list(islice(rest, most))
    # One item is worth no thread, and has all of PyTorch's.
    if len(first) < 2:
        for item in chain(first, rest):
            yield item, compute(item)
        return
    crew = _Crew(compute, len(first))
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in chain(first, rest):
            waiting.append((item, crew.asked(item)))
            if len(waiting) > 2 * most:
                done, result = waiting.popleft()
                yield done, result.result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:
        crew.end()


class _Crew:
    """Threads that compute what is asked, each on its share of the caller's threads.

    Unlike a ThreadPoolExecutor's they may be begun by a thread that outlives the main one.
    """

    def __init__(self, compute: Callable[[Any], Any], size: int) -> None:
        self._compute = compute
        self._tasks: SimpleQueue[tuple[Any, Future[Any]] | None] = SimpleQueue()
        self._over = False
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        share = torch.get_num_threads() // size
        self._threads = [
            threading.Thread(target=self._work, args=(share,), name="abreast", daemon=True)
            for _ in range(size)
        ]
        for own in self._threads:
            own.start()

    def asked(self, item: Any) -> Future[Any]:
        """Return a future of what is made of an item."""
        future: Future[Any] = Future()
        self._tasks.put((item, future))
        return future

    def end(self) -> None:
        """Leave what was not begun, and wait for the rest."""
        self._over = True
        for _ in self._threads:
            self._tasks.put(None)
        stop: KeyboardInterrupt | None = None
        for own in self._threads:
            while own.is_alive():
                try:
                    own.join()
                except KeyboardInterrupt as again:
                    # Whoever left a thread in the midst of a product would crash.
                    stop = again
        if stop is not None:
            raise stop

    def _work(self, threads: int) -> None:
        set_local_num_threads(threads)
        enabled, dtype = self._autocast
        with torch.autocast("cpu", dtype, enabled=enabled):
            while (task := self._tasks.get()) is not None and not self._over:
                item, future = task
                try:
                    future.set_result(self._compute(item))
                except BaseException as error:  # noqa: BLE001 - told to whoever takes the result
                    future.set_exception(error)


def _elsewhere(ask: Callable[[], Any]) -> Any:
    """Return what a new thread says."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask()), name="elsewhere")
    thread.start()
    thread.join()
    return found[0]
