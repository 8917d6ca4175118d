"""Label counts of a data set, their one-line summary, and warnings about them."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bertsmith.bundle import TaskKind
from bertsmith.errors import TaskError
from bertsmith.tasks.entities import extract_entities
from bertsmith.tasks.settings import TaskSettings

#: Labels that a summary names, and the characters of each.
_NAMED, _NAME_LENGTH = 10, 40
#: A label with a larger share of the examples is reported: accuracy says little there.
_DOMINANT_SHARE = 0.8
#: More different numbers than this are rarely the names of classes.
_MANY_NUMBERS = 20


def count_labels(examples: Sequence[Any], kind: TaskKind) -> Counter[str]:
    """Count the labels of the examples of a family.

    Labels of a text, entity types, tags of words, or indices of right endings. Empty for numbers
    and spans.
    """
    if kind == "single":
        return Counter(example.label for example in examples)
    if kind == "multi":
        return Counter(name for example in examples for name in example.label)
    if kind == "choice":
        return Counter(f"ending {example.right}" for example in examples)
    if kind == "tags":
        return Counter(tag for example in examples for tag in example.tags)
    if kind == "entities":
        return Counter(
            entity.label for example in examples for entity in extract_entities(example.tags)
        )
    return Counter()


def summarize_labels(examples: Sequence[Any], kind: TaskKind) -> str:
    """Return one line with the commonest labels and their counts, or with the range of numbers."""
    if kind == "regression":
        values = [float(example.label) for example in examples]
        mean = sum(values) / len(values)
        return f"scores from {min(values):g} to {max(values):g}, mean {mean:.4g}"
    if kind == "span":
        answered = sum(bool(example.answers) for example in examples)
        return f"questions with an answer {answered:,}, without {len(examples) - answered:,}"
    counts = count_labels(examples, kind)
    total = counts.total() if kind in ("tags", "entities") else len(examples)
    parts = [
        f"{shorten_label(name)} {count:,} ({count / total:.1%})"
        for name, count in counts.most_common(_NAMED)
    ]
    if len(counts) > _NAMED:
        parts.append(f"and {len(counts) - _NAMED:,} more")
    word = {"entities": "entity type", "tags": "tag"}.get(kind, "label")
    plural = "" if len(counts) == 1 else "s"
    return f"{len(counts):,} {word}{plural}: {', '.join(parts)}"


def warn_about_labels(examples: Sequence[Any], task: TaskSettings) -> list[str]:
    """Return warnings about the training labels of a classifier; none for other kinds."""
    if task.kind != "single":
        return []
    counts = count_labels(examples, task.kind)
    if 2 * len(counts) > len(examples):
        warning = (
            f"{len(counts):,} different labels in {len(examples):,} examples: the column "
            f"{task.label!r} may hold no classes; name the right column with --label, or predict "
            "numbers with --kind regression"
        )
        return [warning]
    numbers = _parse_numbers(counts)
    if len(numbers) > _MANY_NUMBERS:
        warning = (
            f"{len(numbers):,} different numbers are labels, each a class; if they are a score, "
            "give --kind regression"
        )
        return [warning]
    ((name, count),) = counts.most_common(1)
    share = count / len(examples)
    if share <= _DOMINANT_SHARE or task.class_weights == "balanced":
        return []
    warning = (
        f"{share:.1%} of the examples have the label {shorten_label(name)!r}, so a model that always "
        f"answers it reaches accuracy {share:.4f}; compare macro_f1, or weight rare labels with "
        "--set task.class_weights=balanced"
    )
    return [warning]


def reject_numeric_labels(examples: Sequence[Any], task: TaskSettings) -> None:
    """Raise TaskError where the labels of a classifier are a scale of numbers rather than classes.

    Numbers are a scale if one is not whole, or if there are many that do not simply count classes
    from 0 or 1.
    """
    if task.kind != "single" or task.labels:
        return
    counts = count_labels(examples, task.kind)
    numbers = _parse_numbers(counts)
    if not numbers or _are_indices(numbers):
        return
    fractions = [value for value in numbers if not value.is_integer()]
    if not fractions and len(numbers) <= _MANY_NUMBERS:
        return
    shown = f"such as {fractions[0]:g}" if fractions else f"{min(numbers):g} to {max(numbers):g}"
    raise TaskError(
        f"{task.train}: the column {task.label!r} holds {len(numbers):,} different numbers "
        f"({shown}), each of which would be a class; give --kind regression to predict a number, "
        "or --kind single if each is a class"
    )


def _parse_numbers(labels: Iterable[str]) -> list[float]:
    """Return the labels as numbers; nothing if one of them is none."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def _are_indices(numbers: Sequence[float]) -> bool:
    """Tell whether numbers are 0, 1, 2 and so on, or 1, 2, 3, without a gap."""
    return min(numbers) in (0, 1) and set(numbers) == {
        min(numbers) + n for n in range(len(numbers))
    }


def warn_about_accuracy(examples: Sequence[Any], accuracy: float) -> str | None:
    """Return a warning if always answering the commonest held-out label is as accurate."""
    ((name, count),) = count_labels(examples, "single").most_common(1)
    majority = count / len(examples)
    if accuracy > majority or accuracy == 1:
        return None
    return (
        f"accuracy {accuracy:.4f} is no better than always answering {shorten_label(name)!r} "
        f"({majority:.4f}); check the columns of text and label, train longer (--epochs), or try "
        "another learning rate (--lr)"
    )


def shorten_label(name: str) -> str:
    """Return a label for a message, at most 40 characters of it on one line."""
    line = " ".join(name.split())
    return line if len(line) <= _NAME_LENGTH else line[: _NAME_LENGTH - 1] + "…"
