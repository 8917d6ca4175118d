"""A short probe before a run: what a step costs here.

Whoever probes initializes the weights again afterwards.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: A probe runs this many steps to warm up, then for this long or this many steps.
_WARM, PROBE_SECONDS, _STEPS = 2, 8.0, 30
#: The share of a time budget that a probe may take.
MAX_BUDGET_SHARE = 0.1
#: How much longer than the fastest step a quarter of the steps are on a disturbed machine.
_NOISE = 1.5
#: Evaluations and checkpoints of a run whose intervals nobody set.
DEFAULT_NUM_EVALUATIONS = 20


@dataclass(frozen=True)
class Cost:
    """What a run costs here. Times in seconds, memory in bytes.

    step_seconds: the mean over the phases. pause: one evaluation of ``sequences``. memory: the peak.
    peak_macs: multiply-adds a second of the machine's matrix product; share: of it, in a step.
    is_noisy: whether the times of single steps differ so much that something else disturbs them.
    """

    step_seconds: float
    evaluation_seconds: float
    peak_memory_bytes: int
    peak_macs: float
    mfu: float
    tokens_per_step: float
    eval_sequences: int = 1
    is_noisy: bool = False

    def estimate_seconds(self, steps: int, eval_every: int, sequences: int) -> float:
        """Return the expected time of a run that evaluates ``sequences`` every so many steps."""
        share = min(sequences / self.eval_sequences, 1.0)
        return (
            steps * self.step_seconds
            + math.ceil(steps / eval_every) * self.evaluation_seconds * share
        )


def median_step_seconds(
    batches: Iterator[list[Any]],
    take: Callable[[int, list[Any]], None],
    seconds: float = PROBE_SECONDS,
) -> tuple[float, list[list[Any]]]:
    """Take steps on ``batches``; return the median seconds of one, and the batches it used."""
    times, used = measure_steps(batches, take, seconds)
    return sorted(times)[len(times) // 2], used


def is_noisy(times: Sequence[float]) -> bool:
    """Tell whether a quarter of the steps took far longer than the fastest one."""
    return len(times) >= 4 and sorted(times)[len(times) * 3 // 4] > _NOISE * min(times)


def measure_steps(
    batches: Iterator[list[Any]],
    take: Callable[[int, list[Any]], None],
    seconds: float = PROBE_SECONDS,
) -> tuple[list[float], list[list[Any]]]:
    """Take steps on ``batches``; return the seconds of each, and the batches they used."""
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
    return times, used
