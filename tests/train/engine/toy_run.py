"""A run of nine steps that trains a linear layer, for tests of the training loop."""

from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.runtime.device import Machine
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.loop import LoopOptions

MACHINE = Machine(torch.device("cpu"), "fp32", "padded")
OPTIONS = LoopOptions(
    duration=StepDuration(9),
    seed=0,
    max_grad_norm=1.0,
    lr_at_step=lambda _: 0.1,
    log_every=1,
    eval_every=100,
    checkpoint_every=100,
    keep_checkpoints=2,
    selection_metric="loss",
    measure_peak_macs_per_second=lambda: 1.0,
)


class ToyObjective:
    """An objective that trains a linear layer, whose input is the step number."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    data_state = None

    def iter_batches(self, first_step: int, data_state: Any = None) -> Any:
        """Yield the number of each step as its only micro-batch."""
        yield from ([step] for step in range(first_step, 9))

    def compute_losses(
        self, micro_batch: int, micro_batches: Any, dropout_seed: Any
    ) -> dict[str, Tensor]:
        """Return the squared output for the step number."""
        return {"loss": self.model(torch.tensor([float(micro_batch)])).square().sum()}

    def describe_batch(self, step: int) -> str:
        """Return the step number."""
        return str(step)

    def count_tokens(self, micro_batches: Any) -> int:
        """Return 1."""
        return 1

    def count_macs(self, micro_batches: Any) -> float:
        """Return 1."""
        return 1.0

    def evaluate(self) -> dict[str, float]:
        """Return a constant loss."""
        return {"loss": 1.0}
