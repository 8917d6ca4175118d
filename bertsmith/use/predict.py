"""Classification and regression of texts and text pairs with a fine-tuned model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.bundle import FineTunedBundle, TaskKind
from bertsmith.bundle.metadata import get_recorded_task
from bertsmith.errors import InputError, ModelError
from bertsmith.tasks.classification import TextExample, encode_examples
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.tasks.settings import get_family_name
from bertsmith.use.inputs import check_is_text_list, chunked
from bertsmith.use.model_setup import resolve_task_model

#: Number of texts encoded together, so that sequences of similar length can share a batch.
_CHUNK_SIZE = 1024
#: The task kinds of classification and regression.
KINDS: tuple[TaskKind, ...] = ("single", "multi", "regression")


@dataclass(frozen=True)
class Prediction:
    """Prediction for one text or pair of texts.

    Attributes:
        labels: Pairs (label, probability), most probable first; empty for a regression model. The
            probabilities sum to 1, except that a multi-label model predicts each label
            independently.
        score: Output of a regression model; None for a classifier.
        is_truncated: Whether the text or pair was truncated to the maximum length.
    """

    labels: tuple[tuple[str, float], ...]
    score: float | None
    is_truncated: bool


def predict(
    model: FineTunedBundle | Path | str,
    texts: Sequence[str | tuple[str, str]],
    *,
    fast: bool = False,
) -> list[Prediction]:
    """Classify texts or text pairs with a fine-tuned model.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        texts: A list of texts or of pairs of texts.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        One prediction per text or pair, in input order.

    Raises:
        ModelError: The model is not a classification or regression model.
        InputError: A text is empty, or ``texts`` is a single string.
    """
    check_is_text_list(texts)
    bundle = resolve_task_model(model, *KINDS, fast=fast)
    return list(iter_predictions(bundle, texts))


def iter_predictions(
    model: FineTunedBundle | Path | str,
    texts: Iterable[str | tuple[str, str]],
    compute: ComputeOutputs = compute_outputs,
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[Prediction]:
    """Yield the predictions of ``predict`` for any number of texts, reading them in chunks.

    Args:
        model: As for ``predict``.
        texts: Texts or pairs of texts. Error messages contain the number of the text, from 1.
        compute: Computes the outputs of the model.
        chunk_size: Number of texts per chunk.
    """
    bundle = resolve_task_model(model, *KINDS)
    examples = (to_text_example(text, f"text {number:,}") for number, text in enumerate(texts, 1))
    for chunk in chunked(examples, chunk_size):
        yield from _predict_examples(bundle, chunk, compute)


def with_label_threshold(bundle: FineTunedBundle, threshold: float) -> FineTunedBundle:
    """Return a copy of the model that uses a threshold as its ``task.label_threshold``.

    Args:
        bundle: A model that predicts any number of labels.
        threshold: A label is predicted if its probability is higher.

    Raises:
        ModelError: The model predicts one label, or has another kind.
        SettingsError: The threshold is not between 0 and 1.
    """
    if bundle.head.kind != "multi":
        raise ModelError(
            f"label_threshold (--threshold): only for several labels per text, but {bundle.path} "
            f"is a model of the kind {bundle.head.kind!r}; remove it"
        )
    overrides = {**bundle.task_overrides, "label_threshold": threshold}
    bundle = replace(bundle, task_overrides=overrides)
    get_task_settings(bundle)  # only to check the threshold
    return bundle


def to_text_example(text_or_pair: str | tuple[str, str], location: str) -> TextExample:
    """Convert a text or a pair of texts to an example.

    Args:
        text_or_pair: A text, or a pair of texts.
        location: Prefix of error messages, such as "text 3".

    Raises:
        InputError: A text is empty, or there are more than two texts.
    """
    parts = (text_or_pair,) if isinstance(text_or_pair, str) else tuple(text_or_pair)
    if len(parts) not in (1, 2):
        raise InputError(f"{location} has {len(parts)} parts; expected a text or a pair of texts")
    if not all(part.strip() for part in parts):
        raise InputError(f"{location} is empty; expected at least one word")
    return TextExample(parts, None, location)


def _predict_examples(
    bundle: FineTunedBundle, examples: list[TextExample], compute: ComputeOutputs
) -> Iterator[Prediction]:
    """Yield the predictions for the texts of a chunk."""
    head = bundle.head
    inputs = encode_examples(
        examples, bundle.tokenizer, head, get_task_settings(bundle), ExampleCounts()
    )
    is_truncated = inputs.is_truncated
    logits = np.concatenate(compute(bundle.model, inputs)).astype(np.float64)
    if head.kind == "regression":
        for row, truncated in zip(logits, is_truncated, strict=True):
            yield Prediction((), float(row[0]), truncated)
        return
    probabilities = compute_probabilities(logits, head.kind)
    for row, truncated in zip(probabilities, is_truncated, strict=True):
        order = np.argsort(-row, kind="stable")
        labels = tuple((head.labels[index], float(row[index])) for index in order)
        yield Prediction(labels, None, truncated)


def compute_probabilities(logits: NDArray[np.float64], kind: TaskKind) -> NDArray[np.float64]:
    """Return the probabilities of the labels: the softmax, or sigmoids if the kind is "multi".

    Args:
        logits: Logits of a classifier, [n, C].
        kind: The task kind of the classifier.
    """
    tensor = torch.from_numpy(logits)
    return (tensor.sigmoid() if kind == "multi" else tensor.softmax(-1)).numpy()


def is_trained_on_single_texts(bundle: FineTunedBundle) -> bool:
    """Return whether the model records that its training examples were single texts."""
    task = get_recorded_task(bundle.info)
    return bool(task) and not task.get("pair_column")


def reject_pairs_of_single_text_model(bundle: FineTunedBundle, columns: Mapping[str, Any]) -> None:
    """Raise InputError if a column of second texts is given for a model of single texts.

    Args:
        bundle: The model.
        columns: The fields of ``TaskSettings`` that the user has set.
    """
    is_classifier = get_family_name(bundle.head.kind) == "classify"
    if columns.get("pair_column") and is_classifier and is_trained_on_single_texts(bundle):
        raise InputError(
            f"--pair {columns['pair_column']}: {bundle.path} was fine-tuned on single texts; "
            "omit --pair"
        )
