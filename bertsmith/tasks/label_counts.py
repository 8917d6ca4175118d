"""Summaries of the labels in a dataset, and warnings about them."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from bertsmith.bundle import TaskKind
from bertsmith.errors import TaskError
from bertsmith.plurals import count_noun
from bertsmith.tasks.entities import extract_entities
from bertsmith.tasks.settings import TaskSettings

#: Maximum number of labels in a summary.
_MAX_LISTED_LABELS = 10
#: Maximum number of characters of a label in messages.
_MAX_LABEL_LENGTH = 40
#: Accuracy is misleading, and a warning is given, if the share of one label exceeds this.
_DOMINANT_SHARE = 0.8
#: If a column has more distinct numbers than this, they are probably not class names.
_MAX_NUMERIC_CLASSES = 20


def count_labels(examples: Sequence[Any], kind: TaskKind) -> Counter[str]:
    """Count how many examples have each label; for tagging, how often each label occurs.

    The labels are class names, tags, entity types, or the indices of the correct endings. The
    counter is empty for regression and question answering.
    """
    if kind == "single":
        return Counter(example.label for example in examples)
    if kind == "multi":
        return Counter(label for example in examples for label in example.label)
    if kind == "choice":
        return Counter(f"ending {example.correct_index}" for example in examples)
    if kind == "tags":
        return Counter(tag for example in examples for tag in example.tags)
    if kind == "entities":
        return Counter(
            entity.label for example in examples for entity in extract_entities(example.tags)
        )
    return Counter()


def summarize_labels(examples: Sequence[Any], kind: TaskKind) -> str:
    """Return a line about the labels of a dataset.

    It has the most frequent labels (with several labels per example also the number of examples
    without a label), the range of the scores (regression), or the numbers of
    answerable and unanswerable questions (question answering).
    """
    if kind == "regression":
        scores = [float(example.label) for example in examples]
        mean = sum(scores) / len(scores)
        return f"scores from {min(scores):g} to {max(scores):g}, mean {mean:.4g}"
    if kind == "span":
        num_answered = sum(bool(example.answers) for example in examples)
        num_unanswered = len(examples) - num_answered
        return f"{num_answered:,} answerable and {num_unanswered:,} unanswerable questions"
    counts = count_labels(examples, kind)
    total = counts.total() if kind in ("tags", "entities") else len(examples)
    parts = [
        f"{shorten_label(label)} {count:,} ({count / total:.1%})"
        for label, count in counts.most_common(_MAX_LISTED_LABELS)
    ]
    if len(counts) > _MAX_LISTED_LABELS:
        parts.append(f"and {len(counts) - _MAX_LISTED_LABELS:,} more")
    num_unlabeled = sum(not example.label for example in examples) if kind == "multi" else 0
    if num_unlabeled:
        parts.append(f"no label {num_unlabeled:,} ({num_unlabeled / total:.1%})")
    noun = {"entities": "entity type", "tags": "tag"}.get(kind, "label")
    number = count_noun(len(counts), noun)
    return f"{number}: {', '.join(parts)}" if parts else number


def get_label_warnings(examples: Sequence[Any], task: TaskSettings) -> list[str]:
    """Return warnings about the training labels of single-label and multi-label tasks."""
    if task.kind not in ("single", "multi"):
        return []
    counts = count_labels(examples, task.kind)
    warnings = _get_case_warnings(counts)
    if task.kind == "multi":
        if not task.label_columns:
            warnings += _get_separator_warnings(counts, task.label_separator)
        return warnings
    return warnings + _get_class_count_warnings(counts, examples, task)


def _get_case_warnings(labels: Collection[str]) -> list[str]:
    """Return a warning if labels differ only in case, such as "Good" and "good"."""
    first_labels: dict[str, str] = {}
    for label in sorted(labels):
        first_label = first_labels.setdefault(label.casefold(), label)
        if first_label != label:
            warning = (
                f"the labels {shorten_label(first_label)!r} and {shorten_label(label)!r} differ "
                "only in case, but are different classes; if they are the same, correct the data"
            )
            return [warning]
    return []


def _get_separator_warnings(labels: Collection[str], separator: str) -> list[str]:
    """Return a warning if a label consists of other labels with a common separator between them.

    Args:
        labels: The labels.
        separator: The separator that was used to read the labels.
    """
    for label in sorted(labels):
        parts = [part.strip() for part in re.split("[,;|]", label)]
        if len(parts) > 1 and any(part in labels for part in parts):
            warning = (
                f"{shorten_label(label)!r} is a single label; several labels in one cell are "
                f"separated by {separator}, as in a{separator}b (task.label_separator)"
            )
            return [warning]
    return []


def _get_class_count_warnings(
    counts: Counter[str], examples: Sequence[Any], task: TaskSettings
) -> list[str]:
    """Return a warning about the number of classes, or about the share of the largest one."""
    if 2 * len(counts) > len(examples):
        warning = (
            f"{len(counts):,} different labels in {len(examples):,} examples: the column "
            f"{task.label_column!r} may not contain classes; select the right column with --label, "
            "or predict numbers with --kind regression"
        )
        return [warning]
    numbers = _parse_numbers(counts)
    if len(numbers) > _MAX_NUMERIC_CLASSES:
        warning = (
            f"{len(numbers):,} different numbers are used as class labels; if they are scores, "
            "use --kind regression"
        )
        return [warning]
    [(label, count)] = counts.most_common(1)
    share = count / len(examples)
    if share <= _DOMINANT_SHARE or task.class_weights == "balanced":
        return []
    warning = (
        f"{share:.1%} of the examples have the label {shorten_label(label)!r}, so a model that "
        f"always predicts it reaches accuracy {share:.4f}; compare macro_f1, or weight rare labels "
        "with --set task.class_weights=balanced"
    )
    return [warning]


def reject_numeric_labels(examples: Sequence[Any], task: TaskSettings) -> None:
    """Raise TaskError if the labels of a single-label task look like scores.

    Numbers look like scores if any of them is fractional, or if there are many different numbers
    that are not consecutive integers from 0 or 1.
    """
    if task.kind != "single" or task.labels:
        return
    counts = count_labels(examples, task.kind)
    numbers = _parse_numbers(counts)
    if not numbers or _are_class_indices(numbers):
        return
    fractions = [value for value in numbers if not value.is_integer()]
    if not fractions and len(numbers) <= _MAX_NUMERIC_CLASSES:
        return
    sample = f"such as {fractions[0]:g}" if fractions else f"{min(numbers):g} to {max(numbers):g}"
    raise TaskError(
        f"{task.train_file}: the column {task.label_column!r} has {len(numbers):,} "
        f"different numbers ({sample}), each of which would be a class; use --kind "
        "regression to predict a number, or --kind single if each number is a class",
    )


def _parse_numbers(labels: Iterable[str]) -> list[float]:
    """Convert labels to numbers; return an empty list if any label is not a finite number."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def _are_class_indices(numbers: Sequence[float]) -> bool:
    """Return whether numbers are consecutive integers from 0 or 1."""
    first = min(numbers)
    return first in (0, 1) and sorted(numbers) == [first + index for index in range(len(numbers))]


def get_accuracy_warning(examples: Sequence[Any], accuracy: float) -> str | None:
    """Return a warning if always predicting the majority class would be at least as accurate."""
    [(label, count)] = count_labels(examples, "single").most_common(1)
    majority_share = count / len(examples)
    if accuracy > majority_share or accuracy == 1:
        return None
    return (
        f"accuracy {accuracy:.4f} is not better than always predicting the majority class "
        f"{shorten_label(label)!r} ({majority_share:.4f}); check the text and label columns, or "
        "train longer and at a higher learning rate, such as --epochs 20 --lr 3e-4"
    )


def shorten_label(label: str) -> str:
    """Return a label for a message: on one line, with at most ``_MAX_LABEL_LENGTH`` characters."""
    line = " ".join(label.split())
    return line if len(line) <= _MAX_LABEL_LENGTH else line[: _MAX_LABEL_LENGTH - 1] + "…"
