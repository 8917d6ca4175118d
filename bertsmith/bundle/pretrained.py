"""The model directory of a pre-trained model: written whole, read with every name checked.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.config import CONFIG_FILE, to_hf_config
from bertsmith.bundle.directory import WEIGHTS_FILE, locate_model
from bertsmith.bundle.metadata import INFO_FILE, read_metadata
from bertsmith.bundle.model_card import MODEL_CARD_FILE, build_model_card
from bertsmith.bundle.tensor_files import save_tensors
from bertsmith.bundle.weight_names import to_hf_state_dict
from bertsmith.bundle.weights import build_with_weights, describe_names, open_weights
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, write_atomic, write_json
from bertsmith.model.bert import BertForPreTraining, initialize_weights
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

#: What each of our heads is called in a message, by how its weights' names begin.
_HEADS = {"mlm.": "masked-LM head", "nsp.": "next-sentence head", "pooler.": "pooler"}

#: Our names of what a masked-LM head has for itself.
_MASKED_LM = (
    "mlm.transform.weight", "mlm.transform.bias", "mlm.norm.weight", "mlm.norm.bias",
    "mlm.decoder.bias",
)  # fmt: skip


@dataclass(frozen=True)
class PretrainedBundle:
    """A model directory in memory.

    info: what ``bertsmith.json`` says: recipe, provenance, and what config.json cannot hold.
    new_weights: our names of the weights that the files lack; they are drawn anew, and know nothing.
    unused_weights: names in the files that this model has no place for.
    """

    model: BertForPreTraining
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    new_weights: tuple[str, ...] = ()
    unused_weights: tuple[str, ...] = ()

    def require_mlm_head(self) -> None:
        """Raise ModelError if the model cannot say a masked word: no head, or the next.

        Its head is that of a masked LM, and can be written as one.
        """
        settings = self.info.get("provenance", {}).get("settings", {})
        if settings.get("data", {}).get("objective") == "left-to-right":
            raise ModelError(
                f"{self.path}: this model was trained left to right: it says the next word, not a "
                "masked one; take one of data.objective=masked"
            )
        self.require_head("mlm.")

    def require_head(self, head: str) -> None:
        """Raise ModelError if the weights of a head ("mlm.", "nsp.") are not those of the files."""
        if any(name.startswith(head) for name in self.new_weights):
            raise ModelError(
                f"{self.path}: this model has no {_HEADS[head]}, which this needs; "
                "`bertsmith pretrain --from` trains one, or take a model that has it"
            )

    def notes(self) -> list[str]:
        """Return what a user should know of the files: what is new, left out or unused."""
        notes = describe_names(self.path, "drawn anew, since it is not there", self.new_weights)
        notes += describe_names(
            self.path, "left out, since the model has no place for it", self.unused_weights
        )
        return notes + describe_unused_rows(self.path, self.config, self.tokenizer)


def save(
    directory: Path, model: BertForPreTraining, tokenizer: Tokenizer, info: Mapping[str, Any]
) -> None:
    """Write a model directory, whole or not at all; an older one is replaced at the end."""
    config = model.config
    with atomic_directory(directory) as new:
        save_tensors(
            to_hf_state_dict(model.state_dict()), new / WEIGHTS_FILE, metadata={"format": "pt"}
        )
        write_json(new / CONFIG_FILE, to_hf_config(config) | {"pad_token_id": tokenizer.pad_id})
        write_json(new / INFO_FILE, {**info, "positions": config.positions, "nsp": config.nsp})
        tokenizer.save(new, config.max_positions)
        write_atomic(new / MODEL_CARD_FILE, build_model_card(config, tokenizer, info))


def load(path: Path | str, *, device: torch.device | str = "cpu") -> PretrainedBundle:
    """Read a model ready for use (eval mode): a directory, a RUN, a file of it or a hub id.

    A BERT of any class does. A masked-LM head that is not there is drawn anew, and named in
    ``new``; without a next-sentence head the model has none. Raises ModelError if something is
    missing, broken or does not fit.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    weights = open_weights(directory, config)
    # The weights say which heads there are: a config often speaks of the class it was saved for.
    pairs = weights.has_nsp_head and (config.nsp or weights.has_pooler)
    config = config.model_copy(update={"nsp": pairs})
    make = partial(BertForPreTraining, config)
    if weights.has_mlm_head:
        model, left_out = build_with_weights(make, weights)
        new: tuple[str, ...] = ()
    else:
        model, left_out = build_with_weights(make, weights, optional=_MASKED_LM)
        _draw_masked_lm(model)
        new = _MASKED_LM
    return PretrainedBundle(
        model.to(device).eval(), tokenizer, config, directory, info, new, left_out
    )


@torch.no_grad()
def _draw_masked_lm(model: BertForPreTraining) -> None:
    """Draw a masked-LM head anew; the decoder's weight is the word embeddings and stays."""
    for part in (model.mlm.transform, model.mlm.norm):
        initialize_weights(part, model.config.init_range)
    model.mlm.decoder.bias.zero_()


def describe_unused_rows(directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Return a note on word embeddings that no word has, none where every row has one."""
    spare = config.vocab_size - tokenizer.vocab_size
    if not spare:
        return []
    words, rows = tokenizer.vocab_size, config.vocab_size
    return [f"{directory}: {words:,} words, {rows:,} word embeddings; {spare:,} stand unused"]
