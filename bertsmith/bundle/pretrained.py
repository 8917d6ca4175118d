"""Loading and saving of the model directories of pre-trained models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.config import CONFIG_FILE, to_hf_config
from bertsmith.bundle.directory import WEIGHTS_FILE, locate_model
from bertsmith.bundle.metadata import INFO_FILE, read_metadata
from bertsmith.bundle.mlm_head import (
    check_predicts_masked_tokens,
    list_untrained_weights,
    missing_head_error,
)
from bertsmith.bundle.model_card import MODEL_CARD_FILE, build_model_card
from bertsmith.bundle.single_segment import reject_pairs
from bertsmith.bundle.tensor_files import save_tensors
from bertsmith.bundle.weight_names import to_hf_state_dict
from bertsmith.bundle.weights import build_with_weights, describe_names, open_weights
from bertsmith.files import atomic_directory, write_atomic, write_json
from bertsmith.model.bert import BertForPreTraining, initialize_weights
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

#: Prefix of the names of a head's weights -> name of the head in messages.
_HEAD_NAMES = {"mlm.": "masked-LM head", "nsp.": "next-sentence head", "pooler.": "pooler"}

#: Names of the weights of the masked-LM head, except the decoder weight, which is tied to the word
#: embeddings.
_MLM_WEIGHTS = (
    "mlm.transform.weight", "mlm.transform.bias", "mlm.norm.weight", "mlm.norm.bias",
    "mlm.decoder.bias",
)  # fmt: skip


@dataclass(frozen=True)
class PretrainedBundle:
    """A pre-trained model in memory.

    Attributes:
        path: The model directory.
        info: The content of bertsmith.json: recipe, provenance, and fields that config.json cannot
            express.
        new_weights: Names of weights that are not stored and were newly initialized.
        unused_weights: Names of stored tensors that this model does not have.
    """

    model: BertForPreTraining
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    new_weights: tuple[str, ...] = ()
    unused_weights: tuple[str, ...] = ()

    def require_mlm_head(self) -> None:
        """Raise ModelError if the model cannot predict masked tokens.

        The head of a left-to-right model has the same weights as a masked-LM head, but predicts the
        next token.
        """
        check_predicts_masked_tokens(self.path, self.info)
        self.require_head("mlm.")

    def has_head(self, prefix: str) -> bool:
        """Return whether a head exists and is trained; ``prefix`` as in ``require_head``."""
        names = self.model.state_dict()
        return any(name.startswith(prefix) for name in names) and not any(
            name.startswith(prefix) for name in self.new_weights
        )

    def require_head(self, prefix: str) -> None:
        """Raise ModelError if a head is newly initialized, and therefore not trained.

        Args:
            prefix: Prefix of the names of the head's weights: "mlm.", "nsp." or "pooler.".
        """
        if any(name.startswith(prefix) for name in self.new_weights):
            raise missing_head_error(self.path, _HEAD_NAMES[prefix])

    def notes(self) -> list[str]:
        """Return messages about new weights, unused weights and unused embedding rows."""
        notes = describe_names(self.path, "newly initialized weights", self.new_weights)
        notes += describe_names(self.path, "unused weights", self.unused_weights)
        return notes + describe_unused_rows(self.path, self.config, self.tokenizer)


def save(
    directory: Path,
    model: BertForPreTraining,
    tokenizer: Tokenizer,
    info: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a model directory atomically, replacing an existing one.

    Args:
        directory: The directory to write.
        model: The model.
        tokenizer: The model's tokenizer.
        info: Content of bertsmith.json, such as recipe and provenance.
        dtype: The dtype of the stored weights. config.json says float32 in any case, the dtype in
            which Bertsmith and transformers compute after loading.
    """
    config = model.config
    with atomic_directory(directory) as new:
        state = to_hf_state_dict(model.state_dict(), dtype)
        save_tensors(state, new / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(new / CONFIG_FILE, to_hf_config(config) | {"pad_token_id": tokenizer.pad_id})
        write_json(new / INFO_FILE, {**info, "positions": config.positions, "nsp": config.nsp})
        tokenizer.save(new, config.max_positions)
        write_atomic(new / MODEL_CARD_FILE, build_model_card(config, tokenizer, info))


def load(path: Path | str, *, device: torch.device | str = "cpu") -> PretrainedBundle:
    """Load a BERT with or without heads as a pre-training model in eval mode.

    A missing masked-LM head is newly initialized, and its weights are listed in ``new_weights``. A
    missing next-sentence head is not added. ``new_weights`` also has the weights that were newly
    initialized when the model was imported.

    Args:
        path: A model directory, a run directory, a file of a model directory, the name of a
            reference model, or a hub id.
        device: The device of the weights.

    Raises:
        ModelError: A file is missing, damaged or inconsistent with the others.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    weights = open_weights(directory, config)
    # The stored weights determine the heads, because the class in config.json is often another one.
    has_nsp = weights.has_nsp_head and (config.nsp or weights.has_pooler)
    config = config.model_copy(update={"nsp": has_nsp})
    build = partial(BertForPreTraining, config)
    if weights.has_mlm_head:
        model, unused = build_with_weights(build, weights)
        new_weights: tuple[str, ...] = ()
    else:
        model, unused = build_with_weights(build, weights, optional=_MLM_WEIGHTS)
        _initialize_mlm_head(model)
        new_weights = _MLM_WEIGHTS
    reject_pairs(model.bert, directory)
    new_weights += tuple(name for name in list_untrained_weights(info) if name not in new_weights)
    return PretrainedBundle(
        model.to(device).eval(),
        tokenizer,
        config,
        directory,
        info,
        new_weights,
        unused,
    )


@torch.no_grad()
def _initialize_mlm_head(model: BertForPreTraining) -> None:
    """Initialize the masked-LM head, except its decoder weight, which is the word embeddings."""
    for module in (model.mlm.transform, model.mlm.norm):
        initialize_weights(module, model.config.init_range)
    model.mlm.decoder.bias.zero_()


def describe_unused_rows(directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Return a list with one message about unused rows of the word embeddings, or an empty list."""
    num_unused = config.vocab_size - tokenizer.vocab_size
    if not num_unused:
        return []
    message = (
        f"{directory}: {tokenizer.vocab_size:,} tokens, {config.vocab_size:,} word embeddings; "
        f"{num_unused:,} are unused"
    )
    return [message]
