"""Muon: momentum whose update of each weight matrix is orthogonalized."""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

#: Coefficients of the polynomial a x + b x³ + c x⁵, which moves all singular values towards 1
#: (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
#: Root mean square of an update, which is about that of AdamW, so that both can have the same
#: learning rate (Liu et al. 2025, arXiv:2502.16982, section 2.2).
_UPDATE_RMS: Final = 0.2
#: Added to the norm of a zero gradient.
_EPS: Final = 1e-7


def orthogonalize(matrices: Tensor, num_iterations: int) -> Tensor:
    """Replace the singular values of each matrix by values near 1, with Newton-Schulz iterations.

    Args:
        matrices: [matrices, rows, columns], or [rows, columns] for one matrix, which oneDNN
            multiplies faster than a batch of one; float32 or bfloat16.
        num_iterations: Number of iterations.

    Returns:
        U S V^T for each matrix U Σ V^T, with the diagonal of S between about 0.7 and 1.2 after
        5 iterations. Singular values that are nearly 0 stay smaller.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norms: Tensor = x.norm(dim=(-2, -1), keepdim=True)
    x = x / norms.clamp(min=_EPS)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(num_iterations):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


class Muon:
    """Muon with Nesterov momentum and decoupled weight decay.

    It computes the update of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, with
    two differences. A parameter that consists of several matrices, such as the weight of queries,
    keys and values, has one orthogonal update per matrix, as recommended by Jordan et al. The
    iterations run in the dtype of the group, not always in bfloat16.
    """

    def __init__(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        state: MutableMapping[Tensor, Any],
    ) -> None:
        """Create the optimizer.

        Args:
            param_groups: Groups with the keys of PyTorch's optimizers: ``params``, ``lr``,
                ``weight_decay`` and ``momentum``. ``num_matrices`` is the number of matrices that
                a parameter of the group consists of, one below the other. ``num_iterations`` is
                the number of Newton-Schulz iterations, and ``matmul_dtype`` their dtype.
            state: Where the optimizer stores ``momentum_buffer`` of each parameter.
        """
        self.param_groups = [dict(group) for group in param_groups]
        self.state = state
        #: float32 [] on the device, or None. If it is not 0, a step changes nothing, as with
        #: PyTorch's fused optimizers.
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update one parameter."""
        if parameter not in self.state:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        buffer = self.state[parameter]["momentum_buffer"]
        momentum = group["momentum"]
        previous = [parameter.clone(), buffer.clone()] if self.found_inf is not None else []
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum)
        matrices = direction.to(group["matmul_dtype"])
        if group["num_matrices"] > 1:
            matrices = matrices.view(group["num_matrices"], -1, direction.shape[-1])
        update = orthogonalize(matrices, group["num_iterations"]).reshape(parameter.shape)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        # A semi-orthogonal matrix has a root mean square of 1 / sqrt(max(rows, columns)).
        scale = _UPDATE_RMS * math.sqrt(max(matrices.shape[-2:]))
        parameter.add_(update, alpha=-group["lr"] * scale)
        for tensor, old_value in zip((parameter, buffer), previous, strict=False):
            assert self.found_inf is not None
            torch.where(self.found_inf.bool(), old_value, tensor, out=tensor)
