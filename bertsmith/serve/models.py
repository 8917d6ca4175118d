"""One loaded model of a server: what it can do, and what it computes for many clients at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.bundle import Bundle, EncoderBundle, TaskBundle, load_either, load_encoder, locate
from bertsmith.bundle.any_model import is_bare
from bertsmith.model.packed import BATCH_TOKENS
from bertsmith.model.task_models import TaskModel
from bertsmith.serve.deadline import NotFiniteError
from bertsmith.tasks.inputs import Inputs
from bertsmith.tasks.outputs import outputs
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.embed import Embedder, Floats
from bertsmith.use.explain import Attention, attention
from bertsmith.use.masked_lm import Question, ask
from bertsmith.use.vectors import Recipe

#: What each kind of fine-tuned model can do.
_BY_KIND = {
    "single": "classify", "multi": "classify", "regression": "classify", "entities": "tag",
    "tags": "tag", "span": "answer", "choice": "choose",
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A loaded model. abilities: of "embed", "fill", "pair", "classify", "tag", "answer", "choose".

    Every model has a tokenizer and can embed.
    """

    name: str
    bundle: Bundle | TaskBundle | EncoderBundle
    embedder: Embedder
    abilities: frozenset[str]

    def counting(self, counter: TokenCounter) -> "Served":
        """Return the same model with tokenizers that count what they encode."""
        tokenizer = self.bundle.tokenizer.counting(counter)
        bundle = replace(self.bundle, tokenizer=tokenizer)
        return replace(self, bundle=bundle, embedder=self.embedder.counting(counter))


def served(name: str, path: Path | str, *, device: str = "cpu", fast: bool = False) -> Served:
    """Load a model directory, RUN or hub id, with whatever heads it has. Raises ModelError."""
    directory = locate(path)
    bundle: Bundle | TaskBundle | EncoderBundle
    if is_bare(directory):
        bundle = load_encoder(directory, device=device)
    else:
        bundle = load_either(directory, device=device)
    can = {"embed"}
    if isinstance(bundle, TaskBundle):
        can.add(_BY_KIND[bundle.head.kind])
    elif isinstance(bundle, Bundle):
        can |= set() if any(own.startswith("mlm.") for own in bundle.new) else {"fill"}
        can |= {"pair"} if bundle.config.nsp else set()
    embedder = Embedder(bundle, fast=fast)
    # Now, since the files may be gone when somebody asks.
    embedder.load_pooler_if_any()
    return Served(name, bundle, embedder, frozenset(can))


def finite(model: str, compute: Callable[[Any], Sequence[Any]]) -> Callable[[Any], Sequence[Any]]:
    """Return what computes the same and raises NotFiniteError for NaN or infinity.

    JSON has no such numbers: an answer would have null instead. Log-probabilities may be -inf.
    """

    def checked(payloads: Any) -> Sequence[Any]:
        answers = compute(payloads)
        for answer in answers:
            if isinstance(answer, Tensor):
                is_finite = not bool((answer.isnan() | answer.isposinf()).any())
            else:
                numbers = answer.probabilities if isinstance(answer, Attention) else answer
                is_finite = bool(np.isfinite(numbers).all())
            if not is_finite:
                raise NotFiniteError(model)
        return answers

    return checked


def vectors_of(embedder: Embedder, recipe: Recipe, sequences: list[list[int]]) -> list[Floats]:
    """Return the vector, or the vectors, of each sequence."""
    found: list[Any] = [None] * len(sequences)
    # The batcher has counted them; what is quickest for sorted texts would part most batches again.
    for numbers, vectors in embedder.batches(sequences, recipe, BATCH_TOKENS):
        for number, own in zip(numbers, vectors, strict=True):
            found[number] = own
    return found


def outputs_of(model: TaskModel, payloads: list[tuple[Any, Any]]) -> list[Floats]:
    """Return the outputs of the units of several requests."""
    count = len(payloads)
    places = None if payloads[0][1] is None else [places for _, places in payloads]
    sequences = [sequences for sequences, _ in payloads]
    return outputs(model, Inputs(sequences, [""] * count, [False] * count, places=places))


def masks_of(bundle: Bundle, questions: list[Question]) -> list[Tensor]:
    """Return float32 [places, V] for each question: log-probabilities."""
    found = [torch.empty(len(own.places), bundle.tokenizer.vocab_size) for own in questions]
    lengths = [len(own.ids) for own in questions]
    for answers in ask(bundle, lengths, questions.__getitem__):
        for (number, which), shares in zip(answers.rows, answers.log_probabilities, strict=True):
            found[number][which] = shares
    return found


def attentions_of(own: Served, asked: list[tuple[str, str | None, int | None]]) -> list[Attention]:
    """Return what the heads look at in each text or pair, cut to so many tokens."""
    return [attention(own.bundle, text, pair, longest=longest) for text, pair, longest in asked]
