"""One optimizer step: gradient piece by piece, clipping, and the update of the weights.

It never knows what is trained, nor which step comes next.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.errors import DivergedError
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine

#: Odd constants that set apart the seeds of steps and of the pieces of a batch.
_STEP_KEY, _PIECE_KEY = 0x9E3779B1, 0x85EBCA6B


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step."""

    losses: dict[str, float]
    grad_norm: float
    grad_norms: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of the terms."""
        return sum(self.losses.values())


def step_seed(seed: int, step: int, micro_batch_index: int) -> int:
    """Return the seed of dropout, a pure function of (seed, step, piece)."""
    return (seed * 2**32 + step * _STEP_KEY + micro_batch_index * _PIECE_KEY) % 2**62


LossFunction = Callable[[Any, list[Any], DropoutSeed], dict[str, Tensor]]


def take_step(
    loss_fn: LossFunction,
    micro_batches: list[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    machine: Machine,
    *,
    step: int,
    seed: int,
    lr: float,
    max_grad_norm: float,
    describe_batch: Callable[[int], str] = "that of step {}".format,
    grad_norm_groups: Mapping[str, Sequence[nn.Parameter]] | None = None,
) -> StepResult:
    """Compute the gradient of a batch piece by piece, and update the weights once.

    ``loss_fn`` is that of a Work, ``describe_batch`` tells people which batch a step has, and ``grad_norm_groups``
    names parts of the model whose gradients' norms are wanted.
    Raises DivergedError before the weights are touched if loss or gradient is not finite.
    """
    sums: dict[str, Tensor] = {}
    for number, piece in enumerate(micro_batches):
        piece_seed = step_seed(seed, step, number)
        if machine.device.type == "cuda":
            torch.cuda.manual_seed(piece_seed)
        with machine.autocast():
            terms = loss_fn(piece, micro_batches, DropoutSeed(torch.tensor(piece_seed)))
        torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        for name, value in terms.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
    gradients = {name: _norm(own) for name, own in (grad_norm_groups or {}).items()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    told = {name: float(value) for name, value in sums.items()}
    result = StepResult(told, float(norm), gradients)
    if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
        raise DivergedError(
            f"step {step + 1}: the loss is {result.loss:g} and the norm of its gradient "
            f"{result.grad_norm:g}; the weights were left as they were, and the last checkpoint "
            f"stands. The batch is {describe_batch(step)} (seed {seed}). A lower optim.lr, or "
            "fp32 (run.precision), usually helps"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return result


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of the gradients of some parameters, as one vector."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(found))
