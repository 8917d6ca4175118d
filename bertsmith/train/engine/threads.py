"""Chooses the number of CPU threads for training on a machine that also does other work."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch

from bertsmith.runtime.device import CpuLoad

#: Cores that other processes use, from which on the machine counts as busy.
_BUSY: Final = 0.3
#: Fewer threads are taken only if a step takes at most this share of its time with all threads.
_CLEARLY_FASTER: Final = 0.9
#: How often each number of threads is timed, in turns: one disturbed round decides nothing.
_ROUNDS: Final = 3


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads that was chosen, and the seconds of a step with each candidate."""

    num_threads: int
    step_seconds: dict[int, float]

    def describe(self) -> str:
        """Return one line for people."""
        times = ", ".join(
            f"{number} {'thread' if number == 1 else 'threads'} {1000 * seconds:,.0f} ms per step"
            for number, seconds in self.step_seconds.items()
        )
        return f"this machine is busy: {times}; training with {self.num_threads} (run.threads)"


@contextmanager
def restore_num_threads(threads: int | None) -> Iterator[None]:
    """Give the process its number of threads back, unless ``threads`` was set for the run."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if threads is None:
            torch.set_num_threads(before)


def is_machine_busy(load: CpuLoad) -> bool:
    """Tell whether other processes use a core, now or in the last minute."""
    return max(load.current, load.last_minute) >= _BUSY


def candidate_thread_counts(available: int, load: CpuLoad) -> list[int]:
    """Return the numbers of threads worth timing: all, those that the load leaves, and half."""
    left = available - max(1, math.ceil(load.current))
    fewer = {number for number in (left, available // 2) if 1 <= number < available}
    return [available, *sorted(fewer, reverse=True)]


def choose_thread_count(time_step: Callable[[int], float], numbers: Sequence[int]) -> ThreadChoice:
    """Time steps with each number of threads in turns, and choose one.

    time_step: returns the seconds of a step with so many threads. numbers: the first one is taken
    unless another is clearly faster.
    """
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(_ROUNDS):
        for number in numbers:
            times[number].append(time_step(number))
    seconds = {number: median(own) for number, own in times.items()}
    fastest = min(numbers, key=lambda number: seconds[number])
    first = numbers[0]
    is_faster = seconds[fastest] <= _CLEARLY_FASTER * seconds[first]
    return ThreadChoice(fastest if is_faster else first, seconds)


def count_free_cores(load: CpuLoad, available: int) -> int:
    """Return the number of threads that leaves busy cores to others, without timing any.

    A core counts as busy if it is now and was in the last minute.
    """
    return max(1, available - round(min(load.current, load.last_minute)))
