"""Normalization layers of the encoder: LayerNorm, batch norm or none."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.config import ModelConfig

#: Momentum of the running statistics (the default of PyTorch's batch norm).
_MOMENTUM = 0.1


class BatchNorm(nn.Module):
    """Batch norm (Ioffe and Szegedy 2015) over the tokens of a packed batch: [T, D] -> [T, D].

    The batch has no padding that could distort the statistics. In eval mode, and if the weights are
    frozen, the running statistics are used and do not change, so that the output for a text does
    not depend on the other texts in its batch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, eps: float) -> None:
        """Create the layer.

        Args:
            width: D.
            eps: Small constant that is added to the variance.
        """
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset weight, bias and running statistics."""
        self.weight.fill_(1.0)
        self.bias.zero_()
        self.running_mean.zero_()
        self.running_var.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized hidden states: [T, D] -> [T, D]."""
        # Frozen layers keep their statistics too. The last batch of an epoch can have a single
        # token, whose variance is undefined.
        use_batch_statistics = self.training and self.weight.requires_grad and len(x) > 1
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, use_batch_statistics,
            _MOMENTUM, self.eps,
        )  # fmt: skip


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in the dtype of its weights and returns the dtype of its input.

    With float32 weights, mean and variance of a 16-bit residual stream are therefore computed in
    float32, also outside autocast.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized hidden states: [T, D] -> [T, D]."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def build_norm(config: ModelConfig) -> nn.Module:
    """Create the normalization layer for ``config.norm``; for "none" it is the identity."""
    if config.norm == "none":
        return nn.Identity()
    norm_class = BatchNorm if config.norm == "batch" else LayerNorm
    return norm_class(config.width, config.norm_eps)
