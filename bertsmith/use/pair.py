"""Predict with the next-sentence head whether one text follows another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError, ModelError
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.tasks.text_pairs import add_special_tokens
from bertsmith.use.inputs import chunked
from bertsmith.use.masked_lm import pack_on_device
from bertsmith.use.model_setup import ModelOrPath, resolve_model

#: Token ids and segment ids of a sequence [CLS] A [SEP] B [SEP].
EncodedPair = tuple[list[int], list[int]]
#: The type of ``compute_next_sentence_probabilities``, and of the function with which the server
#: batches the requests of several clients.
ComputeProbabilities = Callable[[PretrainedBundle, Sequence[EncodedPair]], list[float]]
#: Number of pairs encoded together, so that sequences of similar length can share a batch.
_CHUNK_SIZE = 256


@dataclass(frozen=True)
class NextSentencePrediction:
    """Prediction for one pair of texts A and B.

    Attributes:
        next_sentence_probability: Probability that B follows A.
        num_removed_tokens: Number of tokens that truncation removed from the pair.
    """

    next_sentence_probability: float
    num_removed_tokens: int


def pair(model: ModelOrPath, a: str, b: str, *, fast: bool = False) -> float:
    """Return the probability that the text ``b`` follows the text ``a``.

    This is the probability of label 0 of the next-sentence head. Pairs longer than the model's
    maximum lose tokens at the beginning of A and at the end of B; see ``truncate_pair``. Special
    tokens in the texts, such as "[SEP]", are read as plain text.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        a: The first text.
        b: The second text.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Raises:
        ModelError: The model has no next-sentence head, or it was trained on sentence order.
        InputError: A text is empty.
    """
    bundle = resolve_model(model, fast=fast)
    return next(iter_pair_predictions(bundle, [(a, b)])).next_sentence_probability


def iter_pair_predictions(
    model: ModelOrPath,
    pairs: Iterable[tuple[str, str]],
    compute: ComputeProbabilities | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[NextSentencePrediction]:
    """Yield a prediction for each pair (A, B), in input order, computed in batches.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        pairs: The pairs. Error messages contain the number of the pair, from 1.
        compute: Computes the probabilities; by default ``compute_next_sentence_probabilities``.
        chunk_size: Number of pairs encoded together.
    """
    bundle = resolve_model(model)
    check_predicts_next_sentence(bundle)
    number = 0
    for chunk in chunked(pairs, chunk_size):
        encoded_a = bundle.tokenizer.encode_batch([a for a, _ in chunk])
        encoded_b = bundle.tokenizer.encode_batch([b for _, b in chunk])
        encoded = list(zip(encoded_a, encoded_b, strict=True))
        for ids in encoded:
            number += 1
            _check_not_empty(ids, number)
        yield from _predict_pairs(bundle, encoded, compute or compute_next_sentence_probabilities)


def check_predicts_next_sentence(bundle: PretrainedBundle) -> None:
    """Raise ModelError unless the model has a head that is trained on next-sentence prediction."""
    if not bundle.config.nsp:
        raise ModelError(
            f"{bundle.path}: this model has no next-sentence head: it was fine-tuned, or trained "
            "without next-sentence prediction; use a model that was pre-trained with "
            "`--set data.nsp=true` or `--recipe paper`"
        )
    settings = bundle.info.get("provenance", {}).get("settings", {})
    if settings.get("data", {}).get("pair_objective") == "sop":
        raise ModelError(
            f"{bundle.path}: this model was trained on sentence order: it predicts whether two "
            "consecutive texts are swapped, not whether B follows A; use a model trained with "
            "data.pair_objective=nsp"
        )
    bundle.require_head("nsp.")


def truncate_pair(
    a: Sequence[int], b: Sequence[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """Truncate two lists of token ids so that together they have at most ``max_tokens``.

    The result equals removing tokens one by one, from the start of A if A is longer than B, else
    from the end of B.
    """
    length_a, length_b = len(a), len(b)
    if length_a + length_b > max_tokens:
        half = max_tokens // 2
        # A list shorter than half of max_tokens is not truncated. If both are longer, each gets
        # half, and A gets one more token if max_tokens is odd.
        length_a = max(min(length_a, max_tokens - half), max_tokens - length_b)
        length_b = max_tokens - length_a
    return list(a[len(a) - length_a :]), list(b[:length_b])


def _check_not_empty(ids: tuple[Sequence[int], Sequence[int]], number: int) -> None:
    """Raise InputError if a text of the pair with this number has no tokens."""
    for name, text_ids in zip("AB", ids, strict=True):
        if not text_ids:
            raise InputError(
                f"pair {number}: text {name} is empty; expected at least one word in both texts"
            )


def _predict_pairs(
    bundle: PretrainedBundle,
    encoded: list[tuple[list[int], list[int]]],
    compute: ComputeProbabilities,
) -> Iterator[NextSentencePrediction]:
    """Yield the predictions for the pairs of a chunk, given the token ids of their texts."""
    max_tokens = bundle.config.max_positions - 3  # [CLS] and two [SEP] tokens
    truncated = [truncate_pair(a, b, max_tokens) for a, b in encoded]
    sequences = [add_special_tokens(texts, bundle.tokenizer) for texts in truncated]
    probabilities = compute(bundle, sequences)
    for texts, truncated_texts, probability in zip(encoded, truncated, probabilities, strict=True):
        num_removed_tokens = sum(map(len, texts)) - sum(map(len, truncated_texts))
        yield NextSentencePrediction(probability, num_removed_tokens)


def compute_next_sentence_probabilities(
    bundle: PretrainedBundle, sequences: Sequence[EncodedPair]
) -> list[float]:
    """Return the probability of label 0 ("B follows A") for each sequence, in input order."""
    probabilities = [0.0] * len(sequences)
    for indices in batch_by_length([len(ids) for ids, _ in sequences]):
        batch = [sequences[index] for index in indices]
        batch_probabilities = compute_batch_probabilities(bundle, batch)
        for index, probability in zip(indices, batch_probabilities, strict=True):
            probabilities[index] = probability
    return probabilities


@torch.inference_mode()
def compute_batch_probabilities(
    bundle: PretrainedBundle, sequences: Sequence[EncodedPair]
) -> list[float]:
    """Return the probability of label 0 for each sequence, computed as one batch."""
    batch = pack_on_device(bundle, sequences)
    logits: Tensor = bundle.model.compute_nsp_logits(bundle.model.bert(batch), batch)
    probabilities: list[float] = logits.float().softmax(-1)[:, 0].tolist()
    return probabilities
