"""Texts and pairs with a label, several labels or a number: reading them and scoring answers.

It never trains, and it never prints.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import HeadConfig, TaskKind
from bertsmith.errors import TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts, MicroBatch, ModelInputs
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import (
    Row,
    get_cell,
    get_text,
    read_task_rows,
    read_unique_id,
    reject_lone_surrogates,
)
from bertsmith.tasks.text_pairs import add_special_tokens, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

#: As in the original's run_classifier.py.
DEFAULT_LENGTH = 128
ROC_AUC = "roc_auc"
#: What parts the labels of one text in a multi-label column of CSV or TSV.
LABEL_SEPARATOR = "|"


@dataclass(frozen=True)
class TextExample:
    """One text, or a pair, and what is right. ``where``: file and line, for messages.

    label: a name, a number, a set of names, or None where it is not known.
    """

    texts: tuple[str, ...]
    label: str | float | frozenset[str] | None
    location: str


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,
    labeled: bool = True,
) -> tuple[list[TextExample], ExampleCounts]:
    """Read texts or pairs from a table; see ``Family``."""
    examples, counts, seen = [], ExampleCounts(), set[str]()
    for row in read_task_rows(path, task, counts):
        with counts.count_example(row.location, task, labeled=labeled):
            read_unique_id(row, task.id, seen)
            examples.append(_example(row, task, labels, labelled=labeled))
    return counts.require_examples(examples, path), counts


def _example(
    row: Row, task: TaskSettings, labels: Sequence[str] | None, *, labelled: bool
) -> TextExample:
    names = (task.text, task.pair) if task.pair else (task.text,)
    texts = tuple(get_text(row, name) for name in names)
    label = None
    if labelled:
        label = _label(get_cell(row, task.label), task.kind, labels)
        _refuse_unknown(label, labels)
    return TextExample(texts, label, row.location)


def _label(
    value: Any, kind: TaskKind, labels: Sequence[str] | None = None
) -> str | float | frozenset[str]:
    """Return the label in a cell. labels: the known names, where "nan" may be one."""
    if kind == "multi":
        given = value.split(LABEL_SEPARATOR) if isinstance(value, str) else value
        given = given if isinstance(given, list) else [given]
        for item in given:
            _refuse_missing(item, labels)
        return frozenset(name for name in map(_name, given) if name)
    _refuse_missing(value, labels)
    if kind == "single":
        if isinstance(value, list):
            raise BadExampleError("several labels where one is expected", "; see --kind multi")
        name = _name(value)
        if not name:
            raise BadExampleError("an empty label")
        return name
    if isinstance(value, str) and not value.strip():
        raise BadExampleError("an empty label")
    if isinstance(value, bool):
        raise BadExampleError("a score that is no number", f": {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadExampleError("a score that is no number", f": {value!r}") from None
    if not math.isfinite(number):
        raise BadExampleError("a score that is not finite", f": {value!r}")
    return number


def _refuse_missing(value: Any, labels: Sequence[str] | None) -> None:
    """Raise BadExampleError for NaN, as pandas writes a missing value, in any case.

    A class that is really called so can be named in ``task.labels``.
    """
    if isinstance(value, float) and math.isnan(value):
        raise BadExampleError("a missing label", ": NaN")
    if (
        isinstance(value, str)
        and value.strip().lower() == "nan"
        and value.strip() not in (labels or ())
    ):
        raise BadExampleError(
            "a missing label", f": {value!r} (a class of that name has to be listed in task.labels)"
        )


def _name(value: Any) -> str:
    """Return the name of a label; JSON's true and 1 are named as they are written, 1.0 as 1."""
    if isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise BadExampleError("a label that is no name", f": {value!r}")
    if isinstance(value, float):
        # A column of whole numbers with gaps comes as 1.0 and, at a gap, as no number at all.
        if not math.isfinite(value):
            raise BadExampleError("a label that is not finite", f": {value!r}")
        value = int(value) if value.is_integer() else value
    name = str(value).strip()
    reject_lone_surrogates(name, "label")
    return name


def _refuse_unknown(label: str | float | frozenset[str], labels: Sequence[str] | None) -> None:
    if labels is None or isinstance(label, float):
        return
    strange = sorted((label if isinstance(label, frozenset) else {label}) - set(labels))
    if strange:
        known = ", ".join(map(repr, labels[:20]))
        raise BadExampleError("an unknown label", f": {strange[0]!r}; known are {known}")


def collect_labels(examples: Sequence[TextExample], where: str) -> tuple[str, ...]:
    """Return the labels that occur, numbers by size, other names by the alphabet.

    Scores have none. Raises TaskError if all are the same: nothing could be learnt.
    """
    if all(isinstance(example.label, float) for example in examples):
        first = examples[0].label
        if all(example.label == first for example in examples):
            raise TaskError(f"{where}: every score is {first}; expected two different ones")
        return ()
    found: set[str] = set()
    for example in examples:
        if isinstance(example.label, str):
            found.add(example.label)
        elif isinstance(example.label, frozenset):
            found |= example.label
    if len(found) < 2:
        raise TaskError(
            f"{where}: {'every label is ' + repr(min(found)) if found else 'there is no label'}; "
            "expected two different ones at least"
        )
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def encode_examples(
    examples: Sequence[TextExample],
    tokenizer: Tokenizer,
    head: HeadConfig,
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Return [CLS] A [SEP] or [CLS] A [SEP] B [SEP] of each example; see ``Family``."""
    assert task.length is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    texts = [text for example in examples for text in example.texts]
    rest = iter(tokenizer.encode_batch(texts))
    sequences, cut_off = [], []
    for example in examples:
        ids = [next(rest) for _ in example.texts]
        kept = truncate_texts(ids, task.length - 1 - len(ids))
        cut_off.append(sum(map(len, kept)) < sum(map(len, ids)))
        sequences.append([add_special_tokens(kept, tokenizer)])
    counts.num_truncated += sum(cut_off)
    where = [example.location for example in examples]
    targets = targets_of(examples, head)
    return ModelInputs(
        sequences, where, cut_off, None if targets is None else np.split(targets, len(examples))
    )


def targets_of(examples: Sequence[TextExample], head: HeadConfig) -> NDArray[Any] | None:
    """Return what is right as numbers, or None where a label is not known.

    int64 [n] class numbers, float32 [n] scores, or float32 [n, C] of 0 and 1.
    """
    given = [example.label for example in examples]
    if any(label is None for label in given):
        return None
    if head.kind == "regression":
        return np.array(given, np.float32)
    number = {name: index for index, name in enumerate(head.labels)}
    if head.kind == "single":
        return np.array([number[str(label)] for label in given], np.int64)
    matrix = np.zeros((len(given), head.num_outputs), np.float32)
    for row, label in zip(matrix, given, strict=True):
        assert isinstance(label, frozenset)
        row[[number[name] for name in label]] = 1.0
    return matrix


def compute_losses(outputs: Tensor, part: MicroBatch, head: HeadConfig) -> Tensor:
    """Return float32 [B]: cross-entropy, mean binary cross-entropy or squared error.

    outputs: float32 [B, C].
    """
    if head.kind == "single":
        return F.cross_entropy(outputs, part.targets, reduction="none")
    if head.kind == "multi":
        each = F.binary_cross_entropy_with_logits(outputs, part.targets, reduction="none")
        return each.mean(-1)
    return (outputs[:, 0] - part.targets) ** 2


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TextExample],
    head: HeadConfig,
    task: TaskSettings,
) -> dict[str, float]:
    """Return the named metrics; see ``Family``."""
    assert inputs.targets is not None
    logits, targets = np.concatenate(outputs), np.concatenate(inputs.targets)
    if head.kind == "regression":
        said, right = logits[:, 0].astype(np.float64), targets.astype(np.float64)
        return {name: metrics.REGRESSION_METRICS[name](said, right) for name in task.metrics}
    own = of_one_label if head.kind == "single" else of_several_labels
    scores = own(logits, targets, [name for name in task.metrics if ":" not in name])
    if len(scores) < len(task.metrics):
        classes = compute_class_report(outputs, inputs, examples, head)["classes"]
        scores |= metrics.select_label_scores(task.metrics, classes)
    return {name: scores[name] for name in task.metrics}


def of_one_label(
    logits: NDArray[np.float32], targets: NDArray[np.int64], names: Sequence[str]
) -> dict[str, float]:
    """Return the named metrics of classes. logits: [n, C]. targets: [n]."""
    chosen = logits.argmax(-1)
    scores = {
        name: metrics.CLASSIFICATION_METRICS[name](chosen, targets)
        for name in names
        if name != ROC_AUC
    }
    if ROC_AUC in names:
        # The order within a class is that of its probability, not of its logit.
        shares = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        right = targets[:, None] == np.arange(logits.shape[1])
        if logits.shape[1] == 2:
            # Of two classes both areas are equal, up to rounding.
            shares, right = shares[:, 1:], right[:, 1:]
        scores[ROC_AUC] = metrics.mean_roc_auc(shares, right)
    return scores


def of_several_labels(
    logits: NDArray[np.float32], targets: NDArray[np.float32], names: Sequence[str]
) -> dict[str, float]:
    """Return the named metrics of texts with several labels. logits, targets: [n, C]."""
    predicted, right = (logits > 0).astype(np.int64), targets.astype(np.int64)
    by_label = [metrics.f1(*own) for own in zip(predicted.T, right.T, strict=True)]
    scores = {
        "f1": metrics.f1(predicted, right),
        "accuracy": float((predicted == right).all(-1).mean()),
        "macro_f1": float(np.mean(by_label)),
    }
    if ROC_AUC in names:
        scores[ROC_AUC] = metrics.mean_roc_auc(logits.astype(np.float64), right == 1)
    return {name: scores[name] for name in names}


def compute_class_report(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TextExample],  # noqa: ARG001 - other families need them
    head: HeadConfig,
) -> dict[str, Any]:
    """Return the scores of each label, and what it was confused with; see ``Family``."""
    assert inputs.targets is not None
    if head.kind == "regression":
        return {}
    logits, targets = np.concatenate(outputs), np.concatenate(inputs.targets)
    if head.kind == "single":
        return metrics.classification_report(logits.argmax(-1), targets, head.labels)
    predicted, right = logits > 0, targets > 0
    counts = ((predicted & right).sum(0), predicted.sum(0), right.sum(0))
    return {
        "classes": {
            name: metrics.scores_from_counts(*map(int, own))
            for name, *own in zip(head.labels, *counts, strict=True)
        }
    }


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the usual metrics and the known ones; see ``Family``."""
    if task.kind == "single":
        # F1 is that of class 1: of several classes nobody means it.
        several = len(task.labels) > 2
        known = tuple(
            name for name in metrics.CLASSIFICATION_METRICS if not (several and name == "f1")
        )
        return ("accuracy", "macro_f1"), (*known, ROC_AUC)
    if task.kind == "multi":
        return ("f1", "accuracy"), ("f1", "accuracy", "macro_f1", ROC_AUC)
    return ("spearman", "pearson"), tuple(metrics.REGRESSION_METRICS)
