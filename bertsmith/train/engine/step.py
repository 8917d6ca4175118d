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
from bertsmith.train.engine.optimizer import Optimizer, can_skip_step, skip_step_if

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


class PendingStep:
    """An optimizer step that the device may still be computing.

    Until ``read`` is called, the CPU does not wait for a GPU and can prepare the next step. If the
    loss or the gradient norm is not finite, the device leaves the weights unchanged.

    Attributes:
        has_diverged: bool [], whether this step or an earlier unread step is not finite.
    """

    def __init__(
        self,
        values: Tensor,
        loss_names: Sequence[str],
        group_names: Sequence[str],
        describe: Callable[[StepResult], str],
        previous: "PendingStep | None",
    ) -> None:
        """Create a step.

        Args:
            values: float64 [n], the losses, the gradient norm, and the gradient norms of the
                groups.
            loss_names: Names of the losses.
            group_names: Names of the groups.
            describe: Returns the error message for a result that is not finite.
            previous: The previous step, if it has not been read.
        """
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            # A copy to page-locked memory, so that ``read`` does not wait for later steps.
            self._values = values.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))
        self._loss_names = tuple(loss_names)
        self._group_names = tuple(group_names)
        self._describe = describe
        self.has_diverged = ~values[: len(loss_names) + 1].isfinite().all()
        if previous is not None:
            self.has_diverged |= previous.has_diverged

    def read(self) -> StepResult:
        """Wait for the result and return the losses and gradient norms.

        Raises:
            DivergedError: If the loss or the gradient is not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        values = self._values.tolist()
        num_losses = len(self._loss_names)
        result = StepResult(
            losses=dict(zip(self._loss_names, values, strict=False)),
            grad_norm=values[num_losses],
            grad_norms=dict(zip(self._group_names, values[num_losses + 1 :], strict=True)),
        )
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            raise DivergedError(self._describe(result))
        return result


LossFunction = Callable[[Any, list[Any], DropoutSeed], dict[str, Tensor]]


@dataclass(frozen=True)
class StartedStep:
    """A step whose metrics have not been logged yet.

    Attributes:
        pending: The step.
        step: Its number, from 0.
        lr: Its learning rate.
        should_log: Whether a line of the metrics log is due.
        num_tokens: Number of tokens of the batch.
        num_macs: Number of multiply-accumulates.
    """

    pending: PendingStep
    step: int
    lr: float
    should_log: bool
    num_tokens: int
    num_macs: float


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
    describe_batch: Callable[[int], str] = "step {}".format,
    grad_norm_groups: Mapping[str, Sequence[nn.Parameter]] | None = None,
    previous: PendingStep | None = None,
) -> PendingStep:
    """Accumulate the gradient of a batch and update the weights once.

    On a GPU, the function does not wait for the result. Otherwise the result is already
    checked when the function returns.

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
        describe_batch: Describes the examples in the batch of a step, for the error message. It is
            only called if the result is not finite, which may be noticed after later batches.
        grad_norm_groups: Named parameter groups whose gradient norms are returned.
        previous: The previous step, if it has not been read. If it has diverged, this step does not
            change the weights either.

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
    groups = grad_norm_groups or {}
    norms = [_compute_grad_norm(parameters) for parameters in groups.values()]
    norms.insert(0, torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    loss_sums = machine.processes.sum_tensor(torch.stack(list(totals.values())).double())

    def describe_divergence(result: StepResult) -> str:
        advice = ", or with run.precision=fp32" if machine.precision == "bf16" else ""
        return (
            f"training diverged in step {step + 1}: the loss is {result.loss:g} and the gradient "
            f"norm {result.grad_norm:g}; the weights and the last checkpoint are unchanged. "
            f"Batch: {describe_batch(step)} (seed {seed}). "
            f"Start a new run (another --out) with a lower optim.lr{advice}"
        )

    values = torch.cat([loss_sums, torch.stack(norms).double()])
    pending = PendingStep(values, list(totals), list(groups), describe_divergence, previous)
    if can_skip_step(machine.device):
        skip_step_if(optimizer, pending.has_diverged)
    else:
        pending.read()
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return pending


def _compute_grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm of the concatenated gradients of ``parameters``, []."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
