"""Measures the cost of a training step with a short probe before a run.

The probe changes the weights; the caller initializes them again afterwards.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Maximum number of steps before the measurement.
_WARMUP_STEPS = 2
#: Maximum duration of the measurement in seconds and in steps.
PROBE_SECONDS, _MAX_STEPS = 8.0, 30
#: Maximum duration of the measurement before a run with a time budget, in seconds and as a
#: fraction of the budget.
MAX_BUDGET_SECONDS, MAX_BUDGET_SHARE = 2.0, 0.02
#: Maximum number of tokens of the micro-batches with which slow steps are measured.
SLOW_STEP_TOKENS = 1024
#: Step times are noisy if a quarter of them exceed the shortest one by this factor.
_NOISE_RATIO = 1.5


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
        num_eval_sequences: Number of sequences of one evaluation.
        is_noisy: Whether the step times vary so much that other processes must have slowed steps.
        is_extrapolated: Whether steps are so slow that only a part of a step was measured.
    """

    step_seconds: float
    evaluation_seconds: float
    peak_memory_bytes: int
    peak_macs_per_second: float
    mfu: float
    tokens_per_step: float
    num_eval_sequences: int = 1
    is_noisy: bool = False
    is_extrapolated: bool = False

    def estimate_seconds(self, steps: int, eval_every: int, num_eval_sequences: int) -> float:
        """Return the expected duration of a run in seconds.

        Args:
            steps: Number of steps.
            eval_every: Steps between two evaluations.
            num_eval_sequences: Maximum number of sequences per evaluation.
        """
        evaluation_seconds = self.estimate_evaluation_seconds(num_eval_sequences)
        return steps * self.step_seconds + math.ceil(steps / eval_every) * evaluation_seconds

    def estimate_evaluation_seconds(self, num_eval_sequences: int) -> float:
        """Return the expected duration of an evaluation of at most ``num_eval_sequences``."""
        return self.evaluation_seconds * min(num_eval_sequences / self.num_eval_sequences, 1.0)


def measure_slow_step(
    warmup_micro_batch: Any,
    micro_batches: list[Any],
    take_step: Callable[[int, list[Any]], None],
    seconds: float,
) -> float | None:
    """Estimate the duration of a slow step from the first micro-batches.

    The estimate is slightly too high, because it scales the optimizer update, too.

    Args:
        warmup_micro_batch: A short micro-batch for a step that is not measured. The first step of a
            process can take twice as long, because it allocates the optimizer state.
        micro_batches: The micro-batches of the step.
        take_step: Takes a step, given its number and micro-batches.
        seconds: Maximum duration of the measurement, which has at least one micro-batch.

    Returns:
        The estimate in seconds; None if the whole step takes at most ``seconds``.
    """
    _time_step([warmup_micro_batch], take_step)
    micro_batch_seconds = _time_step(micro_batches[:1], take_step)
    num_micro_batches = len(micro_batches)
    if micro_batch_seconds * num_micro_batches <= seconds:
        return None
    num_measured = min(num_micro_batches, int(seconds / micro_batch_seconds))
    if num_measured < 2:
        return micro_batch_seconds * num_micro_batches
    step_seconds = _time_step(micro_batches[:num_measured], take_step)
    return step_seconds * num_micro_batches / num_measured


def _time_step(micro_batches: list[Any], take_step: Callable[[int, list[Any]], None]) -> float:
    """Take step 0 on these micro-batches, and return its duration in seconds."""
    start_time = time.perf_counter()
    take_step(0, micro_batches)
    return time.perf_counter() - start_time


def is_noisy(times: Sequence[float]) -> bool:
    """Return whether a quarter of the step times is much longer than the shortest one."""
    return len(times) >= 4 and sorted(times)[len(times) * 3 // 4] > _NOISE_RATIO * min(times)


def measure_steps(
    batches: Iterator[list[Any]],
    take_step: Callable[[int, list[Any]], None],
    seconds: float = PROBE_SECONDS,
) -> tuple[list[float], list[list[Any]]]:
    """Take steps on ``batches``, and return the duration and the batch of each measured step.

    Args:
        batches: The micro-batches of each step.
        take_step: Takes a step, given its number and micro-batches.
        seconds: Maximum duration of the measurement, without the warm-up steps before it. If the
            first step takes longer, it is the only warm-up step.
    """
    times: list[float] = []
    measured_batches: list[list[Any]] = []
    end_time: float | None = None
    for step, micro_batches in enumerate(batches):
        start_time = time.perf_counter()
        take_step(step, micro_batches)
        now = time.perf_counter()
        if end_time is not None:
            times.append(now - start_time)
            measured_batches.append(micro_batches)
        elif step == _WARMUP_STEPS - 1 or now - start_time > seconds:
            end_time = now + seconds
        if (end_time is not None and times and now >= end_time) or len(times) >= _MAX_STEPS:
            break
    return times, measured_batches
