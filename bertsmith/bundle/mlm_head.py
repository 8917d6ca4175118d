"""Check that a model directory has a masked-LM head, without loading torch."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bertsmith.bundle.config import read_json
from bertsmith.bundle.directory import (
    INDEX_FILE,
    PICKLE_INDEX_FILE,
    WEIGHTS_FILE,
    find_weights_file,
)
from bertsmith.bundle.metadata import read_info
from bertsmith.errors import ModelError


def check_mlm_head(directory: Path) -> None:
    """Raise ModelError if a model directory has no masked-LM head.

    Only names of tensors are read. Pickled weights and files that cannot be read are not checked;
    they are checked when the model is loaded.
    """
    info = read_info(directory)
    check_predicts_masked_tokens(directory, info)
    names = _list_tensor_names(directory)
    is_missing = names is not None and not any("cls.predictions." in name for name in names)
    if is_missing or any(name.startswith("mlm.") for name in list_untrained_weights(info)):
        raise missing_head_error(directory, "masked-LM head")


def check_predicts_masked_tokens(directory: Path, info: Mapping[str, Any]) -> None:
    """Raise ModelError for a left-to-right model, whose head has the form of a masked-LM head.

    Args:
        directory: The model directory.
        info: Content of bertsmith.json.
    """
    settings = info.get("provenance", {}).get("settings", {})
    if settings.get("data", {}).get("objective") == "left-to-right":
        raise ModelError(
            f"{directory}: this model was trained left to right: it predicts the next word, not a "
            "masked one; use a model trained with data.objective=masked"
        )


def list_untrained_weights(info: Mapping[str, Any]) -> Sequence[str]:
    """Return the weights that a TensorFlow checkpoint did not have when it was imported.

    Args:
        info: Content of bertsmith.json.
    """
    imported = info.get("imported")
    if not isinstance(imported, Mapping):
        return ()
    names: Sequence[str] = imported.get("newly_initialized", ())
    return names


def missing_head_error(directory: Path, head: str) -> ModelError:
    """Return the error for a model without the head named ``head``, such as "masked-LM head"."""
    return ModelError(
        f"{directory}: this model has no {head}, which is needed here; train one with "
        "`bertsmith pretrain --from`, or use a model that has it"
    )


def _list_tensor_names(directory: Path) -> Iterable[str] | None:
    """Return the names of the stored tensors; None if they cannot be read without torch."""
    name = find_weights_file(directory)
    if name in (INDEX_FILE, PICKLE_INDEX_FILE):
        weight_map = read_json(directory / name).get("weight_map")
        return weight_map if isinstance(weight_map, dict) else None
    if name != WEIGHTS_FILE:
        return None
    try:
        with safe_open(directory / name, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return None
