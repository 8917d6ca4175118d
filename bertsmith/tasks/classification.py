"""Classification and regression of texts and text pairs."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import HeadConfig, TaskKind
from bertsmith.errors import TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts, ModelInputs, TaskMicroBatch
from bertsmith.tasks.settings import DEFAULT_MAX_SEQLENS, TaskSettings
from bertsmith.tasks.tables import (
    Row,
    drop_zero_decimals,
    get_cell,
    get_text,
    read_task_rows,
    read_unique_id,
    reject_lone_surrogates,
)
from bertsmith.tasks.text_pairs import add_special_tokens, iter_encoded_texts, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

DEFAULT_MAX_SEQLEN = DEFAULT_MAX_SEQLENS["classify"]
ROC_AUC = "roc_auc"
#: Separates the labels of a text in a multi-label column of CSV or TSV.
LABEL_SEPARATOR = "|"
_MAX_LISTED_LABELS = 20
_INTEGER = re.compile(r"-?[0-9]{1,18}")
#: A number as spreadsheets write it in many languages.
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
#: The largest score: targets are 32-bit numbers.
_MAX_SCORE = float(np.finfo(np.float32).max)

#: A class name, a score, or a set of class names.
Label = str | float | frozenset[str]


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
        replace(example, label=example.label and _rename_label(example.label, drop_zero_decimals))
        for example in examples
    ]


def _rename_label(label: Label, rename: Callable[[str], str]) -> Label:
    """Return a label with renamed class names; a score is returned unchanged."""
    if isinstance(label, str):
        return rename(label)
    return frozenset(map(rename, label)) if isinstance(label, frozenset) else label


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
        label = _parse_label(get_cell(row, task.label_column, "--label"), task.kind, labels)
        if labels is not None:
            label = _match_labels(label, labels)
    return TextExample(texts, label, row.location)


def _parse_label(value: Any, kind: TaskKind, labels: Sequence[str] | None = None) -> Label:
    """Convert the value of a cell to a label of the task's kind.

    Args:
        value: The value of the cell.
        kind: The kind of task.
        labels: The known labels, None if they are collected from the file.

    Raises:
        BadExampleError: The value is not a label of this kind.
    """
    if kind == "multi":
        return _parse_label_set(value, labels)
    _reject_missing_label(value, labels)
    if kind == "single":
        if isinstance(value, list):
            raise BadExampleError("several labels where one is expected", "; see --kind multi")
        name = to_label_name(value)
        if not name:
            raise BadExampleError("an empty label")
        return name
    return parse_score(value)


def _parse_label_set(value: Any, labels: Sequence[str] | None) -> frozenset[str]:
    """Convert a list of labels, or a text with ``LABEL_SEPARATOR`` between labels, to a set."""
    if isinstance(value, str):
        items = value.split(LABEL_SEPARATOR)
    elif isinstance(value, list):
        items = value
    else:
        items = [value]
    for item in items:
        _reject_missing_label(item, labels)
    names = [name for name in map(to_label_name, items) if name]
    if len(names) > len(set(names)):
        raise BadExampleError(
            "a label that occurs twice",
            "; give names of labels instead of a 0 or 1 for each",
        )
    return frozenset(names)


def parse_score(value: Any) -> float:
    """Convert the value of a cell to a number that is finite as a 32-bit number.

    Raises:
        BadExampleError: The value is not such a number.
    """
    if isinstance(value, str) and not value.strip():
        raise BadExampleError("an empty label")
    if isinstance(value, bool):
        raise BadExampleError("a score that is not a number", f": {value!r}")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        detail = f": {value!r}"
        if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()):
            detail += "; write a decimal point instead of the comma"
        raise BadExampleError("a score that is not a number", detail) from None
    if not math.isfinite(score):
        raise BadExampleError("a score that is not finite", f": {value!r}")
    if abs(score) > _MAX_SCORE:
        raise BadExampleError("a score that exceeds the 32-bit range", f": {value!r}")
    return score


def _reject_missing_label(value: Any, labels: Sequence[str] | None) -> None:
    """Raise BadExampleError for NaN, which pandas writes for missing values.

    The text "nan", in upper or lower case, is also rejected, unless ``labels`` contains it.
    """
    if isinstance(value, float) and math.isnan(value):
        raise BadExampleError("a missing label", ": NaN")
    if (
        isinstance(value, str)
        and value.strip().lower() == "nan"
        and value.strip() not in (labels or ())
    ):
        raise BadExampleError(
            "a missing label",
            f": {value!r} (if it is a class, it must be listed in task.labels)",
        )


def to_label_name(value: Any) -> str:
    """Convert a cell to the name of a label: true to "true"; 1 and 1.0 to "1"."""
    if isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise BadExampleError("a label that is neither text nor a number", f": {value!r}")
    if isinstance(value, float):
        # Integer columns with missing values are stored as floats.
        if not math.isfinite(value):
            raise BadExampleError("a label that is not finite", f": {value!r}")
        value = int(value) if value.is_integer() else value
    name = str(value).strip()
    reject_lone_surrogates(name, "label")
    return name


def _match_labels(label: Label, labels: Sequence[str]) -> Label:
    """Return a label whose class names are in ``labels``; "1.0" matches the class "1".

    Raises:
        BadExampleError: There is another class name.
    """

    def match(name: str) -> str:
        integer = drop_zero_decimals(name)
        return integer if name not in labels and integer in labels else name

    matched = _rename_label(label, match)
    if isinstance(matched, float):
        return matched
    names = matched if isinstance(matched, frozenset) else {matched}
    unknown_names = sorted(names - set(labels))
    if unknown_names:
        listed_labels = ", ".join(map(repr, labels[:_MAX_LISTED_LABELS]))
        raise BadExampleError(
            "an unknown label", f": {unknown_names[0]!r}; known labels are {listed_labels}"
        )
    return matched


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
    unit_targets = None if targets is None else np.split(targets, len(examples))
    return ModelInputs(sequences, locations, is_truncated, unit_targets)


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
        scores = compute_multilabel_metrics(logits, targets, names)
    if len(scores) < len(task.metrics):
        classes = compute_class_report(outputs, inputs, examples, head)["classes"]
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
        probabilities = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
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
) -> dict[str, float]:
    """Return the named metrics of multi-label classification.

    Args:
        logits: [n, C].
        targets: 1 for each correct label, 0 for the others, [n, C].
        names: Names of the metrics.
    """
    predicted, true = (logits > 0).astype(np.int64), targets.astype(np.int64)
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


def compute_class_report(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TextExample],  # noqa: ARG001 - part of TaskFamily
    head: HeadConfig,
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
    predicted, true = logits > 0, targets > 0
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
