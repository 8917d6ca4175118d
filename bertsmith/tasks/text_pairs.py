"""Encoding one or two texts as [CLS] A [SEP] or [CLS] A [SEP] B [SEP]."""

from collections.abc import Sequence

from bertsmith.tasks.inputs import TokenSequence
from bertsmith.text.wordpiece import Tokenizer


def add_special_tokens(texts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> TokenSequence:
    """Return token ids and segment ids of [CLS] A [SEP] or [CLS] A [SEP] B [SEP]."""
    token_ids, segment_ids = [tokenizer.cls_id], [0]
    for segment, text_ids in enumerate(texts):
        token_ids += [*text_ids, tokenizer.sep_id]
        segment_ids += [segment] * (len(text_ids) + 1)
    return token_ids, segment_ids


def truncate_texts(texts: Sequence[Sequence[int]], max_tokens: int) -> list[Sequence[int]]:
    """Truncate one or two tokenized texts at their ends to ``max_tokens`` in total.

    Like the strategy "longest_first" of ``tokenizers``, this removes tokens of the longer text
    first. If both texts are longer than half of ``max_tokens``, each gets half of the tokens.
    """
    if len(texts) == 1:
        return [texts[0][:max_tokens]]
    lengths = [len(text) for text in texts]
    if sum(lengths) > max_tokens:
        shorter = min(*lengths, max_tokens // 2)
        longer = max_tokens - shorter
        lengths = [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]
