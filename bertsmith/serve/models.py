"""One loaded model of a server: what it can do, and what it computes for many clients at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.bundle import (
    EncoderBundle,
    FineTunedBundle,
    PretrainedBundle,
    load_encoder,
    load_model,
    locate_model,
)
from bertsmith.bundle.any_model import is_bare_encoder
from bertsmith.model.packed import MAX_BATCH_TOKENS
from bertsmith.model.task_models import TaskModel
from bertsmith.serve.deadline import NotFiniteError
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.outputs import compute_outputs as outputs
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.embed import Embedder, Floats
from bertsmith.use.explain import AttentionMaps, attention
from bertsmith.use.masked_lm import MaskedSequence, predict_masked_tokens
from bertsmith.use.vectors import VectorSpec

#: What each kind of fine-tuned model can do.
_BY_KIND = {
    "single": "classify", "multi": "classify", "regression": "classify", "entities": "tag",
    "tags": "tag", "span": "answer", "choice": "choose",
}  # fmt: skip


@dataclass(frozen=True)
class ServedModel:
    """A loaded model. abilities: of "embed", "fill", "pair", "classify", "tag", "answer", "choose".

    Every model has a tokenizer and can embed.
    """

    name: str
    bundle: PretrainedBundle | FineTunedBundle | EncoderBundle
    embedder: Embedder
    abilities: frozenset[str]

    def with_token_counter(self, counter: TokenCounter) -> "ServedModel":
        """Return the same model with tokenizers that count what they encode."""
        tokenizer = self.bundle.tokenizer.with_counter(counter)
        bundle = replace(self.bundle, tokenizer=tokenizer)
        return replace(self, bundle=bundle, embedder=self.embedder.with_token_counter(counter))


def load_served_model(
    name: str, path: Path | str, *, device: str = "cpu", fast: bool = False
) -> ServedModel:
    """Load a model directory, RUN or hub id, with whatever heads it has. Raises ModelError."""
    directory = locate_model(path)
    bundle: PretrainedBundle | FineTunedBundle | EncoderBundle
    if is_bare_encoder(directory):
        bundle = load_encoder(directory, device=device)
    else:
        bundle = load_model(directory, device=device)
    can = {"embed"}
    if isinstance(bundle, FineTunedBundle):
        can.add(_BY_KIND[bundle.head.kind])
    elif isinstance(bundle, PretrainedBundle):
        can |= set() if any(own.startswith("mlm.") for own in bundle.new_weights) else {"fill"}
        can |= {"pair"} if bundle.config.nsp else set()
    embedder = Embedder(bundle, fast=fast)
    # Now, since the files may be gone when somebody asks.
    embedder.preload_pooler()
    return ServedModel(name, bundle, embedder, frozenset(can))


def require_finite(
    model: str, compute: Callable[[Any], Sequence[Any]]
) -> Callable[[Any], Sequence[Any]]:
    """Return what computes the same and raises NotFiniteError for NaN or infinity.

    JSON has no such numbers: an answer would have null instead. Log-probabilities may be -inf.
    """

    def checked(payloads: Any) -> Sequence[Any]:
        answers = compute(payloads)
        for answer in answers:
            if isinstance(answer, Tensor):
                is_finite = not bool((answer.isnan() | answer.isposinf()).any())
            else:
                numbers = answer.probabilities if isinstance(answer, AttentionMaps) else answer
                is_finite = bool(np.isfinite(numbers).all())
            if not is_finite:
                raise NotFiniteError(model)
        return answers

    return checked


def embed_sequences(
    embedder: Embedder, recipe: VectorSpec, sequences: list[list[int]]
) -> list[Floats]:
    """Return the vector, or the vectors, of each sequence."""
    found: list[Any] = [None] * len(sequences)
    # The batcher has counted them; what is quickest for sorted texts would part most batches again.
    for numbers, vectors in embedder.encode_batches(sequences, recipe, MAX_BATCH_TOKENS):
        for number, own in zip(numbers, vectors, strict=True):
            found[number] = own
    return found


def compute_outputs(model: TaskModel, payloads: list[tuple[Any, Any]]) -> list[Floats]:
    """Return the outputs of the units of several requests."""
    count = len(payloads)
    places = None if payloads[0][1] is None else [places for _, places in payloads]
    sequences = [sequences for sequences, _ in payloads]
    return outputs(
        model, ModelInputs(sequences, [""] * count, [False] * count, token_indices=places)
    )


def predict_masks(bundle: PretrainedBundle, questions: list[MaskedSequence]) -> list[Tensor]:
    """Return float32 [places, V] for each question: log-probabilities."""
    found = [
        torch.empty(len(own.masked_positions), bundle.tokenizer.vocab_size) for own in questions
    ]
    lengths = [len(own.ids) for own in questions]
    for answers in predict_masked_tokens(bundle, lengths, questions.__getitem__):
        for (number, which), shares in zip(answers.rows, answers.log_probabilities, strict=True):
            found[number][which] = shares
    return found


def compute_attentions(
    own: ServedModel, asked: list[tuple[str, str | None, int | None]]
) -> list[AttentionMaps]:
    """Return what the heads look at in each text or pair, cut to so many tokens."""
    return [attention(own.bundle, text, pair, max_seqlen=longest) for text, pair, longest in asked]
