"""Loading and saving of model directories of pre-trained and fine-tuned models."""

from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.config import CONFIG_FILE, get_architectures, is_fine_tuned, read_json
from bertsmith.bundle.directory import SENTENCE_TRANSFORMERS_CONFIG, locate_model
from bertsmith.bundle.fine_tuned import (
    FineTunedBundle,
    HeadConfig,
    load_fine_tuned,
    save_fine_tuned,
)
from bertsmith.bundle.pretrained import PretrainedBundle, load, save
from bertsmith.bundle.tensor_files import list_tensors
from bertsmith.bundle.weight_names import normalize_names


def load_model(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
) -> PretrainedBundle | FineTunedBundle:
    """Load a pre-trained or fine-tuned model in eval mode.

    Args:
        path: A model directory, a run directory, a file of a model directory, the name of a
            reference model, or a hub id.
        device: The device of the weights.

    Raises:
        ModelError: A file is missing, damaged or inconsistent with the others.
    """
    directory = locate_model(path)
    if is_fine_tuned(directory):
        return load_fine_tuned(directory, device=device)
    return load(directory, device=device)


def save_model(
    directory: Path,
    bundle: PretrainedBundle | FineTunedBundle,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a model directory atomically, replacing an existing one.

    Args:
        directory: The directory to write.
        bundle: The model.
        dtype: The dtype of the stored weights.

    Raises:
        ModelError: The masked-LM head of a pre-trained model is newly initialized.
    """
    if isinstance(bundle, FineTunedBundle):
        save_fine_tuned(
            directory,
            bundle.model,
            bundle.tokenizer,
            bundle.head,
            bundle.info,
            dtype,
            max_seqlen=bundle.max_seqlen,
            config_extras=_read_output_config(bundle.path, bundle.head),
        )
    else:
        # A model directory cannot record that a head is not trained.
        bundle.require_head("mlm.")
        save(directory, bundle.model, bundle.tokenizer, bundle.info, dtype)


def _read_output_config(directory: Path, head: HeadConfig) -> dict[str, Any]:
    """Return the keys of config.json that determine what other libraries make of the outputs.

    Besides the activation function of a CrossEncoder, these are the label and the problem type of a
    single score: without a problem type, transformers applies a sigmoid to it.
    """
    extras = read_cross_encoder_config(directory)
    if head.kind == "regression" and (directory / CONFIG_FILE).is_file():
        hf_config = read_json(directory / CONFIG_FILE)
        extras["problem_type"] = hf_config.get("problem_type")
        keys = ("id2label", "label2id")
        extras |= {key: hf_config[key] for key in keys if hf_config.get(key)}
    return extras


def read_cross_encoder_config(directory: Path) -> dict[str, Any]:
    """Return the keys of config.json with the activation function of a CrossEncoder's scores."""
    path = directory / CONFIG_FILE
    hf_config = read_json(path) if path.is_file() else {}
    keys = ("sentence_transformers", "sbert_ce_default_activation_function")
    extras = {key: hf_config[key] for key in keys if key in hf_config}
    # Recent releases store it in a file of their own, but still read the older key.
    path = directory / SENTENCE_TRANSFORMERS_CONFIG
    activation = read_json(path).get("activation_fn") if path.is_file() else None
    return extras | ({"sentence_transformers": {"activation_fn": activation}} if activation else {})


def is_bare_encoder(directory: Path) -> bool:
    """Return whether the class in config.json of a model directory has no head.

    If there is no class, the stored weights determine whether the model has a pre-training head.
    """
    class_names = get_architectures(read_json(directory / CONFIG_FILE))
    if class_names:
        return not any("For" in name for name in class_names)
    return not any(name.startswith("cls.") for name in normalize_names(list_tensors(directory)))
