"""Classification and regression of texts and text pairs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs, TaskMicroBatch
from bertsmith.tasks.label_values import Label, check_label_columns, parse_label, rename_label
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import (
    Row,
    drop_zero_decimals,
    get_text,
    read_task_rows,
    read_unique_id,
)
from bertsmith.tasks.text_pairs import add_special_tokens, iter_encoded_texts, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

ROC_AUC = "roc_auc"
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class TextExample:
    """A text or a text pair.

    Attributes:
        texts: One or two texts.
        label: A class name, a score, a set of class names, or None for unlabeled data.
        location: File and line, for messages.
    """

    texts: tuple[str, ...]
    label: Label | None
    location: str


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,
    labeled: bool = True,
) -> tuple[list[TextExample], ExampleCounts]:
    """Read texts or text pairs from a table; see ``TaskFamily``."""
    if labeled and task.label_columns and labels is not None:
        check_label_columns(task.label_columns, labels, str(path))
    examples, counts, seen_ids = [], ExampleCounts(), set[str]()
    for row in read_task_rows(path, task, counts):
        with counts.count_example(row.location, task, labeled=labeled):
            read_unique_id(row, task.id_column, seen_ids)
            examples.append(_parse_example(row, task, labels, labeled=labeled))
    if labels is None:
        examples = _merge_integer_labels(examples)
    return counts.require_examples(examples, path), counts


def _merge_integer_labels(examples: list[TextExample]) -> list[TextExample]:
    """Replace class names such as "1.0" by "1" if all class names are integers."""
    integers = {name: drop_zero_decimals(name) for name in _list_label_names(examples)}
    if not all(map(_INTEGER.fullmatch, integers.values())):
        return examples
    if all(name == integer for name, integer in integers.items()):
        return examples
    return [
        replace(example, label=example.label and rename_label(example.label, drop_zero_decimals))
        for example in examples
    ]


def _list_label_names(examples: Sequence[TextExample]) -> set[str]:
    """Return the class names of all labels."""
    names: set[str] = set()
    for example in examples:
        if isinstance(example.label, str):
            names.add(example.label)
        elif isinstance(example.label, frozenset):
            names |= example.label
    return names


def _parse_example(
    row: Row,
    task: TaskSettings,
    labels: Sequence[str] | None,
    *,
    labeled: bool,
) -> TextExample:
    """Convert a row to an example; raise BadExampleError for an invalid text or label."""
    texts: tuple[str, ...] = (get_text(row, task.text_column, "--text"),)
    if task.pair_column:
        texts = (*texts, get_text(row, task.pair_column, "--pair"))
    label = None
    if labeled:
        label = parse_label(row, task, labels)
    return TextExample(texts, label, row.location)


def collect_labels(examples: Sequence[TextExample], path: str) -> tuple[str, ...]:
    """Return the distinct labels, none for regression; see ``TaskFamily``.

    If all labels are integers, they are in numeric order, otherwise in alphabetical order.

    Raises:
        TaskError: All labels or scores are equal.
    """
    if all(isinstance(example.label, float) for example in examples):
        first_score = examples[0].label
        if all(example.label == first_score for example in examples):
            raise TaskError(
                f"{path}: every score is {first_score}; expected at least two different scores"
            )
        return ()
    names = _list_label_names(examples)
    if len(names) < 2:
        problem = f"every label is {min(names)!r}" if names else "there is no label"
        raise TaskError(f"{path}: {problem}; expected at least two different labels")
    if all(map(_INTEGER.fullmatch, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def encode_examples(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    head: HeadConfig,
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Encode each example as [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; see ``TaskFamily``."""
    assert task.max_seqlen is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    sequences, is_truncated = [], []
    for example_texts in iter_encoded_texts(tokenizer, (example.texts for example in examples)):
        num_special_tokens = 1 + len(example_texts)  # [CLS], and [SEP] after each text
        truncated_texts = truncate_texts(example_texts, task.max_seqlen - num_special_tokens)
        is_truncated.append(sum(map(len, truncated_texts)) < sum(map(len, example_texts)))
        sequences.append([add_special_tokens(truncated_texts, tokenizer)])
    counts.num_truncated += sum(is_truncated)
    locations = [example.location for example in examples]
    targets = build_targets(examples, head)
    input_targets = None if targets is None else np.split(targets, len(examples))
    return ModelInputs(sequences, locations, is_truncated, input_targets)


def build_targets(examples: Sequence[TextExample], head: HeadConfig) -> NDArray[Any] | None:
    """Convert the labels of n examples to target values.

    Returns:
        For a single label the class indices, int64 [n]; for multiple labels 1 for each correct
        label and 0 for the others, float32 [n, C]; for regression the scores, float32 [n]. None if
        an example is unlabeled.
    """
    labels = [example.label for example in examples]
    if any(label is None for label in labels):
        return None
    if head.kind == "regression":
        return np.array(labels, np.float32)
    label_index = {name: index for index, name in enumerate(head.labels)}
    if head.kind == "single":
        return np.array([label_index[str(label)] for label in labels], np.int64)
    indicators = np.zeros((len(labels), head.num_outputs), np.float32)
    for row, label in zip(indicators, labels, strict=True):
        assert isinstance(label, frozenset)
        row[[label_index[name] for name in label]] = 1.0
    return indicators


def compute_losses(outputs: Tensor, batch: TaskMicroBatch, head: HeadConfig) -> Tensor:
    """Return the loss of each example, float32 [B].

    The loss is the cross-entropy for a single label, the mean binary cross-entropy of all labels
    for multiple labels, and the squared error for regression.

    Args:
        outputs: float32 [B, C].
        batch: The micro-batch.
        head: Kind and labels of the head.
    """
    if head.kind == "single":
        return F.cross_entropy(outputs, batch.targets, reduction="none")
    if head.kind == "multi":
        label_losses = F.binary_cross_entropy_with_logits(outputs, batch.targets, reduction="none")
        return label_losses.mean(-1)
    return (outputs[:, 0] - batch.targets) ** 2


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TextExample],
    head: HeadConfig,
    task: TaskSettings,
) -> dict[str, float]:
    """Return the requested metrics; see ``TaskFamily``."""
    assert inputs.targets is not None
    logits, targets = np.concatenate(outputs), np.concatenate(inputs.targets)
    if head.kind == "regression":
        predicted, true = logits[:, 0].astype(np.float64), targets.astype(np.float64)
        return {name: metrics.REGRESSION_METRICS[name](predicted, true) for name in task.metrics}
    # Metrics of one label, such as "f1:LOC", are taken from the class report below.
    names = [name for name in task.metrics if ":" not in name]
    if head.kind == "single":
        scores = compute_single_label_metrics(logits, targets, names)
    else:
        scores = compute_multilabel_metrics(logits, targets, names, task.label_threshold)
    if len(scores) < len(task.metrics):
        classes = compute_class_report(outputs, inputs, examples, head, task)["classes"]
        scores |= metrics.select_label_scores(task.metrics, classes)
    return {name: scores[name] for name in task.metrics}


def compute_single_label_metrics(
    logits: NDArray[np.float32],
    targets: NDArray[np.int64],
    names: Sequence[str],
) -> dict[str, float]:
    """Return the named metrics of single-label classification.

    Args:
        logits: [n, C].
        targets: Class indices [n].
        names: Names of the metrics.
    """
    predicted = logits.argmax(-1)
    scores = {
        name: metrics.CLASSIFICATION_METRICS[name](predicted, targets)
        for name in names
        if name != ROC_AUC
    }
    if ROC_AUC in names:
        # ROC-AUC ranks examples by the probability of a class. Logits would rank them differently.
        probabilities = torch.from_numpy(logits).double().softmax(-1).numpy()
        is_class = targets[:, None] == np.arange(logits.shape[1])
        if logits.shape[1] == 2:
            # With two classes, both columns have the same ROC-AUC up to rounding.
            probabilities, is_class = probabilities[:, 1:], is_class[:, 1:]
        scores[ROC_AUC] = metrics.macro_roc_auc_score(probabilities, is_class)
    return scores


def compute_multilabel_metrics(
    logits: NDArray[np.float32],
    targets: NDArray[np.float32],
    names: Sequence[str],
    threshold: float,
) -> dict[str, float]:
    """Return the named metrics of multi-label classification.

    Args:
        logits: [n, C].
        targets: 1 for each correct label, 0 for the others, [n, C].
        names: Names of the metrics.
        threshold: A label is predicted if its probability is higher.
    """
    predicted = (logits > _to_logit(threshold)).astype(np.int64)
    true = targets.astype(np.int64)
    label_f1 = [
        metrics.f1_score(predicted_column, true_column)
        for predicted_column, true_column in zip(predicted.T, true.T, strict=True)
    ]
    scores = {
        "f1": metrics.f1_score(predicted, true),
        "accuracy": float((predicted == true).all(-1).mean()),
        "macro_f1": float(np.mean(label_f1)),
    }
    if ROC_AUC in names:
        scores[ROC_AUC] = metrics.macro_roc_auc_score(logits.astype(np.float64), true == 1)
    return {name: scores[name] for name in names}


def _to_logit(probability: float) -> float:
    """Return the logit whose sigmoid is ``probability``."""
    return math.log(probability / (1 - probability))


def compute_class_report(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TextExample],  # noqa: ARG001 - part of TaskFamily
    head: HeadConfig,
    task: TaskSettings,
) -> dict[str, Any]:
    """Return the scores of each label; see ``TaskFamily``.

    Single-label tasks also have a confusion matrix. The report is empty for regression.
    """
    assert inputs.targets is not None
    if head.kind == "regression":
        return {}
    logits, targets = np.concatenate(outputs), np.concatenate(inputs.targets)
    if head.kind == "single":
        return metrics.classification_report(logits.argmax(-1), targets, head.labels)
    predicted, true = logits > _to_logit(task.label_threshold), targets > 0
    num_correct = (predicted & true).sum(0).tolist()
    num_predicted = predicted.sum(0).tolist()
    num_true = true.sum(0).tolist()
    classes = {
        label: metrics.compute_class_scores(
            num_correct[index], num_predicted[index], num_true[index]
        )
        for index, label in enumerate(head.labels)
    }
    return {"classes": classes}


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the default and the supported metrics; see ``TaskFamily``."""
    if task.kind == "single":
        supported = [*metrics.CLASSIFICATION_METRICS, ROC_AUC]
        if len(task.labels) > 2:
            # The metric "f1" is the F1 of the second of two classes.
            supported.remove("f1")
        return ("accuracy", "macro_f1"), tuple(supported)
    if task.kind == "multi":
        return ("f1", "accuracy"), ("f1", "accuracy", "macro_f1", ROC_AUC)
    return ("spearman", "pearson"), tuple(metrics.REGRESSION_METRICS)
