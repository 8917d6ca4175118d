"""One optimizer step: gradient accumulation, clipping and the weight update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.errors import DivergedError
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine, seed_dropout
from bertsmith.runtime.process_group import defer_gradient_sum
from bertsmith.train.engine.optimizer import Optimizer

#: Odd multipliers that give every step and micro-batch a different dropout seed.
_STEP_MULTIPLIER, _MICRO_BATCH_MULTIPLIER = 0x9E3779B1, 0x85EBCA6B


@dataclass(frozen=True)
class StepResult:
    """Losses and gradient norms of one optimizer step of all processes.

    Attributes:
        losses: Named losses, averaged over the batch.
        grad_norm: Global gradient norm before clipping.
        grad_norms: Gradient norms of the named parameter groups before clipping.
    """

    losses: dict[str, float]
    grad_norm: float
    grad_norms: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of the named losses."""
        return sum(self.losses.values())


def derive_dropout_seed(seed: int, step: int, micro_batch_index: int) -> int:
    """Return the dropout seed of a micro-batch, a pure function of the arguments.

    Args:
        seed: Seed of the run.
        step: Step number, from 0.
        micro_batch_index: Number of the micro-batch in the batch, from 0.
    """
    return (
        seed * 2**32 + step * _STEP_MULTIPLIER + micro_batch_index * _MICRO_BATCH_MULTIPLIER
    ) % 2**62


LossFunction = Callable[[Any, list[Any], DropoutSeed], dict[str, Tensor]]


def take_step(
    loss_fn: LossFunction,
    micro_batches: list[Any],
    model: nn.Module,
    optimizer: Optimizer,
    machine: Machine,
    *,
    step: int,
    seed: int,
    lr: float,
    max_grad_norm: float,
    describe_batch: Callable[[int], str] = "that of step {}".format,
    grad_norm_groups: Mapping[str, Sequence[nn.Parameter]] | None = None,
) -> StepResult:
    """Accumulate the gradient of a batch and update the weights once.

    Args:
        loss_fn: Returns the named losses of a micro-batch, see ``Objective.compute_losses``. With
            several processes, its backward pass must sum the gradients over them.
        micro_batches: All micro-batches of the batch.
        model: Model to train.
        optimizer: Optimizer over the parameters of ``model``.
        machine: Device, precision and processes.
        step: Step number, from 0.
        seed: Seed of the run, for dropout.
        lr: Learning rate of this step.
        max_grad_norm: Gradients are clipped to this global norm.
        describe_batch: Describes the examples in the batch of a step, for the error message.
        grad_norm_groups: Named parameter groups whose gradient norms are returned.

    Raises:
        DivergedError: If the loss or the gradient is not finite. The weights stay unchanged.
    """
    totals: dict[str, Tensor] = {}
    indices = machine.processes.assign_indices(len(micro_batches))
    for index in indices:
        dropout_seed = derive_dropout_seed(seed, step, index)
        seed_dropout(machine.device, dropout_seed)
        with defer_gradient_sum(loss_fn, is_last=index == indices[-1]):
            with machine.autocast():
                losses = loss_fn(
                    micro_batches[index], micro_batches, DropoutSeed(torch.tensor(dropout_seed))
                )
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        for name, value in losses.items():
            totals[name] = totals[name] + value.detach() if name in totals else value.detach()
    grad_norms = {
        name: _compute_grad_norm(parameters)
        for name, parameters in (grad_norm_groups or {}).items()
    }
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    loss_values = machine.processes.sum([float(v) for v in totals.values()], machine.device)
    mean_losses = dict(zip(totals, loss_values, strict=True))
    result = StepResult(mean_losses, float(grad_norm), grad_norms)
    if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
        raise DivergedError(
            f"training diverged in step {step + 1}: the loss is {result.loss:g} and the gradient "
            f"norm {result.grad_norm:g}; the weights and the last checkpoint are unchanged. "
            f"The batch is {describe_batch(step)} (seed {seed}). "
            "Lower optim.lr, or set run.precision=fp32"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return result


def _compute_grad_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the L2 norm of the concatenated gradients of ``parameters``."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))
