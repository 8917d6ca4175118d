"""Ask a model's masked-LM head for words, many sequences at a time, in batches counted by tokens.

It never knows text, nor what an answer is used for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bertsmith.bundle import FineTunedBundle, PretrainedBundle, TaskKind, load, load_fine_tuned
from bertsmith.errors import BertsmithError, InputError, ModelError
from bertsmith.model.packed import PackedBatch, batch_by_length, pack_sequences

#: A model as callers give it: loaded, or the path of a model directory or a RUN.
ModelOrPath = PretrainedBundle | Path | str

#: Floats of log-probabilities at once (16 MB), so that memory does not grow with the vocabulary.
MAX_CHUNK_ELEMENTS = 2**22

Item = TypeVar("Item")


@dataclass(frozen=True)
class MaskedSequence:
    """One sequence and the places in it where words are asked for.

    ids, segments: the whole sequence, [CLS] and [SEP] with it. places: indices into ``ids``.
    """

    ids: Sequence[int]
    segments: Sequence[int]
    masked_positions: Sequence[int]


@dataclass(frozen=True)
class MaskedPredictions:
    """What the model says at R places.

    rows: (number of the question, which of its places), R of them.
    log_probabilities: float32 [R, V], natural logarithms, over the tokenizer's words.
    """

    rows: Sequence[tuple[int, int]]
    log_probabilities: Tensor


#: What answers questions: ``predict_masked_tokens`` below, or a server that packs those of all its clients together.
MaskedTokenPredictor = Callable[
    [PretrainedBundle, Sequence[int], Callable[[int], MaskedSequence]], Iterator[MaskedPredictions]
]


def resolve_model(model: ModelOrPath) -> PretrainedBundle:
    """Return ``model`` itself if it is loaded, else load it, on the CPU."""
    return model if isinstance(model, PretrainedBundle) else load(model)


def check_is_text_list(texts: object) -> None:
    """Raise QuestionError for a text where several are expected: its characters are not meant."""
    if isinstance(texts, str):
        raise InputError(f"expected a list of texts, not one: put {texts[:40]!r} into [ ]")


def resolve_task_model(model: FineTunedBundle | Path | str, *kinds: TaskKind) -> FineTunedBundle:
    """Return a fine-tuned model itself if it is loaded, else load it, on the CPU.

    Raises ModelError if it is of none of ``kinds``.
    """
    if not isinstance(model, FineTunedBundle | Path | str):
        raise ModelError(
            f"{type(model).__name__}: not a fine-tuned model; give the path of its directory or RUN"
        )
    bundle = model if isinstance(model, FineTunedBundle) else load_fine_tuned(model)
    if bundle.head.kind not in kinds:
        raise ModelError(
            f"{bundle.path}: this model is of the kind {bundle.head.kind!r}; expected "
            f"{' or '.join(map(repr, kinds))}; `bertsmith predict` asks a model of any kind"
        )
    return bundle


def max_text_tokens(bundle: PretrainedBundle) -> int:
    """Return how many tokens of text one sequence holds, beside [CLS] and [SEP]."""
    return bundle.config.max_positions - 2


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of up to ``size`` items, so that endless input is worked on piece by piece.

    A BertsmithError of the items themselves comes after the window of what stood before it.
    """
    rest = iter(items)
    fault: BertsmithError | None = None
    while fault is None:
        window: list[Item] = []
        try:
            # One by one: what was taken before an error is kept.
            for item in islice(rest, size):
                window.append(item)  # noqa: PERF402
        except BertsmithError as error:
            fault = error
        if window:
            yield window
        if len(window) < size and fault is None:
            return
    raise fault


def pack_on_device(
    bundle: PretrainedBundle, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> PackedBatch:
    """Pack (ids, segments) of each sequence and put them where the model is."""
    return pack_sequences(sequences).to(next(bundle.model.parameters()).device)


def predict_masked_tokens(
    bundle: PretrainedBundle, lengths: Sequence[int], question: Callable[[int], MaskedSequence]
) -> Iterator[MaskedPredictions]:
    """Yield the answers to questions, batch by batch, in the order of the computation.

    lengths: the tokens of each question. question: gives one by its number, when its batch comes,
    so that thousands of masked copies of a line never stand in memory together. Only the places
    asked about go through the masked-LM head. Raises ModelError for a model without one.
    """
    bundle.require_mlm_head()
    step = max(MAX_CHUNK_ELEMENTS // bundle.config.vocab_size, 1)
    for group in batch_by_length(lengths):
        batch = [question(number) for number in group]
        rows = [
            (number, which)
            for number, own in zip(group, batch, strict=True)
            for which in range(len(own.masked_positions))
        ]
        hidden = _hidden(bundle, batch)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            yield MaskedPredictions(rows[part], _log_probabilities(bundle, hidden[part]))


@torch.inference_mode()
def _hidden(bundle: PretrainedBundle, batch: Sequence[MaskedSequence]) -> Tensor:
    """Return the hidden states at all places of a batch, [R, D]."""
    packed = pack_on_device(bundle, [(question.ids, question.segments) for question in batch])
    starts = packed.first_token_indices.tolist()
    places = [
        start + place
        for start, question in zip(starts, batch, strict=True)
        for place in question.masked_positions
    ]
    hidden: Tensor = bundle.model.bert(packed)
    return hidden.index_select(0, torch.tensor(places, device=hidden.device))


@torch.inference_mode()
def _log_probabilities(bundle: PretrainedBundle, hidden: Tensor) -> Tensor:
    """[R, D] -> [R, V] of the tokenizer: rows that a model has beyond its words are no words."""
    logits: Tensor = bundle.model.mlm(hidden)
    return logits[:, : bundle.tokenizer.vocab_size].float().log_softmax(-1)
