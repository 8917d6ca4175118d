"""Model directories of either kind, pre-trained or fine-tuned: opened and written without asking.

It never knows what a kind is for.
"""

from pathlib import Path

import torch

from bertsmith.bundle.config import CONFIG, classes_of, read_json
from bertsmith.bundle.directory import locate
from bertsmith.bundle.fine_tuned import TaskBundle, is_fine_tuned, load_task, save_task
from bertsmith.bundle.pretrained import Bundle, load, save


def load_either(path: Path | str, *, device: torch.device | str = "cpu") -> Bundle | TaskBundle:
    """Read a model directory, or the one inside a RUN, with the heads that it has (eval mode).

    Raises ModelError if something is missing, broken or does not fit.
    """
    directory = locate(path)
    if is_fine_tuned(directory):
        return load_task(directory, device=device)
    return load(directory, device=device)


def save_either(directory: Path, bundle: Bundle | TaskBundle) -> None:
    """Write a model directory, whole or not at all; an older one is replaced at the end.

    Raises ModelError for a pre-trained model without a masked-LM head of its own.
    """
    if isinstance(bundle, TaskBundle):
        save_task(directory, bundle.model, bundle.tokenizer, bundle.head, bundle.info)
    else:
        # A head drawn anew must not pass for one that was trained.
        bundle.require("mlm.")
        save(directory, bundle.model, bundle.tokenizer, bundle.info)


def is_bare(directory: Path) -> bool:
    """Tell whether the config of a model directory names no class with a head."""
    return not any("For" in name for name in classes_of(read_json(directory / CONFIG)))
