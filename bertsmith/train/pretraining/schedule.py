"""Schedule of a pre-training run: its phases, sequence lengths and batch sizes."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from bertsmith.train.engine.schedule import ScheduleSettings


class PretrainScheduleSettings(ScheduleSettings):
    """Schedule of a pre-training run; fine-tuning rejects the settings that this class adds."""

    #: Fraction of the run in which the batch grows from `data.initial_batch_size`, if it is set.
    batch_ramp_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    #: Maximum sequence length in a second phase of longer sequences; None: a single phase.
    phase2_max_seqlen: Annotated[int, Field(ge=8)] | None = None
    #: Fraction of the run in the second phase.
    phase2_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    #: Fraction of the run, from its start, in which the encoder is a left-to-right language model:
    #: attention is causal, each token predicts the next one, and there is no next-sentence
    #: prediction. The rest of the run is masked LM (Gisserot-Boukhlef et al. 2025,
    #: arXiv:2507.00994; see also GPT-BERT, Charpentier and Samuel 2024, arXiv:2410.24159).
    causal_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    #: Number of steps, at most half of the run, in which attention has a bias towards neighboring
    #: tokens. The bias falls linearly to 0. Not for left-to-right training.
    neighbor_bias_steps: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class Phase:
    """The steps [start_step, end_step), which have the same sequence length and attention.

    Attributes:
        start_step: First step.
        end_step: Step after the last one.
        max_seqlen: Maximum sequence length.
        is_causal: Whether the encoder is trained left to right.
    """

    start_step: int
    end_step: int
    max_seqlen: int
    is_causal: bool = False


def build_phases(settings: PretrainScheduleSettings, max_seqlen: int) -> list[Phase]:
    """Split a run into phases, in order.

    The run starts with sequences of ``max_seqlen`` tokens and ends with the longer
    ``phase2_max_seqlen``; in the paper, these are 90 % and 10 % of the steps (appendix A.2). The
    first ``causal_fraction`` of the steps is left to right.
    """
    total_steps = settings.total_steps()
    phase2_start = total_steps
    if settings.phase2_max_seqlen is not None:
        phase2_start -= round(total_steps * settings.phase2_fraction)
    causal_end = round(total_steps * settings.causal_fraction)
    edges = sorted({0, causal_end, phase2_start, total_steps})
    return [
        Phase(
            start_step,
            end_step,
            (settings.phase2_max_seqlen if start_step >= phase2_start else None) or max_seqlen,
            is_causal=start_step < causal_end,
        )
        for start_step, end_step in pairwise(edges)
    ]


def count_epochs(steps: int, batch_size: int, phase_shares: list[tuple[float, int]]) -> float:
    """Return the number of epochs in ``steps``.

    Args:
        steps: Number of steps.
        batch_size: Examples per step.
        phase_shares: See ``convert_epochs_to_steps``.
    """
    epochs_per_step = sum(
        batch_size * fraction / num_examples for fraction, num_examples in phase_shares
    )
    return steps * epochs_per_step


def convert_epochs_to_steps(
    epochs: float, batch_size: int, phase_shares: list[tuple[float, int]]
) -> int:
    """Return the number of steps in ``epochs`` epochs, rounded up.

    Args:
        epochs: Passes over the training data.
        batch_size: Examples per step.
        phase_shares: For each phase, its fraction of the run, and the number of examples in an
            epoch at its sequence length.
    """
    # The small constant keeps rounding errors from adding a step.
    return max(1, math.ceil(epochs / count_epochs(1, batch_size, phase_shares) - 1e-9))
