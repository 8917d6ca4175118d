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

from bertsmith.bundle import Bundle, Kind, TaskBundle, load, load_task
from bertsmith.errors import BertsmithError, ModelError, QuestionError
from bertsmith.model.packed import Packed, groups, pack

#: A model as callers give it: loaded, or the path of a model directory or a RUN.
Model = Bundle | Path | str

#: Floats of log-probabilities at once (16 MB), so that memory does not grow with the vocabulary.
CHUNK_FLOATS = 2**22

Item = TypeVar("Item")


@dataclass(frozen=True)
class Question:
    """One sequence and the places in it where words are asked for.

    ids, segments: the whole sequence, [CLS] and [SEP] with it. places: indices into ``ids``.
    """

    ids: Sequence[int]
    segments: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class Answers:
    """What the model says at R places.

    rows: (number of the question, which of its places), R of them.
    log_probabilities: float32 [R, V], natural logarithms, over the tokenizer's words.
    """

    rows: Sequence[tuple[int, int]]
    log_probabilities: Tensor


#: What answers questions: ``ask`` below, or a server that packs those of all its clients together.
Asking = Callable[[Bundle, Sequence[int], Callable[[int], Question]], Iterator[Answers]]


def opened(model: Model) -> Bundle:
    """Return ``model`` itself if it is loaded, else load it, on the CPU."""
    return model if isinstance(model, Bundle) else load(model)


def refuse_lone(texts: object) -> None:
    """Raise QuestionError for a text where several are expected: its characters are not meant."""
    if isinstance(texts, str):
        raise QuestionError(f"expected a list of texts, not one: put {texts[:40]!r} into [ ]")


def opened_task(model: TaskBundle | Path | str, *kinds: Kind) -> TaskBundle:
    """Return a fine-tuned model itself if it is loaded, else load it, on the CPU.

    Raises ModelError if it is of none of ``kinds``.
    """
    if not isinstance(model, TaskBundle | Path | str):
        raise ModelError(
            f"{type(model).__name__}: not a fine-tuned model; give the path of its directory or RUN"
        )
    bundle = model if isinstance(model, TaskBundle) else load_task(model)
    if bundle.head.kind not in kinds:
        raise ModelError(
            f"{bundle.path}: this model is of the kind {bundle.head.kind!r}; expected "
            f"{' or '.join(map(repr, kinds))}; `bertsmith predict` asks a model of any kind"
        )
    return bundle


def longest(bundle: Bundle) -> int:
    """Return how many tokens of text one sequence holds, beside [CLS] and [SEP]."""
    return bundle.config.max_positions - 2


def windows(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
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


def on_device(bundle: Bundle, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Packed:
    """Pack (ids, segments) of each sequence and put them where the model is."""
    return pack(sequences).to(next(bundle.model.parameters()).device)


def ask(
    bundle: Bundle, lengths: Sequence[int], question: Callable[[int], Question]
) -> Iterator[Answers]:
    """Yield the answers to questions, batch by batch, in the order of the computation.

    lengths: the tokens of each question. question: gives one by its number, when its batch comes,
    so that thousands of masked copies of a line never stand in memory together. Only the places
    asked about go through the masked-LM head. Raises ModelError for a model without one.
    """
    bundle.require_masked_lm()
    step = max(CHUNK_FLOATS // bundle.config.vocab_size, 1)
    for group in groups(lengths):
        batch = [question(number) for number in group]
        rows = [
            (number, which)
            for number, own in zip(group, batch, strict=True)
            for which in range(len(own.places))
        ]
        hidden = _hidden(bundle, batch)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            yield Answers(rows[part], _log_probabilities(bundle, hidden[part]))


@torch.inference_mode()
def _hidden(bundle: Bundle, batch: Sequence[Question]) -> Tensor:
    """Return the hidden states at all places of a batch, [R, D]."""
    packed = on_device(bundle, [(question.ids, question.segments) for question in batch])
    starts = packed.starts.tolist()
    places = [
        start + place
        for start, question in zip(starts, batch, strict=True)
        for place in question.places
    ]
    hidden: Tensor = bundle.model.bert(packed)
    return hidden.index_select(0, torch.tensor(places, device=hidden.device))


@torch.inference_mode()
def _log_probabilities(bundle: Bundle, hidden: Tensor) -> Tensor:
    """[R, D] -> [R, V] of the tokenizer: rows that a model has beyond its words are no words."""
    logits: Tensor = bundle.model.mlm(hidden)
    return logits[:, : bundle.tokenizer.vocab_size].float().log_softmax(-1)
