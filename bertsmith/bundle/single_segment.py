"""Rejects pairs of texts as inputs of a loaded model that has a single segment."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertsmith.errors import InputError
from bertsmith.model.bert import BertModel


def reject_pairs(encoder: BertModel, directory: Path) -> None:
    """Make inference on pairs of texts an InputError if an encoder has a single segment.

    Functions that encode texts know only the tokenizer, so the input of the embeddings is checked.

    Args:
        encoder: The encoder of a loaded model.
        directory: The model directory, for the message.
    """
    if encoder.config.segments == 1:
        encoder.embeddings.register_forward_pre_hook(partial(_check_segments, directory))


def _check_segments(directory: Path, embeddings: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise InputError if a batch, the first input, has tokens of a second segment."""
    # Training checks the settings instead, and a check of values would divide a compiled graph.
    if embeddings.training or torch.compiler.is_compiling():
        return
    if inputs[0].segments.any():
        raise InputError(
            f"{directory}: the input is a pair of texts, but the model has a single segment "
            "(type_vocab_size is 1); pass single texts, or use a model with two segments"
        )
