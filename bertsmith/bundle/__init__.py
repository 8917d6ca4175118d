"""The model directory: config, weights, tokenizer and provenance, in Hugging Face's own layout.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.bundle.any_model import load_model, save_model
    from bertsmith.bundle.config import CONFIG_FILE, TaskKind, read_config, to_hf_config
    from bertsmith.bundle.directory import (
        WEIGHTS_FILE,
        locate_model,
        locate_tokenizer,
        pin_model_path,
    )
    from bertsmith.bundle.encoder import EncoderBundle, load_encoder
    from bertsmith.bundle.fine_tuned import (
        FineTunedBundle,
        HeadConfig,
        is_fine_tuned,
        load_fine_tuned,
        load_for_fine_tuning,
        save_fine_tuned,
    )
    from bertsmith.bundle.metadata import INFO_FILE
    from bertsmith.bundle.model_hash import hash_model_files
    from bertsmith.bundle.pretrained import PretrainedBundle, load, save
    from bertsmith.bundle.tensor_files import (
        StoredTensor,
        list_file_tensors,
        list_tensors,
        save_tensors,
    )
    from bertsmith.bundle.weight_names import to_hf_state_dict
    from bertsmith.bundle.weights import StoredWeights, open_weights

#: The module of each public name. The imports above tell type checkers the same.
_MODULES = {
    "CONFIG_FILE": "config",
    "TaskKind": "config",
    "to_hf_config": "config",
    "read_config": "config",
    "WEIGHTS_FILE": "directory",
    "locate_model": "directory",
    "pin_model_path": "directory",
    "locate_tokenizer": "directory",
    "load_model": "any_model",
    "save_model": "any_model",
    "EncoderBundle": "encoder",
    "load_encoder": "encoder",
    "hash_model_files": "model_hash",
    "to_hf_state_dict": "weight_names",
    "INFO_FILE": "metadata",
    "PretrainedBundle": "pretrained",
    "load": "pretrained",
    "save": "pretrained",
    "StoredTensor": "tensor_files",
    "list_file_tensors": "tensor_files",
    "save_tensors": "tensor_files",
    "list_tensors": "tensor_files",
    "HeadConfig": "fine_tuned",
    "FineTunedBundle": "fine_tuned",
    "is_fine_tuned": "fine_tuned",
    "load_fine_tuned": "fine_tuned",
    "save_fine_tuned": "fine_tuned",
    "load_for_fine_tuning": "fine_tuned",
    "StoredWeights": "weights",
    "open_weights": "weights",
}

__all__ = [
    "CONFIG_FILE",
    "INFO_FILE",
    "WEIGHTS_FILE",
    "EncoderBundle",
    "FineTunedBundle",
    "HeadConfig",
    "PretrainedBundle",
    "StoredTensor",
    "StoredWeights",
    "TaskKind",
    "hash_model_files",
    "is_fine_tuned",
    "list_file_tensors",
    "list_tensors",
    "load",
    "load_encoder",
    "load_fine_tuned",
    "load_for_fine_tuning",
    "load_model",
    "locate_model",
    "locate_tokenizer",
    "open_weights",
    "pin_model_path",
    "read_config",
    "save",
    "save_fine_tuned",
    "save_model",
    "save_tensors",
    "to_hf_config",
    "to_hf_state_dict",
]


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: most modules here load torch, which takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module 'bertsmith.bundle' has no attribute {name!r}")
    value = getattr(import_module(f"bertsmith.bundle.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
