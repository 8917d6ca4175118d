"""The encoder of any model directory, without its heads.

It never knows what the hidden states are used for.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.pretrained import WEIGHTS, locate, read_parts, read_tensors
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
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
    """Read the encoder of a model directory, or of the one inside a RUN, in eval mode.

    Any BERT's directory does: pre-trained, fine-tuned or bare. Raises ModelError if something is
    missing, broken or does not fit.
    """
    directory = locate(Path(path))
    info, config, tokenizer = read_parts(directory)
    with torch.device("meta"):
        shapes = {
            f"bert.{name}": tuple(value.shape)
            for name, value in BertModel(config).state_dict().items()
        }
    state = read_tensors(directory / WEIGHTS, shapes)
    model = BertModel(config)
    model.load_state_dict({name.removeprefix("bert."): value for name, value in state.items()})
    return EncoderBundle(model.to(device).eval(), tokenizer, config, directory, info)
