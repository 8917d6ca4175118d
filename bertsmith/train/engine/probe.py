"""Measures the cost of a training step with a short probe before a run.

The probe changes the weights; the caller initializes them again afterwards.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Steps before the measurement, and its maximum duration in seconds and in steps.
_WARMUP_STEPS, PROBE_SECONDS, _MAX_STEPS = 2, 8.0, 30
#: Maximum fraction of a time budget that a probe may take.
MAX_BUDGET_SHARE = 0.1
#: Times are noisy if a quarter of the steps take this many times as long as the fastest one.
_NOISE_RATIO = 1.5
#: Number of evaluations in a run if the user sets no interval.
DEFAULT_NUM_EVALUATIONS = 20


@dataclass(frozen=True)
class Cost:
    """Measured cost of a run on this machine.

    Attributes:
        step_seconds: Mean time of a step over all phases.
        evaluation_seconds: Time of one evaluation of ``num_eval_sequences`` sequences.
        peak_memory_bytes: Peak memory of the process or device.
        peak_macs_per_second: Peak matrix-multiply throughput, in multiply-accumulates per second.
        mfu: Model FLOPs utilization: the fraction of ``peak_macs_per_second`` that a step reaches.
        tokens_per_step: Mean number of tokens of a step.
        num_eval_sequences: Sequences of one evaluation.
        is_noisy: Whether the step times vary so much that another load disturbs them.
    """

    step_seconds: float
    evaluation_seconds: float
    peak_memory_bytes: int
    peak_macs_per_second: float
    mfu: float
    tokens_per_step: float
    num_eval_sequences: int = 1
    is_noisy: bool = False

    def estimate_seconds(self, steps: int, eval_every: int, num_eval_sequences: int) -> float:
        """Return the expected time of a run that evaluates every ``eval_every`` steps."""
        fraction = min(num_eval_sequences / self.num_eval_sequences, 1.0)
        num_evaluations = math.ceil(steps / eval_every)
        return steps * self.step_seconds + num_evaluations * self.evaluation_seconds * fraction


def measure_median_step_seconds(
    batches: Iterator[list[Any]],
    take_step: Callable[[int, list[Any]], None],
    seconds: float = PROBE_SECONDS,
) -> tuple[float, list[list[Any]]]:
    """Measure steps as ``measure_steps``; return the median time and the measured batches."""
    times, measured_batches = measure_steps(batches, take_step, seconds)
    return sorted(times)[len(times) // 2], measured_batches


def is_noisy(times: Sequence[float]) -> bool:
    """Return whether a quarter of the steps took much longer than the fastest one."""
    return len(times) >= 4 and sorted(times)[len(times) * 3 // 4] > _NOISE_RATIO * min(times)


def measure_steps(
    batches: Iterator[list[Any]],
    take_step: Callable[[int, list[Any]], None],
    seconds: float = PROBE_SECONDS,
) -> tuple[list[float], list[list[Any]]]:
    """Take steps on ``batches``; return the seconds of each step and the measured batches.

    Args:
        batches: The micro-batches of each step.
        take_step: Takes a step, given its number and micro-batches.
        seconds: Maximum duration, without the warm-up steps.
    """
    times: list[float] = []
    measured_batches: list[list[Any]] = []
    end_time = float("inf")
    for step, micro_batches in enumerate(batches):
        start_time = time.perf_counter()
        take_step(step, micro_batches)
        now = time.perf_counter()
        if step == _WARMUP_STEPS - 1:
            end_time = now + seconds
        if step >= _WARMUP_STEPS:
            times.append(now - start_time)
            measured_batches.append(micro_batches)
        if now >= end_time or len(times) >= _MAX_STEPS:
            break
    return times, measured_batches
