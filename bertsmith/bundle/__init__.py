"""Model directories in Hugging Face's layout: config, weights, tokenizer and provenance."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.bundle.any_model import load_model, save_model
    from bertsmith.bundle.config import (
        CONFIG_FILE,
        TaskKind,
        is_fine_tuned,
        read_config,
        to_hf_config,
    )
    from bertsmith.bundle.directory import (
        WEIGHTS_FILE,
        compute_model_id,
        hash_model_files,
        locate_model,
        locate_tokenizer,
        pin_model_path,
    )
    from bertsmith.bundle.encoder import EncoderBundle, load_encoder
    from bertsmith.bundle.fine_tuned import (
        FineTunedBundle,
        HeadConfig,
        load_fine_tuned,
        load_for_fine_tuning,
        save_fine_tuned,
    )
    from bertsmith.bundle.metadata import INFO_FILE, read_info
    from bertsmith.bundle.pretrained import PretrainedBundle, load, save
    from bertsmith.bundle.tensor_files import (
        StoredTensor,
        list_file_tensors,
        list_tensors,
        save_tensors,
    )
    from bertsmith.bundle.weight_names import to_hf_state_dict
    from bertsmith.bundle.weights import StoredWeights, open_weights

#: The module of each public name. Keep in sync with the imports for type checkers above.
_MODULE_OF_NAME = {
    "load_model": "any_model",
    "save_model": "any_model",
    "CONFIG_FILE": "config",
    "TaskKind": "config",
    "is_fine_tuned": "config",
    "read_config": "config",
    "to_hf_config": "config",
    "WEIGHTS_FILE": "directory",
    "compute_model_id": "directory",
    "hash_model_files": "directory",
    "locate_model": "directory",
    "locate_tokenizer": "directory",
    "pin_model_path": "directory",
    "EncoderBundle": "encoder",
    "load_encoder": "encoder",
    "FineTunedBundle": "fine_tuned",
    "HeadConfig": "fine_tuned",
    "load_fine_tuned": "fine_tuned",
    "load_for_fine_tuning": "fine_tuned",
    "save_fine_tuned": "fine_tuned",
    "INFO_FILE": "metadata",
    "read_info": "metadata",
    "PretrainedBundle": "pretrained",
    "load": "pretrained",
    "save": "pretrained",
    "StoredTensor": "tensor_files",
    "list_file_tensors": "tensor_files",
    "list_tensors": "tensor_files",
    "save_tensors": "tensor_files",
    "to_hf_state_dict": "weight_names",
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
    "compute_model_id",
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
    "read_info",
    "save",
    "save_fine_tuned",
    "save_model",
    "save_tensors",
    "to_hf_config",
    "to_hf_state_dict",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because most modules load torch, which takes seconds."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'bertsmith.bundle' has no attribute {name!r}")
    value = getattr(import_module(f"bertsmith.bundle.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
