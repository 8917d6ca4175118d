"""Tell how probable it is that one text follows another: the next-sentence head.

It never knows where the texts come from.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError, ModelError
from bertsmith.model.packed import batch_by_length
from bertsmith.use.masked_lm import ModelOrPath, chunked, pack_on_device, resolve_model

#: Word ids and segment ids of a sequence [CLS] A [SEP] B [SEP].
EncodedPair = tuple[list[int], list[int]]
#: What computes the answers: ``next_sentence_probabilities`` below, or a server that packs those of all its clients.
Compute = Callable[[PretrainedBundle, Sequence[EncodedPair]], list[float]]
#: Pairs worked on at once.
_WINDOW = 256


@dataclass(frozen=True)
class NextSentencePrediction:
    """follows: the probability that B follows A. left_out: tokens cut off to fit the model."""

    follows: float
    left_out: int


def pair(model: ModelOrPath, a: str, b: str) -> float:
    """Return the probability that the text ``b`` follows ``a`` (the head's label 0).

    A pair too long for the model loses tokens one by one from the longer text: A from its front,
    B from its end, so that the border between them stays. Both are plain text: "[SEP]" in them is
    no special token. Raises ModelError for a model without a next-sentence head, QuestionError
    for a text without a word.
    """
    return next(iter_pair_predictions(model, [(a, b)])).follows


def iter_pair_predictions(
    model: ModelOrPath, pairs: Iterable[tuple[str, str]], compute: Compute | None = None
) -> Iterator[NextSentencePrediction]:
    """Yield the answer for each pair (A, B), in their order, many pairs a batch.

    ``compute``: what computes the shares of sequences, ``next_sentence_probabilities`` unless it is given. An error
    names the pair by its number, from 1.
    """
    bundle = resolve_model(model)
    if not bundle.config.nsp:
        raise ModelError(
            f"{bundle.path}: this model has no next-sentence head (it was trained with nsp = "
            "false); give one that was trained on pairs, the default of `bertsmith pretrain`"
        )
    number = 0
    for window in chunked(pairs, _WINDOW):
        first = bundle.tokenizer.encode_batch([a for a, _ in window])
        second = bundle.tokenizer.encode_batch([b for _, b in window])
        encoded = list(zip(first, second, strict=True))
        for ids in encoded:
            number += 1
            _refuse_empty(ids, number)
        yield from _answered(bundle, encoded, compute or next_sentence_probabilities)


def truncate_pair(a: Sequence[int], b: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """Cut two lists of ids to ``room`` ids together: from the longer, A's front and B's end.

    Where both are equally long, B gives first.
    """
    keep_a, keep_b = len(a), len(b)
    if keep_a + keep_b > room:
        half = room // 2
        # What a short text does not need is the long one's; else A has the odd one.
        keep_a = max(min(keep_a, room - half), room - keep_b)
        keep_b = room - keep_a
    return list(a[len(a) - keep_a :]), list(b[:keep_b])


def _refuse_empty(ids: tuple[Sequence[int], Sequence[int]], number: int) -> None:
    for name, own in zip("AB", ids, strict=True):
        if not own:
            raise InputError(
                f"pair {number}: text {name} is empty; expected at least one word in both"
            )


def _answered(
    bundle: PretrainedBundle, encoded: list[tuple[list[int], list[int]]], compute: Compute
) -> Iterator[NextSentencePrediction]:
    tokenizer = bundle.tokenizer
    sequences, left_out = [], []
    for a, b in encoded:
        # [CLS] A [SEP] B [SEP]
        kept_a, kept_b = truncate_pair(a, b, bundle.config.max_positions - 3)
        ids = [tokenizer.cls_id, *kept_a, tokenizer.sep_id, *kept_b, tokenizer.sep_id]
        sequences.append((ids, [0] * (len(kept_a) + 2) + [1] * (len(kept_b) + 1)))
        left_out.append(len(a) + len(b) - len(kept_a) - len(kept_b))
    for share, lost in zip(compute(bundle, sequences), left_out, strict=True):
        yield NextSentencePrediction(share, lost)


def next_sentence_probabilities(
    bundle: PretrainedBundle, sequences: Sequence[EncodedPair]
) -> list[float]:
    """Return the probability of label 0 for each sequence, in their order."""
    found = [0.0] * len(sequences)
    for group in batch_by_length([len(ids) for ids, _ in sequences]):
        shares = _shares(bundle, [sequences[number] for number in group]).tolist()
        for number, share in zip(group, shares, strict=True):
            found[number] = share
    return found


@torch.inference_mode()
def _shares(bundle: PretrainedBundle, sequences: list[EncodedPair]) -> Tensor:
    """Return the probability of label 0 for each sequence, float32 [B]."""
    packed = pack_on_device(bundle, sequences)
    logits = bundle.model.next_sentence_logits(bundle.model.bert(packed), packed)
    return logits.float().softmax(-1)[:, 0]
