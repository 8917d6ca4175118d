"""What keeps hidden states in bounds: LayerNorm, or what an ablation puts in its place.

It never knows where in a layer it stands.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.config import ModelConfig

#: How much of the running statistics a step replaces (PyTorch's own choice for batch norm).
_MOMENTUM = 0.1


class BatchNorm(nn.Module):
    """Normalize each column over the tokens of a batch (Ioffe and Szegedy 2015): [T, D] -> [T, D].

    Padding would count in its means: here there is none. In eval mode the running statistics of
    training stand in, so that a text's numbers do not depend on its neighbours.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float) -> None:
        """``width`` is D; ``eps`` is added to the variance."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set weights and statistics to where training begins."""
        self.weight.fill_(1.0)
        self.bias.zero_()
        self.running_mean.zero_()
        self.running_var.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        # One token has no variance; a batch of one happens at the end of an epoch.
        training = self.training and len(x) > 1
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, _MOMENTUM,
            self.eps,
        )  # fmt: skip


def build_norm(config: ModelConfig) -> nn.Module:
    """Return the normalization that a config asks for, or what does nothing where it is "none"."""
    if config.norm == "none":
        return nn.Identity()
    form = BatchNorm if config.norm == "batch" else nn.LayerNorm
    return form(config.width, config.norm_eps)
