"""Chooses the number of CPU threads for training on a machine that also runs other processes."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final

import torch

from bertsmith.plurals import count_noun
from bertsmith.runtime.device import CpuLoad

#: A machine is busy if other processes use at least this many CPU cores.
_BUSY_CORES: Final = 0.3
#: Fewer threads are chosen only if a step takes at most this fraction of its time with all threads.
_MAX_TIME_RATIO: Final = 0.9
#: A candidate is not timed again if its steps take longer than the fastest one by this factor.
_SLOW_RATIO: Final = 2.0
#: Maximum duration of all timings in seconds, and as a fraction of a time budget.
MAX_CHOICE_SECONDS: Final = 10.0
MAX_CHOICE_SHARE: Final = 0.05
#: Maximum number of timings of each thread count. Their median is used, which one slow timing does
#: not change.
_ROUNDS: Final = 3


@dataclass(frozen=True)
class ThreadChoice:
    """Number of threads for training, chosen by timing steps.

    Attributes:
        num_threads: The chosen number of threads.
        step_seconds: Median time of a step with each candidate number of threads.
    """

    num_threads: int
    step_seconds: dict[int, float]

    def describe(self) -> str:
        """Return a log message."""
        times = ", ".join(
            f"{count_noun(number, 'thread')} {1000 * seconds:,.0f} ms per step"
            for number, seconds in self.step_seconds.items()
        )
        return (
            f"step times on this machine: {times}; training with {self.num_threads} "
            "(set run.threads to change it)"
        )


@contextmanager
def restore_torch_settings(threads: int | None) -> Iterator[None]:
    """Restore PyTorch's settings for the whole process on exit, see ``configure_determinism``.

    The number of threads is restored only if the setting ``threads`` is None.
    """
    num_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if threads is None:
            torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=is_warning)
        torch.utils.deterministic.fill_uninitialized_memory = fills_memory  # type: ignore[attr-defined]


def is_machine_busy(load: CpuLoad) -> bool:
    """Return whether other processes use the CPU now, or used it during the last minute."""
    return max(load.current, load.last_minute) >= _BUSY_CORES


def list_candidate_thread_counts(available: int, load: CpuLoad) -> list[int]:
    """Return the numbers of threads to time, the largest first.

    These are all available threads, as many as there are free cores, and half of all.
    """
    free = available - max(1, math.ceil(load.current))
    fewer = {number for number in (free, available // 2) if 1 <= number < available}
    return [available, *sorted(fewer, reverse=True)]


def choose_thread_count(
    time_step: Callable[[int], float],
    candidates: Sequence[int],
    max_seconds: float = MAX_CHOICE_SECONDS,
    clock: Callable[[], float] = perf_counter,
) -> ThreadChoice:
    """Time steps with each candidate number of threads, and choose the fastest.

    A candidate that is clearly slower than another one is not timed again.

    Args:
        time_step: Returns the seconds of a step with a given number of threads.
        candidates: Numbers of threads. The first one is chosen unless another is clearly faster.
        max_seconds: No timing starts later, except the first one of each candidate.
        clock: Returns the time in seconds.
    """
    end_time = clock() + max_seconds
    times: dict[int, list[float]] = {number: [] for number in candidates}
    remaining = list(candidates)
    for timing_round in range(_ROUNDS):
        for number in remaining:
            if timing_round == 0 or clock() < end_time:
                times[number].append(time_step(number))
        shortest = min(min(seconds) for seconds in times.values())
        remaining = [number for number in remaining if min(times[number]) <= _SLOW_RATIO * shortest]
        if len(remaining) == 1:
            break
    step_seconds = {number: median(seconds) for number, seconds in times.items()}
    fastest = min(candidates, key=lambda number: step_seconds[number])
    default = candidates[0]
    is_faster = step_seconds[fastest] <= _MAX_TIME_RATIO * step_seconds[default]
    return ThreadChoice(fastest if is_faster else default, step_seconds)


def count_free_cores(load: CpuLoad, available: int) -> int:
    """Return how many of ``available`` cores other processes leave free, at least 1.

    Only a load that exists now and existed during the last minute is subtracted.
    """
    return max(1, available - round(min(load.current, load.last_minute)))
