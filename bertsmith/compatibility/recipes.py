"""The recipe `fast` of version 0.2, for old runs and for the experiments of the lab."""

from collections.abc import Mapping
from typing import Any

from bertsmith.settings import merge_settings

#: Settings of `fast` in version 0.2, at all sizes.
_FAST: dict[str, Any] = {
    "model": {"attention_dropout": 0.0, "activation": "gelu"},
    "data": {"batch_size": 32},
    "optim": {"beta2": 0.98, "weight_decay": 0.01},
    "schedule": {"warmup_steps": 10_000},
}
#: Settings that no recipe of version 0.2 changed, and that `fast` changes now.
UNCHANGED_SETTINGS: dict[str, Any] = {
    "data": {"nsp": True, "masking_rate": 0.15, "final_masking_rate": None},
    "optim": {"optimizer": "adamw"},
    "schedule": {"neighbor_bias_steps": 0},
    "run": {"dropout": None},
}
#: Peak learning rates as (maximum width, rate), and the rate of wider models.
_LRS, _LR_WIDE = ((128, 2e-3), (256, 1e-3), (512, 7e-4), (768, 4e-4)), 2e-4
#: Maximum learning rate with next-sentence prediction.
_MAX_LR_WITH_NSP = 1e-3


def get_old_fast_defaults(model: Mapping[str, Any], *, nsp: bool = True) -> dict[str, Any]:
    """Return the default settings of `fast` in version 0.2.

    Args:
        model: Fields of the model config, such as layers and width.
        nsp: Whether next-sentence prediction is trained.
    """
    width = model.get("width", 768)
    lr = next((lr for max_width, lr in _LRS if width <= max_width), _LR_WIDE)
    has_cross_segment_heads = nsp and 1 not in (model.get("layers"), model.get("heads"))
    initialization = "cross-segment-heads" if has_cross_segment_heads else "neighbor-heads"
    size_settings = {
        "model": {"init_range": round(0.02 * (768 / width) ** 0.5, 4), **model},
        "optim": {"lr": min(lr, _MAX_LR_WITH_NSP) if has_cross_segment_heads else lr},
        "run": {"initialization": initialization},
    }
    return merge_settings(_FAST, size_settings)
