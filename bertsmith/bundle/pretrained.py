"""The model directory of a pre-trained model: written whole, read with every name checked.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.config import CONFIG, config_json
from bertsmith.bundle.directory import WEIGHTS, locate
from bertsmith.bundle.model_card import CARD, card
from bertsmith.bundle.parts import INFO, read_parts
from bertsmith.bundle.tensor_files import save_tensors
from bertsmith.bundle.weight_names import to_disk
from bertsmith.bundle.weights import built, open_weights, said
from bertsmith.errors import ModelError
from bertsmith.files import whole_directory, write_json, write_whole
from bertsmith.model.bert import PreTrainingModel, draw_weights
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
class Bundle:
    """A model directory in memory.

    info: what ``bertsmith.json`` says: recipe, provenance, and what config.json cannot hold.
    new: our names of the weights that the files lack; they are drawn anew, and know nothing.
    left_out: names in the files that this model has no place for.
    """

    model: PreTrainingModel
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def require_masked_lm(self) -> None:
        """Raise ModelError if the model cannot say a masked word: no head, or the next.

        Its head is that of a masked LM, and can be written as one.
        """
        settings = self.info.get("provenance", {}).get("settings", {})
        if settings.get("data", {}).get("objective") == "left-to-right":
            raise ModelError(
                f"{self.path}: this model was trained left to right: it says the next word, not a "
                "masked one; take one of data.objective=masked"
            )
        self.require("mlm.")

    def require(self, head: str) -> None:
        """Raise ModelError if the weights of a head ("mlm.", "nsp.") are not those of the files."""
        if any(name.startswith(head) for name in self.new):
            raise ModelError(
                f"{self.path}: this model has no {_HEADS[head]}, which this needs; "
                "`bertsmith pretrain --from` trains one, or take a model that has it"
            )

    def notes(self) -> list[str]:
        """Return what a user should know of the files: what is new, left out or unused."""
        notes = said(self.path, "drawn anew, since it is not there", self.new)
        notes += said(self.path, "left out, since the model has no place for it", self.left_out)
        return notes + spare_rows(self.path, self.config, self.tokenizer)


def save(
    directory: Path, model: PreTrainingModel, tokenizer: Tokenizer, info: Mapping[str, Any]
) -> None:
    """Write a model directory, whole or not at all; an older one is replaced at the end."""
    config = model.config
    with whole_directory(directory) as new:
        save_tensors(to_disk(model.state_dict()), new / WEIGHTS, metadata={"format": "pt"})
        write_json(new / CONFIG, config_json(config) | {"pad_token_id": tokenizer.pad_id})
        write_json(new / INFO, {**info, "positions": config.positions, "nsp": config.nsp})
        tokenizer.save(new, config.max_positions)
        write_whole(new / CARD, card(config, tokenizer, info))


def load(path: Path | str, *, device: torch.device | str = "cpu") -> Bundle:
    """Read a model ready for use (eval mode): a directory, a RUN, a file of it or a hub id.

    A BERT of any class does. A masked-LM head that is not there is drawn anew, and named in
    ``new``; without a next-sentence head the model has none. Raises ModelError if something is
    missing, broken or does not fit.
    """
    directory = locate(path)
    info, config, tokenizer = read_parts(directory)
    weights = open_weights(directory, config)
    # The weights say which heads there are: a config often speaks of the class it was saved for.
    pairs = weights.next_sentence and (config.nsp or weights.pooler)
    config = config.model_copy(update={"nsp": pairs})
    make = partial(PreTrainingModel, config)
    if weights.masked_lm:
        model, left_out = built(make, weights)
        new: tuple[str, ...] = ()
    else:
        model, left_out = built(make, weights, optional=_MASKED_LM)
        _draw_masked_lm(model)
        new = _MASKED_LM
    return Bundle(model.to(device).eval(), tokenizer, config, directory, info, new, left_out)


@torch.no_grad()
def _draw_masked_lm(model: PreTrainingModel) -> None:
    """Draw a masked-LM head anew; the decoder's weight is the word embeddings and stays."""
    for part in (model.mlm.transform, model.mlm.norm):
        draw_weights(part, model.config.init_range)
    model.mlm.decoder.bias.zero_()


def spare_rows(directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Return a note on word embeddings that no word has, none where every row has one."""
    spare = config.vocab_size - tokenizer.vocab_size
    if not spare:
        return []
    words, rows = tokenizer.vocab_size, config.vocab_size
    return [f"{directory}: {words:,} words, {rows:,} word embeddings; {spare:,} stand unused"]
