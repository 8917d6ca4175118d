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
from bertsmith.model.ops.dropout import Noise
from bertsmith.runtime.device import Machine

#: Odd constants that set apart the seeds of steps and of the pieces of a batch.
_STEP_KEY, _PIECE_KEY = 0x9E3779B1, 0x85EBCA6B


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step."""

    terms: dict[str, float]
    grad_norm: float
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of the terms."""
        return sum(self.terms.values())


def step_seed(seed: int, step: int, piece: int) -> int:
    """Return the seed of dropout, a pure function of (seed, step, piece)."""
    return (seed * 2**32 + step * _STEP_KEY + piece * _PIECE_KEY) % 2**62


Losses = Callable[[Any, list[Any], Noise], dict[str, Tensor]]


def take_step(
    losses: Losses,
    whole: list[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    machine: Machine,
    *,
    step: int,
    seed: int,
    rate: float,
    clip: float,
    whereabouts: Callable[[int], str] = "that of step {}".format,
    watch: Mapping[str, Sequence[nn.Parameter]] | None = None,
) -> StepResult:
    """Compute the gradient of a batch piece by piece, and update the weights once.

    ``losses`` is that of a Work, ``whereabouts`` tells people which batch a step has, and ``watch``
    names parts of the model whose gradients' norms are wanted.
    Raises DivergedError before the weights are touched if loss or gradient is not finite.
    """
    sums: dict[str, Tensor] = {}
    for number, piece in enumerate(whole):
        piece_seed = step_seed(seed, step, number)
        if machine.device.type == "cuda":
            torch.cuda.manual_seed(piece_seed)
        with machine.autocast():
            terms = losses(piece, whole, Noise(torch.tensor(piece_seed)))
        torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        for name, value in terms.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
    gradients = {name: _norm(own) for name, own in (watch or {}).items()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    told = {name: float(value) for name, value in sums.items()}
    result = StepResult(told, float(norm), gradients)
    if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
        raise DivergedError(
            f"step {step + 1}: the loss is {result.loss:g} and the norm of its gradient "
            f"{result.grad_norm:g}; the weights were left as they were, and the last checkpoint "
            f"stands. The batch is {whereabouts(step)} (seed {seed}). A lower optim.lr, or "
            "fp32 (run.precision), usually helps"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return result


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of the gradients of some parameters, as one vector."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(found))
