"""Encoding one or two texts as [CLS] A [SEP] or [CLS] A [SEP] B [SEP]."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bertsmith.tasks.inputs import TokenSequence
from bertsmith.text.wordpiece import Tokenizer

#: Characters of the texts that are encoded together. Encoding needs 113 bytes per character of
#: English prose and up to 560 bytes per character of punctuation.
_CHUNK_CHARACTERS: Final = 2**22


def iter_encoded_texts(
    tokenizer: Tokenizer, examples: Iterable[Sequence[str]]
) -> Iterator[list[list[int]]]:
    """Yield the token ids of the texts of each example.

    Texts are encoded in chunks, so that the memory for long texts does not depend on their number
    if the caller truncates them.
    """
    chunk: list[Sequence[str]] = []
    num_characters = 0
    for texts in examples:
        chunk.append(texts)
        num_characters += sum(map(len, texts))
        if num_characters >= _CHUNK_CHARACTERS:
            yield from _encode_chunk(tokenizer, chunk)
            chunk, num_characters = [], 0
    if chunk:
        yield from _encode_chunk(tokenizer, chunk)


def _encode_chunk(
    tokenizer: Tokenizer, examples: Sequence[Sequence[str]]
) -> Iterator[list[list[int]]]:
    encoded = iter(tokenizer.encode_batch([text for texts in examples for text in texts]))
    for texts in examples:
        yield [next(encoded) for _ in texts]


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
