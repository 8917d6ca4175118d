"""Model directories of either kind, pre-trained or fine-tuned: opened and written without asking.

It never knows what a kind is for.
"""

from pathlib import Path

import torch

from bertsmith.bundle.config import CONFIG_FILE, get_architectures, read_json
from bertsmith.bundle.directory import locate_model
from bertsmith.bundle.fine_tuned import (
    FineTunedBundle,
    is_fine_tuned,
    load_fine_tuned,
    save_fine_tuned,
)
from bertsmith.bundle.pretrained import PretrainedBundle, load, save


def load_model(
    path: Path | str, *, device: torch.device | str = "cpu"
) -> PretrainedBundle | FineTunedBundle:
    """Read a model directory, or the one inside a RUN, with the heads that it has (eval mode).

    Raises ModelError if something is missing, broken or does not fit.
    """
    directory = locate_model(path)
    if is_fine_tuned(directory):
        return load_fine_tuned(directory, device=device)
    return load(directory, device=device)


def save_model(directory: Path, bundle: PretrainedBundle | FineTunedBundle) -> None:
    """Write a model directory, whole or not at all; an older one is replaced at the end.

    Raises ModelError for a pre-trained model without a masked-LM head of its own.
    """
    if isinstance(bundle, FineTunedBundle):
        save_fine_tuned(directory, bundle.model, bundle.tokenizer, bundle.head, bundle.info)
    else:
        # A head drawn anew must not pass for one that was trained.
        bundle.require_head("mlm.")
        save(directory, bundle.model, bundle.tokenizer, bundle.info)


def is_bare_encoder(directory: Path) -> bool:
    """Tell whether the config of a model directory names no class with a head."""
    return not any("For" in name for name in get_architectures(read_json(directory / CONFIG_FILE)))
