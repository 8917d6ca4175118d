"""Several batches at once on the CPU, each on a share of the threads.

Threads that part one product wait for the slowest of them after every product, and while Python
goes from one to the next; threads with batches of their own do not. It never knows what is
computed.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

#: More at once want more memory, and Python runs only one of them at a time.
_MOST = 4


def at_once(device: torch.device) -> int:
    """Return how many batches the calling thread should have computed at once on a device."""
    return min(torch.get_num_threads(), _MOST) if device.type == "cpu" else 1


def abreast(
    compute: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Generator[tuple[Item, Result]]:
    """Yield each item and what ``compute`` makes of it, in their order.

    On the CPU some are computed at once, in threads that have their share of PyTorch's threads,
    and a few ahead of what was taken. ``compute`` sets PyTorch's modes itself: they hold for a
    thread. What it raises comes up in its item's turn.
    """
    rest, threads, workers = iter(items), torch.get_num_threads(), at_once(device)
    # One item is worth no threads, and has all of PyTorch's.
    first = list(islice(rest, 2 if workers > 1 else 0))
    if len(first) < 2:
        for item in chain(first, rest):
            yield item, compute(item)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(
        workers, "abreast", initializer=torch.set_num_threads, initargs=(threads // workers,)
    )
    try:
        for item in chain(first, rest):
            waiting.append((item, pool.submit(compute, item)))
            if len(waiting) > 2 * workers:
                done, result = waiting.popleft()
                yield done, result.result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
        # The newest number is also what threads of others begin with.
        torch.set_num_threads(threads)
