"""Adam with decoupled weight decay and its parameter groups, as in the original BERT code."""

import torch
from torch import nn

from bertsmith.train.engine.settings import OptimSettings


def has_weight_decay(name: str) -> bool:
    """Return whether weight decay applies to the parameter ``name``.

    It applies to all parameters except biases, LayerNorm and the layer-mixing weights.
    """
    last_part = name.rpartition(".")[2]
    return not last_part.startswith(("bias", "layer_")) and "norm." not in name


def build_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019), with weight decay only where it applies.

    The first parameter group has weight decay, the second has none. Frozen parameters are in
    neither group.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with_decay = [p for name, p in trainable if has_weight_decay(name)]
    without_decay = [p for name, p in trainable if not has_weight_decay(name)]
    groups = [
        {"params": with_decay, "weight_decay": settings.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
