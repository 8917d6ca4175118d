"""Fill in the masks of a text: the words that a model expects there, with their probabilities.

It never knows how the words are shown.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.use.masked_lm import (
    MaskedSequence,
    MaskedTokenPredictor,
    ModelOrPath,
    chunked,
    max_text_tokens,
    predict_masked_tokens,
    resolve_model,
)

MASK_TOKEN = "[MASK]"
#: Texts worked on at once.
_WINDOW = 256


@dataclass(frozen=True)
class Filling:
    """What a model expects at one [MASK] of a text.

    place: where the mask begins in the text, in characters. words: (word, probability), the most
    probable first; a piece that continues a word begins with "##".
    """

    place: int
    words: list[tuple[str, float]]


def fill(model: ModelOrPath, text: str, top: int = 5) -> list[Filling]:
    """Return the ``top`` most probable words for each [MASK] of a text, from left to right.

    Each mask is predicted by itself, with the other masks standing: with several, the best words
    need not fit together. Special tokens written in the text are read as such, so "A [SEP] B" is
    a pair of segments. Raises QuestionError for a text without a mask or longer than the model.
    """
    return next(iter_fillings(model, [text], top))


def iter_fillings(
    model: ModelOrPath,
    texts: Iterable[str],
    top: int = 5,
    predict: MaskedTokenPredictor = predict_masked_tokens,
) -> Iterator[list[Filling]]:
    """Yield what ``fill`` returns for each text, in their order, many texts a batch.

    ``predict``: what computes the answers. An error names the text by its number, from 1.
    """
    if top < 1:
        raise InputError(f"top is {top}: ask for at least one word a mask")
    bundle = resolve_model(model)
    number = 0
    for window in chunked(texts, _WINDOW):
        encoded = bundle.tokenizer.encode_batch(window, allow_special=True)
        questions = []
        for text, ids in zip(window, encoded, strict=True):
            number += 1
            questions.append(_question(bundle, text, ids, number))
        yield from _filled(bundle, window, questions, top, predict)


def _question(bundle: PretrainedBundle, text: str, ids: list[int], number: int) -> MaskedSequence:
    tokenizer = bundle.tokenizer
    if tokenizer.mask_id not in ids:
        near = re.search(re.escape(MASK_TOKEN), text, re.IGNORECASE)
        found = f", but {near[0]}: write it in capitals" if near else ""
        raise InputError(
            f"text {number}: no {MASK_TOKEN} in {_short(text)!r}{found}; "
            f"put {MASK_TOKEN} where a word shall be filled in"
        )
    if len(ids) > max_text_tokens(bundle):
        raise InputError(
            f"text {number}: {len(ids):,} tokens, but this model takes at most "
            f"{max_text_tokens(bundle):,}: {_short(text)!r}; shorten it"
        )
    whole = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    places = [place for place, word in enumerate(whole) if word == tokenizer.mask_id]
    return MaskedSequence(whole, _segments(bundle, whole), places)


def _segments(bundle: PretrainedBundle, ids: list[int]) -> list[int]:
    """Return 0 up to the first [SEP] and 1 after it, as in pre-training on pairs.

    A model that was trained without pairs never saw a 1.
    """
    if not bundle.config.nsp:
        return [0] * len(ids)
    first = ids.index(bundle.tokenizer.sep_id) + 1
    return [0] * first + [1] * (len(ids) - first)


def _filled(
    bundle: PretrainedBundle,
    texts: list[str],
    questions: list[MaskedSequence],
    top: int,
    asking: MaskedTokenPredictor,
) -> Iterator[list[Filling]]:
    found: dict[tuple[int, int], list[tuple[str, float]]] = {}
    top = min(top, bundle.tokenizer.vocab_size)
    lengths = [len(question.ids) for question in questions]
    for answers in asking(bundle, lengths, questions.__getitem__):
        best = answers.log_probabilities.topk(top)
        shares, words = best.values.exp().tolist(), best.indices.tolist()
        for row, own, ids in zip(answers.rows, shares, words, strict=True):
            found[row] = list(zip(bundle.tokenizer.ids_to_tokens(ids), own, strict=True))
    for number, (text, question) in enumerate(zip(texts, questions, strict=True)):
        marks = [mark.start() for mark in re.finditer(re.escape(MASK_TOKEN), text)]
        # Both count the same masks: only these characters become the mask's id.
        pairs = zip(marks, range(len(question.masked_positions)), strict=True)
        yield [Filling(place, found[number, which]) for place, which in pairs]


def _short(text: str) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
