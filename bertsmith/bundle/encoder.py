"""The encoder of any model directory, without its heads.

It never knows what the hidden states are used for.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertsmith.bundle.directory import locate_model
from bertsmith.bundle.metadata import read_metadata
from bertsmith.bundle.weights import build_with_weights, open_weights
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import Pooler
from bertsmith.text.wordpiece import Tokenizer


@dataclass(frozen=True)
class EncoderBundle:
    """An encoder in memory. ``info`` is what ``bertsmith.json`` says."""

    model: BertModel
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)


def load_encoder(path: Path | str, *, device: torch.device | str = "cpu") -> EncoderBundle:
    """Read an encoder in eval mode: of a directory, a RUN, a file of it or a hub id.

    Any BERT's directory does: pre-trained, fine-tuned or bare. Raises ModelError if something is
    missing, broken or does not fit.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    # Under the name that a model with heads has for it.
    whole, _ = build_with_weights(
        lambda: nn.ModuleDict({"bert": BertModel(config)}), open_weights(directory, config)
    )
    model = whole["bert"]
    assert isinstance(model, BertModel)
    return EncoderBundle(model.to(device).eval(), tokenizer, config, directory, info)


def load_pooler(directory: Path, config: ModelConfig) -> Pooler:
    """Read the pooler of a model directory, on the CPU. Raises ModelError where there is none."""
    weights = open_weights(directory, config)
    if not weights.has_pooler:
        raise ModelError(f"{directory}: this model has no pooler (the tanh over its first token)")
    whole, _ = build_with_weights(lambda: nn.ModuleDict({"pooler": Pooler(config)}), weights)
    pooler = whole["pooler"]
    assert isinstance(pooler, Pooler)
    return pooler
