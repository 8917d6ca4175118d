"""Extension of a model's vocabulary.

The embedding of a new token is the mean of the embeddings of the subtokens into which the old
vocabulary splits the token.
"""

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

#: Names of weights with a row or an element for each token of the vocabulary.
_VOCABULARY_WEIGHTS = ("bert.embeddings.words.weight", "mlm.decoder.weight", "mlm.decoder.bias")
#: The key of bertsmith.json that lists the extensions.
EXTENSIONS_KEY = "vocab_extensions"


def extend_vocabulary(
    bundle: PretrainedBundle | FineTunedBundle,
    extension: VocabularyExtension,
    source: str = "",
) -> PretrainedBundle | FineTunedBundle:
    """Return a copy of a model on the CPU, with an extended vocabulary.

    New tokens get the unused rows of the word embeddings first, and then new rows. All other
    weights are unchanged.

    Args:
        bundle: The model to extend.
        extension: The new tokenizer and the old subtokens of each new token.
        source: File or corpus of the new words, which is recorded in bertsmith.json.

    Raises:
        ModelError: The extension belongs to another tokenizer.
    """
    if bundle.tokenizer.vocab != extension.tokenizer.vocab[: extension.first_id]:
        raise ModelError(
            f"{bundle.path}: the words to add were chosen for another vocabulary; choose them with "
            "this model's tokenizer"
        )
    vocab_size = max(bundle.config.vocab_size, extension.tokenizer.vocab_size)
    config = ModelConfig.parse(
        bundle.config.model_dump() | {"vocab_size": vocab_size}, str(bundle.path)
    )
    state = bundle.model.state_dict()
    for name in _VOCABULARY_WEIGHTS:
        if name in state:
            state[name] = _extend_rows(state[name].cpu(), extension, vocab_size)
    model = _build_model(bundle, config)
    model.load_state_dict(state)
    record = {"num_words": len(extension.words), "first_id": extension.first_id, "source": source}
    info: dict[str, Any] = {
        **bundle.info,
        EXTENSIONS_KEY: [*bundle.info.get(EXTENSIONS_KEY, []), record],
    }
    tokenizer: Any = extension.tokenizer
    return replace(bundle, model=model.eval(), tokenizer=tokenizer, config=config, info=info)


def _build_model(bundle: PretrainedBundle | FineTunedBundle, config: ModelConfig) -> Any:
    """Build a randomly initialized model with the heads of a bundle and another config."""
    if isinstance(bundle, PretrainedBundle):
        return BertForPreTraining(config)
    features = bundle.model.features if isinstance(bundle.model, BertWithBiLSTM) else None
    return bundle.head.build_model(config, features)


def _extend_rows(rows: Tensor, extension: VocabularyExtension, vocab_size: int) -> Tensor:
    """Append unused rows and fill the rows of the new tokens: [V, ...] -> [vocab_size, ...].

    The row of a new token becomes the mean of the rows of its subtokens.
    """
    num_new_rows = vocab_size - len(rows)
    extended = torch.cat([rows, rows.new_zeros(num_new_rows, *rows.shape[1:])])
    for token_id, subtoken_ids in enumerate(extension.piece_ids, start=extension.first_id):
        extended[token_id] = rows[torch.tensor(subtoken_ids, dtype=torch.int64)].mean(0)
    return extended
