"""Predict the words at the [MASK] tokens of texts."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.text.mask import MASK_TOKEN, check_mask, shorten_text
from bertsmith.use.inputs import chunked
from bertsmith.use.masked_lm import (
    MaskedSequence,
    TopTokens,
    get_max_text_tokens,
    predict_masked_tokens,
)
from bertsmith.use.model_setup import ModelOrPath, resolve_model

#: Number of texts encoded together, so that sequences of similar length can share a batch.
_CHUNK_SIZE = 256

#: The type of ``predict_top_tokens``, and of the function with which the server batches the
#: requests of several clients.
TopTokenPredictor = Callable[
    [PretrainedBundle, Sequence[int], Callable[[int], MaskedSequence], int],
    Iterator[tuple[Sequence[tuple[int, int]], TopTokens]],
]


@dataclass(frozen=True)
class Filling:
    """Predictions for one "[MASK]" in a text.

    Attributes:
        start: Index of the first character of "[MASK]" in the text.
        predictions: Pairs (token, probability), most probable first. Tokens that continue a word
            start with "##".
    """

    start: int
    predictions: list[tuple[str, float]]


@overload
def fill(model: ModelOrPath, text: str, top: int = 5, *, fast: bool = False) -> list[Filling]: ...


@overload
def fill(
    model: ModelOrPath, text: list[str], top: int = 5, *, fast: bool = False
) -> list[list[Filling]]: ...


def fill(
    model: ModelOrPath, text: str | list[str], top: int = 5, *, fast: bool = False
) -> list[Filling] | list[list[Filling]]:
    """Return the ``top`` most probable tokens for each "[MASK]" in a text, from left to right.

    For a list of texts, a list with the result for each text is returned.

    Each [MASK] token is predicted independently, while the others remain masked. The most probable
    words of several masks may therefore not fit together. Special tokens in the text are
    recognized: "A [SEP] B" is encoded as a pair of texts.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        text: A text with at least one "[MASK]", or a list of such texts.
        top: Number of predictions per mask.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Raises:
        InputError: A text has no "[MASK]", or is longer than the model's maximum.
    """
    texts = [text] if isinstance(text, str) else text
    results = list(iter_fillings(resolve_model(model, fast=fast), texts, top))
    return results[0] if isinstance(text, str) else results


def predict_top_tokens(
    bundle: PretrainedBundle,
    lengths: Sequence[int],
    get_sequence: Callable[[int], MaskedSequence],
    top: int,
) -> Iterator[tuple[Sequence[tuple[int, int]], TopTokens]]:
    """Predict the ``top`` most probable tokens; see ``predict_masked_tokens``.

    Yields:
        The rows of ``MaskedPredictions``, and the tokens of these rows.
    """
    for predictions in predict_masked_tokens(bundle, lengths, get_sequence):
        yield predictions.rows, predictions.select_top(top)


def iter_fillings(
    model: ModelOrPath,
    texts: Iterable[str],
    top: int = 5,
    predict: TopTokenPredictor = predict_top_tokens,
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[list[Filling]]:
    """Yield the predictions of ``fill`` for each text, in input order, computed in batches.

    Args:
        model: As for ``fill``.
        texts: The texts. Error messages contain the number of the text, from 1.
        top: Number of predictions per mask.
        predict: Predicts the tokens at the [MASK] tokens.
        chunk_size: Number of texts encoded together.

    Raises:
        InputError: A text has no "[MASK]", or is longer than the model's maximum. The predictions
            for the texts before it have been yielded.
    """
    if top < 1:
        raise InputError(f"top is {top}; expected at least one word per mask")
    bundle = resolve_model(model)
    first_number = 1
    for chunk in chunked(texts, chunk_size):
        encoded = bundle.tokenizer.encode_batch(chunk, allow_special=True)
        numbered_texts = enumerate(zip(chunk, encoded, strict=True), first_number)
        all_sequences = (
            _build_masked_sequence(bundle, text, ids, number)
            for number, (text, ids) in numbered_texts
        )
        # If a text is invalid, the texts before it are filled before the error is raised.
        for sequences in chunked(all_sequences, len(chunk)):
            yield from _fill_sequences(bundle, chunk[: len(sequences)], sequences, top, predict)
        first_number += len(chunk)


def _build_masked_sequence(
    bundle: PretrainedBundle, text: str, ids: list[int], number: int
) -> MaskedSequence:
    """Add [CLS] and [SEP] to the ids of a text, and find its [MASK] tokens.

    Raises:
        InputError: There is no [MASK] token, or there are too many tokens.
    """
    tokenizer = bundle.tokenizer
    check_mask(tokenizer, text, ids, number)
    if len(ids) > get_max_text_tokens(bundle):
        raise InputError(
            f"text {number}: {len(ids):,} tokens, but this model takes at most "
            f"{get_max_text_tokens(bundle):,}: {shorten_text(text)!r}; shorten it"
        )
    sequence = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    masked_positions = [
        position for position, token_id in enumerate(sequence) if token_id == tokenizer.mask_id
    ]
    return MaskedSequence(sequence, _build_segment_ids(bundle, sequence), masked_positions)


def _build_segment_ids(bundle: PretrainedBundle, ids: list[int]) -> list[int]:
    """Return segment id 0 up to the first [SEP] and 1 after it, as in pre-training on pairs.

    A model that was not pre-trained on pairs gets segment id 0 for all tokens, because its
    embedding of segment 1 is untrained.
    """
    if not bundle.config.nsp:
        return [0] * len(ids)
    first_length = ids.index(bundle.tokenizer.sep_id) + 1
    return [0] * first_length + [1] * (len(ids) - first_length)


def _fill_sequences(
    bundle: PretrainedBundle,
    texts: list[str],
    sequences: list[MaskedSequence],
    top: int,
    predict: TopTokenPredictor,
) -> Iterator[list[Filling]]:
    """Yield the predictions for each text of a chunk."""
    # The keys are pairs (index of the text, index of the mask in the text).
    predictions: dict[tuple[int, int], list[tuple[str, float]]] = {}
    top = min(top, bundle.tokenizer.vocab_size)
    lengths = [len(sequence.ids) for sequence in sequences]
    for rows, top_tokens in predict(bundle, lengths, sequences.__getitem__, top):
        probabilities = top_tokens.log_probabilities.exp().tolist()
        token_ids = top_tokens.token_ids.tolist()
        for row, row_probabilities, ids in zip(rows, probabilities, token_ids, strict=True):
            tokens = bundle.tokenizer.ids_to_tokens(ids)
            predictions[row] = list(zip(tokens, row_probabilities, strict=True))
    for text_index, (text, sequence) in enumerate(zip(texts, sequences, strict=True)):
        starts = [match.start() for match in re.finditer(re.escape(MASK_TOKEN), text)]
        # Only the characters "[MASK]" become a [MASK] token, so there is a token for each match.
        assert len(starts) == len(sequence.masked_positions)
        yield [
            Filling(start, predictions[text_index, mask_index])
            for mask_index, start in enumerate(starts)
        ]
