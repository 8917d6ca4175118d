"""Label counts of a data set, their one-line summary, and warnings about them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bertsmith.bundle import Kind
from bertsmith.tasks.entities import entities
from bertsmith.tasks.settings import TaskSettings

#: Labels that a summary names, and the characters of each.
_NAMED, _NAME_LENGTH = 10, 40
#: A label with a larger share of the examples is reported: accuracy says little there.
_DOMINANT_SHARE = 0.8


def count_labels(examples: Sequence[Any], kind: Kind) -> Counter[str]:
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
        return Counter(entity.label for example in examples for entity in entities(example.tags))
    return Counter()


def summarize_labels(examples: Sequence[Any], kind: Kind) -> str:
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
        f"{shorten(name)} {count:,} ({count / total:.1%})"
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
    ((name, count),) = counts.most_common(1)
    share = count / len(examples)
    if share <= _DOMINANT_SHARE or task.class_weights == "balanced":
        return []
    warning = (
        f"{share:.1%} of the examples have the label {shorten(name)!r}, so a model that always "
        f"answers it reaches accuracy {share:.4f}; compare macro_f1, or weight rare labels with "
        "--set task.class_weights=balanced"
    )
    return [warning]


def warn_about_accuracy(examples: Sequence[Any], accuracy: float) -> str | None:
    """Return a warning if always answering the commonest held-out label is as accurate."""
    ((name, count),) = count_labels(examples, "single").most_common(1)
    majority = count / len(examples)
    if accuracy > majority or accuracy == 1:
        return None
    return (
        f"accuracy {accuracy:.4f} is no better than always answering {shorten(name)!r} "
        f"({majority:.4f}); check the columns of text and label, train longer (--epochs), or try "
        "another learning rate (--lr)"
    )


def shorten(name: str) -> str:
    """Return a label for a message, at most 40 characters of it on one line."""
    line = " ".join(name.split())
    return line if len(line) <= _NAME_LENGTH else line[: _NAME_LENGTH - 1] + "…"
