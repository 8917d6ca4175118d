"""Extending a model's vocabulary: each new token's weights are the mean of its old subtokens'."""

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

#: Weights with one row or entry per vocabulary entry. The decoder shares the embedding weight.
_VOCABULARY_WEIGHTS = ("bert.embeddings.words.weight", "mlm.decoder.weight", "mlm.decoder.bias")
#: The key of bertsmith.json that lists the extensions.
EXTENSIONS_KEY = "vocab_extensions"


def extend_vocabulary(
    bundle: PretrainedBundle | FineTunedBundle,
    extension: VocabularyExtension,
    source: str = "",
) -> PretrainedBundle | FineTunedBundle:
    """Return a copy of the model with an extended vocabulary, on the CPU.

    Embedding rows beyond the old vocabulary are used first. All other weights are unchanged.

    Args:
        bundle: The model to extend.
        extension: The new tokenizer and the old subtokens of each new token.
        source: Where the new words come from, recorded in bertsmith.json.

    Raises:
        ModelError: The extension was made for another tokenizer.
    """
    num_words = len(extension.words)
    if bundle.tokenizer.vocab != extension.tokenizer.vocab[: extension.first_id]:
        raise ModelError(f"{bundle.path}: the words to add were chosen for another vocabulary")
    size = max(bundle.config.vocab_size, extension.tokenizer.vocab_size)
    config = ModelConfig.parse(bundle.config.model_dump() | {"vocab_size": size}, str(bundle.path))
    state = {
        name: _extend_rows(value.cpu(), extension, size) if name in _VOCABULARY_WEIGHTS else value
        for name, value in bundle.model.state_dict().items()
    }
    record = {"num_words": num_words, "first_id": extension.first_id, "source": source}
    info: dict[str, Any] = {
        **bundle.info,
        EXTENSIONS_KEY: [*bundle.info.get(EXTENSIONS_KEY, []), record],
    }
    changes: dict[str, Any] = {"tokenizer": extension.tokenizer, "config": config, "info": info}
    model: Any
    if isinstance(bundle, FineTunedBundle):
        old_model = bundle.model
        features = old_model.features if isinstance(old_model, BertWithBiLSTM) else None
        model = bundle.head.build_model(config, features)
    else:
        model = BertForPreTraining(config)
    model.load_state_dict(state)
    return replace(bundle, model=model.eval(), **changes)


def _extend_rows(rows: Tensor, extension: VocabularyExtension, size: int) -> Tensor:
    """Extend [V, ...] to [size, ...]; new rows are means over the rows of their subtokens."""
    extended = torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
    for token_id, subtoken_ids in enumerate(extension.piece_ids, extension.first_id):
        extended[token_id] = rows[_to_index_tensor(subtoken_ids)].mean(0)
    return extended


def _to_index_tensor(token_ids: Sequence[int]) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)
