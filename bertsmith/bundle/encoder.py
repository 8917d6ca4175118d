"""Loading and saving of encoders, and loading of poolers, without other weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from bertsmith.bundle.config import CONFIG_FILE, to_hf_config
from bertsmith.bundle.directory import WEIGHTS_FILE, locate_model
from bertsmith.bundle.metadata import INFO_FILE, read_metadata
from bertsmith.bundle.model_card import ENCODER, MODEL_CARD_FILE, build_model_card
from bertsmith.bundle.single_segment import reject_pairs
from bertsmith.bundle.tensor_files import save_tensors
from bertsmith.bundle.weight_names import to_hf_encoder_state_dict
from bertsmith.bundle.weights import build_with_weights, open_weights
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, write_atomic, write_json
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import Pooler
from bertsmith.text.wordpiece import Tokenizer

#: Note for users about a written encoder without a pooler.
NO_POOLER_NOTE: Final = (
    "the model has no pooler: transformers' AutoModel warns that it initializes a new one"
)


@dataclass(frozen=True)
class EncoderBundle:
    """An encoder in memory.

    Attributes:
        path: The model directory.
        info: The content of bertsmith.json.
    """

    model: BertModel
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)


def load_encoder(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    config_overrides: Mapping[str, Any] | None = None,
) -> EncoderBundle:
    """Load the encoder of a BERT in eval mode; its heads are ignored.

    Args:
        path: A model directory, a run directory, a file of a model directory, the name of a
            reference model, or a hub id.
        device: The device of the weights.
        config_overrides: ``ModelConfig`` fields to replace, such as dropout.

    Raises:
        ModelError: A file is missing, damaged or inconsistent with the others.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    weights = open_weights(directory, config)
    if config_overrides:
        config = ModelConfig.parse(config.model_dump() | dict(config_overrides), "the settings")
    # The container has the key "bert", so that its weights have the names of a model with heads.
    container, _ = build_with_weights(lambda: nn.ModuleDict({"bert": BertModel(config)}), weights)
    model = container["bert"]
    assert isinstance(model, BertModel)
    reject_pairs(model, directory)
    return EncoderBundle(model.to(device).eval(), tokenizer, config, directory, info)


def save_encoder(
    directory: Path,
    model: BertModel,
    tokenizer: Tokenizer,
    info: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    pooler_weights: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write the directory of an encoder without heads atomically, replacing an existing one.

    Without a pooler, transformers' AutoModel adds one with random weights unless it is loaded with
    ``add_pooling_layer=False``.

    Args:
        directory: The directory to write.
        model: The encoder.
        tokenizer: The model's tokenizer.
        info: Content of bertsmith.json, such as provenance.
        dtype: The dtype of the stored weights.
        pooler_weights: Weights as returned by ``load_pooler_weights``; empty for no pooler.
    """
    config = model.config
    hf_config = to_hf_config(config) | {"pad_token_id": tokenizer.pad_id}
    prefix = "Bert" if hf_config["model_type"] == "bert" else "Bertsmith"
    tensors = to_hf_encoder_state_dict(model.state_dict(), pooler_weights, dtype)
    with atomic_directory(directory) as new:
        save_tensors(tensors, new / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(new / CONFIG_FILE, hf_config | {"architectures": [f"{prefix}Model"]})
        write_json(new / INFO_FILE, {**info, "positions": config.positions})
        tokenizer.save(new, config.max_positions)
        write_atomic(new / MODEL_CARD_FILE, build_model_card(config, tokenizer, info, ENCODER))


def load_pooler(directory: Path, config: ModelConfig) -> Pooler:
    """Load the pooler of a model directory on the CPU.

    Raises:
        ModelError: The model has no pooler.
    """
    weights = open_weights(directory, config)
    if not weights.has_pooler:
        raise ModelError(
            f"{directory}: this model has no pooler (the tanh layer on [CLS]); use another model "
            "or another pooling"
        )
    container, _ = build_with_weights(lambda: nn.ModuleDict({"pooler": Pooler(config)}), weights)
    pooler = container["pooler"]
    assert isinstance(pooler, Pooler)
    return pooler


def load_pooler_weights(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a pooler, with the prefix "pooler."; empty if there is no pooler."""
    if not open_weights(directory, config).has_pooler:
        return {}
    state = load_pooler(directory, config).state_dict()
    return {f"pooler.{name}": value for name, value in state.items()}
