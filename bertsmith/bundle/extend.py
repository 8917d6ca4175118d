"""Grows a model with its vocabulary: a row of weights for each new word, from its old pieces.

It never knows why a word was chosen, nor how the model is trained on.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bertsmith.bundle.fine_tuned import FineTunedBundle
from bertsmith.bundle.pretrained import PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.text.vocabulary_extension import VocabularyExtension

#: What has a row, or an entry, for each word. The decoder's weight is the first one itself.
_BY_WORD = ("bert.embeddings.words.weight", "mlm.decoder.weight", "mlm.decoder.bias")
#: Where bertsmith.json tells of extensions.
EXTENSIONS_KEY = "extended"


def extend_vocabulary(
    found: PretrainedBundle | FineTunedBundle, extension: VocabularyExtension, source: str = ""
) -> PretrainedBundle | FineTunedBundle:
    """Return the model with the extended vocabulary, on the CPU; all else in it stays as it is.

    source: where the words come from, for ``bertsmith.json``. A row that the model had beyond its
    tokenizer's words is taken first. Raises ModelError if the extension is another tokenizer's.
    """
    words = len(extension.words)
    if found.tokenizer.vocab != extension.tokenizer.vocab[: extension.first_id]:
        raise ModelError(f"{found.path}: the words to add were chosen for another vocabulary")
    size = max(found.config.vocab_size, extension.tokenizer.vocab_size)
    config = ModelConfig.parse(found.config.model_dump() | {"vocab_size": size}, str(found.path))
    state = {
        name: _grown(value.cpu(), extension, size) if name in _BY_WORD else value
        for name, value in found.model.state_dict().items()
    }
    told = {"words": words, "first": extension.first_id, "source": source}
    info: dict[str, Any] = {
        **found.info,
        EXTENSIONS_KEY: [*found.info.get(EXTENSIONS_KEY, []), told],
    }
    changes: dict[str, Any] = {"tokenizer": extension.tokenizer, "config": config, "info": info}
    model: Any
    if isinstance(found, FineTunedBundle):
        old = found.model
        model = found.head.build_model(
            config, old.features if isinstance(old, BertWithBiLSTM) else None
        )
    else:
        model = BertForPreTraining(config)
    model.load_state_dict(state)
    return replace(found, model=model.eval(), **changes)


def _grown(rows: Tensor, extension: VocabularyExtension, size: int) -> Tensor:
    """Return [size, ...] of [V, ...]: the row of a new word is the mean of those of its pieces."""
    result = torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
    for word, pieces in enumerate(extension.piece_ids, extension.first_id):
        result[word] = rows[_index(pieces)].mean(0)
    return result


def _index(pieces: Sequence[int]) -> Tensor:
    return torch.tensor(pieces, dtype=torch.int64)
