"""Run the masked-LM head on many sequences, and load the models that inference functions use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bertsmith.bundle import FineTunedBundle, PretrainedBundle, TaskKind, load, load_fine_tuned
from bertsmith.errors import BertsmithError, InputError, ModelError
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.plurals import count_noun
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.use.model_setup import set_up_model

#: A loaded model, or the path of a model directory or run directory.
ModelOrPath = PretrainedBundle | Path | str

#: Maximum number of log-probabilities computed at once (16 MiB of float32), so that memory does not
#: grow with the vocabulary.
_MAX_LOG_PROBABILITIES = 2**22

Item = TypeVar("Item")


@dataclass(frozen=True)
class MaskedSequence:
    """A sequence with [MASK] tokens.

    Attributes:
        ids: Token ids, including [CLS] and [SEP].
        segments: Segment ids.
        masked_positions: Indices of the [MASK] tokens to predict.
    """

    ids: Sequence[int]
    segments: Sequence[int]
    masked_positions: Sequence[int]


@dataclass(frozen=True)
class MaskedPredictions:
    """Predictions at P masked positions.

    Attributes:
        rows: For each prediction, the index of its sequence, and the index of its position in the
            ``masked_positions`` of this sequence.
        log_probabilities: float32 [P, V], natural logarithms, over the tokenizer's vocabulary.
    """

    rows: Sequence[tuple[int, int]]
    log_probabilities: Tensor


#: The type of ``predict_masked_tokens``, and of the function with which the server batches the
#: requests of several clients.
MaskedTokenPredictor = Callable[
    [PretrainedBundle, Sequence[int], Callable[[int], MaskedSequence]], Iterator[MaskedPredictions]
]


def resolve_model(model: ModelOrPath, *, fast: bool = False) -> PretrainedBundle:
    """Set up a loaded model for inference, or load a path on the CPU; see ``set_up_model``."""
    bundle = model if isinstance(model, PretrainedBundle) else load(model)
    return set_up_model(bundle, fast=fast)


def check_is_text_list(texts: object) -> None:
    """Raise InputError for a single string, which would be used as a list of characters."""
    if isinstance(texts, str):
        raise InputError(f"expected a list of texts, got one text: put {texts[:40]!r} into [ ]")


def resolve_task_model(
    model: FineTunedBundle | Path | str, *kinds: TaskKind, fast: bool = False
) -> FineTunedBundle:
    """Set up a loaded fine-tuned model for inference, or load a path on the CPU.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        kinds: The task kinds that the caller supports.
        fast: Whether to use 8-bit or 16-bit arithmetic; see ``quantize_model``.

    Raises:
        ModelError: The model is not fine-tuned, or its task is none of ``kinds``.
    """
    bundle = _load_task_model(model)
    if bundle.head.kind not in kinds:
        raise ModelError(
            f"{bundle.path}: this model is of the kind {bundle.head.kind!r}; expected "
            f"{' or '.join(map(repr, kinds))}; `bertsmith predict` accepts every kind"
        )
    return set_up_model(bundle, fast=fast)


def resolve_reranker(model: FineTunedBundle | Path | str, *, fast: bool = False) -> FineTunedBundle:
    """Return a model with one output, set up for inference; see ``resolve_task_model``.

    Raises:
        ModelError: The model is not fine-tuned, or has several outputs.
    """
    bundle = _load_task_model(model)
    head = bundle.head
    if head.kind != "regression":
        is_classifier = head.kind in ("single", "multi")
        description = (
            f"a classifier with {count_noun(len(head.labels), 'label')}"
            if is_classifier
            else f"of the kind {head.kind!r}"
        )
        raise ModelError(
            f"{bundle.path}: this model is {description}, but reranking needs a model with one "
            "output; train one with `bertsmith finetune rerank`, or use `bertsmith predict`"
        )
    return set_up_model(bundle, fast=fast)


def _load_task_model(model: FineTunedBundle | Path | str) -> FineTunedBundle:
    """Return a loaded fine-tuned model, or load a path on the CPU."""
    if not isinstance(model, FineTunedBundle | Path | str):
        raise ModelError(
            f"{type(model).__name__}: not a fine-tuned model; give the path of a model directory "
            "or run directory"
        )
    return model if isinstance(model, FineTunedBundle) else load_fine_tuned(model)


def get_max_text_tokens(bundle: PretrainedBundle) -> int:
    """Return the maximum number of tokens of a text, without [CLS] and [SEP]."""
    return bundle.config.max_positions - 2


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items (the last may be shorter), without reading ahead.

    If the iterable raises a BertsmithError, the items read before are yielded before it is raised.
    """
    iterator = iter(items)
    item_error: BertsmithError | None = None
    while item_error is None:
        chunk: list[Item] = []
        try:
            # list(islice(...)) would lose the items read before an error.
            for item in islice(iterator, size):
                chunk.append(item)  # noqa: PERF402
        except BertsmithError as error:
            item_error = error
        if chunk:
            yield chunk
        if len(chunk) < size and item_error is None:
            return
    raise item_error


def pack_on_device(
    bundle: PretrainedBundle, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> PackedBatch:
    """Pack sequences into a batch on the model's device.

    Args:
        bundle: The model.
        sequences: The token ids and the segment ids of each sequence.
    """
    return pack_sequences(sequences).to(next(bundle.model.parameters()).device)


def predict_masked_tokens(
    bundle: PretrainedBundle, lengths: Sequence[int], get_sequence: Callable[[int], MaskedSequence]
) -> Iterator[MaskedPredictions]:
    """Predict the tokens at masked positions.

    Only the hidden states at these positions go through the masked-LM head. Sequences are batched
    by length, so the predictions are not in the order of the sequences.

    Args:
        bundle: The model.
        lengths: Number of tokens of each sequence.
        get_sequence: Returns the sequence with an index. It is called for one batch at a time, so
            that the sequences of all batches are never in memory together.

    Raises:
        ModelError: The model has no masked-LM head.
    """
    bundle.require_mlm_head()
    for indices in batch_by_length(lengths):
        sequences = [get_sequence(index) for index in indices]
        for predictions in predict_masked_batch(bundle, sequences):
            rows = [(indices[sequence], position) for sequence, position in predictions.rows]
            yield MaskedPredictions(rows, predictions.log_probabilities)


def predict_masked_batch(
    bundle: PretrainedBundle, sequences: Sequence[MaskedSequence]
) -> Iterator[MaskedPredictions]:
    """Predict the tokens at the masked positions of sequences, computed as one batch.

    Yields:
        Predictions of at most ``_MAX_LOG_PROBABILITIES`` log-probabilities, in the order of the
        sequences.
    """
    positions_per_step = max(_MAX_LOG_PROBABILITIES // bundle.config.vocab_size, 1)
    rows = [
        (sequence_index, position_index)
        for sequence_index, sequence in enumerate(sequences)
        for position_index in range(len(sequence.masked_positions))
    ]
    hidden = _compute_hidden_states(bundle, sequences)
    for start in range(0, len(rows), positions_per_step):
        selected = slice(start, start + positions_per_step)
        log_probabilities = _compute_log_probabilities(bundle, hidden[selected])
        yield MaskedPredictions(rows[selected], log_probabilities)


@torch.inference_mode()
def _compute_hidden_states(bundle: PretrainedBundle, sequences: Sequence[MaskedSequence]) -> Tensor:
    """Return the hidden states at the masked positions of a batch, [P, D]."""
    batch = pack_on_device(bundle, [(sequence.ids, sequence.segments) for sequence in sequences])
    starts = batch.first_token_indices.tolist()
    token_indices = [
        start + position
        for start, sequence in zip(starts, sequences, strict=True)
        for position in sequence.masked_positions
    ]
    hidden: Tensor = bundle.model.bert(batch)
    return hidden.index_select(0, torch.tensor(token_indices, device=hidden.device))


@torch.inference_mode()
def _compute_log_probabilities(bundle: PretrainedBundle, hidden: Tensor) -> Tensor:
    """Return log-probabilities [P, V] over the tokenizer's vocabulary for hidden states [P, D].

    The decoder of a model may have more outputs than the vocabulary has tokens.
    """
    logits: Tensor = bundle.model.mlm(hidden)
    return logits[:, : bundle.tokenizer.vocab_size].float().log_softmax(-1)
