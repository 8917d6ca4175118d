"""The model directory: config, weights, tokenizer and provenance, in Hugging Face's own layout.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.bundle.any_model import load_either, save_either
    from bertsmith.bundle.config import CONFIG, Kind, config_json, read_config
    from bertsmith.bundle.directory import WEIGHTS, locate, pinned, tokenizer_of
    from bertsmith.bundle.encoder import EncoderBundle, load_encoder
    from bertsmith.bundle.fine_tuned import (
        Head,
        TaskBundle,
        is_fine_tuned,
        load_task,
        save_task,
        start_task,
    )
    from bertsmith.bundle.identity import fingerprint
    from bertsmith.bundle.parts import INFO
    from bertsmith.bundle.pretrained import Bundle, load, save
    from bertsmith.bundle.tensor_files import Stored, read_file, save_tensors, stored_in
    from bertsmith.bundle.weight_names import to_disk
    from bertsmith.bundle.weights import Weights, open_weights

#: The module of each public name. The imports above tell type checkers the same.
_MODULES = {
    "CONFIG": "config",
    "Kind": "config",
    "config_json": "config",
    "read_config": "config",
    "WEIGHTS": "directory",
    "locate": "directory",
    "pinned": "directory",
    "tokenizer_of": "directory",
    "load_either": "any_model",
    "save_either": "any_model",
    "EncoderBundle": "encoder",
    "load_encoder": "encoder",
    "fingerprint": "identity",
    "to_disk": "weight_names",
    "INFO": "parts",
    "Bundle": "pretrained",
    "load": "pretrained",
    "save": "pretrained",
    "Stored": "tensor_files",
    "read_file": "tensor_files",
    "save_tensors": "tensor_files",
    "stored_in": "tensor_files",
    "Head": "fine_tuned",
    "TaskBundle": "fine_tuned",
    "is_fine_tuned": "fine_tuned",
    "load_task": "fine_tuned",
    "save_task": "fine_tuned",
    "start_task": "fine_tuned",
    "Weights": "weights",
    "open_weights": "weights",
}

__all__ = [
    "CONFIG",
    "INFO",
    "WEIGHTS",
    "Bundle",
    "EncoderBundle",
    "Head",
    "Kind",
    "Stored",
    "TaskBundle",
    "Weights",
    "config_json",
    "fingerprint",
    "is_fine_tuned",
    "load",
    "load_either",
    "load_encoder",
    "load_task",
    "locate",
    "open_weights",
    "pinned",
    "read_config",
    "read_file",
    "save",
    "save_either",
    "save_task",
    "save_tensors",
    "start_task",
    "stored_in",
    "to_disk",
    "tokenizer_of",
]


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: most modules here load torch, which takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module 'bertsmith.bundle' has no attribute {name!r}")
    value = getattr(import_module(f"bertsmith.bundle.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
