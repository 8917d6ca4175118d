"""Tokenize texts, and check and truncate token ids that clients send instead of texts."""

from collections.abc import Sequence
from typing import Any

from bertsmith.errors import InputError
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import Embedder
from bertsmith.use.token_vectors import TokenizedTexts
from bertsmith.use.vector_settings import TruncationSide


def list_inputs(value: Any) -> list[Any]:
    """Return texts, or lists of token ids, from the value of a field ``TextsOrTokenIds``."""
    inputs: list[Any] = value if isinstance(value, list) else [value]
    return [inputs] if isinstance(inputs[0], int) else inputs


def tokenize_inputs(
    embedder: Embedder,
    inputs: Sequence[str] | Sequence[list[int]],
    truncation_side: TruncationSide,
    prompt_name: str | None,
) -> TokenizedTexts:
    """Return the token ids of texts, truncated to the model's maximum length.

    Args:
        embedder: the model.
        inputs: texts, or token ids from [CLS] to [SEP], as the model's own tokenizer returns them.
            Ids of another tokenizer would give wrong vectors; they have other ids at the ends.
        truncation_side: side on which texts are truncated.
        prompt_name: name of the prompt to add to texts; see ``Embedder.with_prompt``.

    Raises:
        InputError: the model declares no such prompt; or token ids do not start with [CLS] and end
            with [SEP], are not in the vocabulary, or have a prompt.
    """
    embedder = embedder.with_prompt(prompt_name)
    token_ids = [ids for ids in inputs if not isinstance(ids, str)]
    if not token_ids:
        texts = [text for text in inputs if isinstance(text, str)]
        return embedder.tokenize(texts, truncation_side)
    if prompt_name is not None:
        raise InputError("prompt_name has no effect on token ids; send texts, or leave it out")
    tokenizer = embedder.tokenizer
    num_truncated = 0
    truncated = []
    for number, ids in enumerate(token_ids, 1):
        if len(ids) < 2 or (ids[0], ids[-1]) != (tokenizer.cls_id, tokenizer.sep_id):
            raise InputError(
                f"input {number}: token ids must be those of the model's own tokenizer, from [CLS] "
                f"({tokenizer.cls_id}) to [SEP] ({tokenizer.sep_id}); send texts instead "
                "(LangChain: set check_embedding_ctx_length=False)"
            )
        check_vocabulary(tokenizer, ids, number)
        num_truncated += len(ids) > embedder.max_seqlen
        truncated.append(embedder.build_sequence(ids[1:-1], truncation_side))
    return TokenizedTexts(truncated, num_truncated)


def check_vocabulary(tokenizer: Tokenizer, ids: Sequence[int], number: int) -> None:
    """Raise InputError if an id of input ``number`` is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        raise InputError(
            f"input {number}: a token id is not in the vocabulary; expected 0 to "
            f"{tokenizer.vocab_size - 1:,}"
        )
