"""A short probe before a run: what a step costs here, and so how many fit into a budget.

It never knows what the steps learn; whoever probes starts the weights anew afterwards.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

#: A probe runs this many steps to warm up, then for this long or this many steps.
_WARM, _SECONDS, _STEPS = 2, 8.0, 30
#: Evaluations and checkpoints of a run whose intervals nobody set.
PAUSES = 20


@dataclass(frozen=True)
class Cost:
    """What a run costs here. Times in seconds, memory in bytes.

    step: the mean over the phases. pause: one evaluation and one checkpoint. memory: the peak.
    ceiling: multiply-adds a second of the machine's matrix product; share: of it, in a step.
    """

    step: float
    pause: float
    memory: int
    ceiling: float
    share: float
    tokens_per_step: float

    def seconds(self, steps: int, every: int | None) -> float:
        """Return the expected time of a run with a pause every so many steps (None: PAUSES)."""
        pauses = steps / every if every else PAUSES
        return steps * self.step + pauses * self.pause

    def steps_in(self, seconds: float, every: int | None) -> int:
        """Return the steps that fit into ``seconds``; not always above 0."""
        if every:
            return int(seconds / (self.step + self.pause / every))
        return int((seconds - PAUSES * self.pause) / self.step)


def time_steps(
    batches: Iterator[list[Any]], take: Callable[[int, list[Any]], None], seconds: float = _SECONDS
) -> tuple[float, list[list[Any]]]:
    """Take steps on ``batches``; return the median seconds of one, and the batches it used."""
    times: list[float] = []
    used: list[list[Any]] = []
    end = float("inf")
    for number, whole in enumerate(batches):
        began = time.perf_counter()
        take(number, whole)
        now = time.perf_counter()
        if number == _WARM - 1:
            end = now + seconds
        if number >= _WARM:
            times.append(now - began)
            used.append(whole)
        if now >= end or len(times) >= _STEPS:
            break
    return sorted(times)[len(times) // 2], used
