"""Adam with decoupled weight decay, as the original uses it, and its parameter groups.

It never knows the learning rate's course.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from bertsmith.settings import Settings

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimSettings(Settings):
    """The optimizer; the defaults are the paper's (appendix A.2) and the original code's."""

    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Annotated[float, Field(gt=0.0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    #: Gradients are scaled down to this global norm (the original's clip_by_global_norm).
    clip: Annotated[float, Field(gt=0.0)] = 1.0


def decays(name: str) -> bool:
    """Tell whether weight decay holds for a parameter: not for biases, LayerNorm and mixtures."""
    last = name.rpartition(".")[2]
    return not last.startswith(("bias", "layer_")) and "norm." not in name


def build(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over two groups: with and without decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if decays(name)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
