"""The model directory: config, weights, tokenizer and provenance, in Hugging Face's own layout.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

from bertsmith.bundle.config import CONFIG, config_json, read_config
from bertsmith.bundle.directory import WEIGHTS, locate, pinned, tokenizer_of
from bertsmith.bundle.either import load_either, save_either
from bertsmith.bundle.encoder import EncoderBundle, load_encoder
from bertsmith.bundle.extend import extend
from bertsmith.bundle.identity import fingerprint
from bertsmith.bundle.names import names, to_disk
from bertsmith.bundle.pretrained import INFO, Bundle, load, save
from bertsmith.bundle.stored import Stored, read_file, save_tensors, stored_in
from bertsmith.bundle.task import (
    Head,
    Kind,
    TaskBundle,
    is_fine_tuned,
    load_task,
    save_task,
    start_task,
)
from bertsmith.bundle.weights import Weights, open_weights

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
    "extend",
    "fingerprint",
    "is_fine_tuned",
    "load",
    "load_either",
    "load_encoder",
    "load_task",
    "locate",
    "names",
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
