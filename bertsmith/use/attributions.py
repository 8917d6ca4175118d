"""Attributions: how much each token of a text changes the prediction of a fine-tuned model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.classification import encode_examples
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs, TokenSequence
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.use.model_setup import resolve_task_model
from bertsmith.use.predict import KINDS, compute_probabilities, to_text_example


@dataclass(frozen=True)
class Attributions:
    """The tokens of a text or a pair of texts, with the attribution of each token.

    Attributes:
        label: The label whose probability is attributed; None for a regression model.
        score: The probability of the label, or the output of a regression model.
        tokens: The tokens, with [CLS] and [SEP].
        segments: The segment id of each token.
        values: The score minus the score if the token is replaced by [MASK]; 0 for [CLS] and [SEP].
        is_truncated: Whether the text or pair was truncated to the maximum length.
    """

    label: str | None
    score: float
    tokens: list[str]
    segments: list[int]
    values: list[float]
    is_truncated: bool


def attribute(
    model: FineTunedBundle | Path | str,
    text: str | tuple[str, str],
    label: str | None = None,
    *,
    max_tokens: int | None = None,
    compute: ComputeOutputs = compute_outputs,
) -> Attributions:
    """Attribute the prediction for a text or a pair of texts to its tokens (occlusion).

    Each token is replaced by [MASK] in turn (Li et al. 2016, arXiv:1612.08220), so the model
    computes as many sequences as the text has tokens.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        text: A text, or a pair of texts.
        label: The label whose probability is attributed; None for the most probable one.
        max_tokens: Maximum number of tokens, with [CLS] and [SEP]; None for no limit. A text is
            first truncated to the ``task.max_seqlen`` that the model was fine-tuned with.
        compute: Computes the outputs of the model.

    Raises:
        ModelError: The model is not a classification or regression model.
        InputError: A text is empty, has too many tokens, or the label does not exist.
    """
    bundle = resolve_task_model(model, *KINDS)
    column = None if label is None else _find_column(bundle, label)
    example = to_text_example(text, "the text")
    inputs = encode_examples(
        [example], bundle.tokenizer, bundle.head, get_task_settings(bundle), ExampleCounts()
    )
    ((sequence,),) = inputs.sequences
    ids, segments = sequence
    if max_tokens is not None and len(ids) > max_tokens:
        raise InputError(
            f"attributions are limited to {max_tokens} tokens, got {len(ids)}; shorten the text"
        )
    special_ids = (bundle.tokenizer.cls_id, bundle.tokenizer.sep_id)
    masked_indices = [index for index, token_id in enumerate(ids) if token_id not in special_ids]
    sequences = [sequence, *_mask_tokens(sequence, masked_indices, bundle.tokenizer.mask_id)]
    count = len(sequences)
    occluded = ModelInputs([[item] for item in sequences], ["the text"] * count, [False] * count)
    scores = _compute_scores(bundle, np.concatenate(compute(bundle.model, occluded)))
    if column is None:
        column = int(scores[0].argmax())
    values = np.zeros(len(ids))
    values[masked_indices] = scores[0, column] - scores[1:, column]
    return Attributions(
        label=bundle.head.labels[column] if bundle.head.labels else None,
        score=float(scores[0, column]),
        tokens=bundle.tokenizer.ids_to_tokens(list(ids)),
        segments=list(segments),
        values=values.tolist(),
        is_truncated=inputs.is_truncated[0],
    )


def _mask_tokens(sequence: TokenSequence, indices: list[int], mask_id: int) -> list[TokenSequence]:
    """Return a copy of the sequence for each index, in which that token is [MASK]."""
    ids, segments = sequence
    return [([*ids[:index], mask_id, *ids[index + 1 :]], segments) for index in indices]


def _compute_scores(bundle: FineTunedBundle, outputs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probabilities of the labels, or the outputs of a regression model, [n, C]."""
    logits = outputs.astype(np.float64)
    kind = bundle.head.kind
    return logits if kind == "regression" else compute_probabilities(logits, kind)


def _find_column(bundle: FineTunedBundle, label: str) -> int:
    """Return the index of a label.

    Raises:
        InputError: There is no such label.
    """
    labels = bundle.head.labels
    if label not in labels:
        expected = f"one of {', '.join(labels)}" if labels else "none, as the model has no labels"
        raise InputError(f"label is {label!r}; expected {expected}")
    return labels.index(label)
