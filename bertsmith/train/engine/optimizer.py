"""Adam with decoupled weight decay and its parameter groups, as in the original BERT code."""

import torch
from torch import nn

from bertsmith.train.engine.settings import OptimSettings


def has_weight_decay(name: str) -> bool:
    """Return whether a parameter decays: all but biases, LayerNorm and layer-mixing weights."""
    last_part = name.rpartition(".")[2]
    return not last_part.startswith(("bias", "layer_")) and "norm." not in name


def build_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) with two parameter groups: with and without decay.

    Frozen parameters are in neither group.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decaying = [p for name, p in trainable if has_weight_decay(name)]
    others = [p for name, p in trainable if not has_weight_decay(name)]
    groups = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
