"""Adam with decoupled weight decay, as the original uses it, and its parameter groups.

It never knows the learning rate's course.
"""

import torch
from torch import nn

from bertsmith.train.engine.settings import OptimSettings


def has_weight_decay(name: str) -> bool:
    """Tell whether weight decay holds for a parameter: not for biases, LayerNorm and mixtures."""
    last = name.rpartition(".")[2]
    return not last.startswith(("bias", "layer_")) and "norm." not in name


def build_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over two groups: with and without decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for name, p in named if has_weight_decay(name)],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for name, p in named if not has_weight_decay(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
