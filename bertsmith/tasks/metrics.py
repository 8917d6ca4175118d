"""Metrics of predictions: those of GLUE and KLUE, ROC-AUC, errors of numbers, scores by class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def accuracy(predicted: Ints, right: Ints) -> float:
    """Return the share of equal entries of two int64 [n]."""
    return float((predicted == right).mean())


def f1(predicted: Ints, right: Ints) -> float:
    """Return the F1 of class 1 of two, int64 arrays of one shape; 0 where nothing is found.

    Over 0/1 matrices [n, C] it is the micro-averaged F1 of a multi-label task.
    """
    found = int(((predicted == 1) & (right == 1)).sum())
    total = int((predicted == 1).sum()) + int((right == 1).sum())
    return 2 * found / total if total else 0.0


def macro_f1(predicted: Ints, right: Ints) -> float:
    """Return the mean of the F1 of each class that occurs in either of two int64 [n]."""
    classes = np.union1d(predicted, right)
    each = [f1((predicted == one).astype(np.int64), (right == one).astype(np.int64))
            for one in classes]  # fmt: skip
    return float(np.mean(each))


def matthews_correlation(predicted: Ints, right: Ints) -> float:
    """Return Matthews' correlation of two int64 [n] of any number of classes (Gorodkin 2004).

    It is 0 where either has one class only, as scikit-learn says.
    """
    classes, joint = np.unique(np.concatenate([predicted, right]), return_inverse=True)
    size, n = len(classes), len(right)
    table = np.zeros((size, size))
    np.add.at(table, (joint[n:], joint[:n]), 1.0)
    said, true = table.sum(0), table.sum(1)
    above = np.trace(table) * n - said @ true
    below = (n * n - said @ said) * (n * n - true @ true)
    return float(above / np.sqrt(below)) if below > 0 else 0.0


def confusion_matrix(predicted: Ints, right: Ints, num_classes: int) -> Ints:
    """Return int64 [C, C]: row i, column j counts the examples of class i predicted as class j.

    predicted, right: int64 [n], class numbers below ``num_classes``.
    """
    cells = np.bincount(right * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).astype(np.int64)


def scores_from_counts(correct: int, predicted: int, support: int) -> dict[str, float]:
    """Return precision, recall and F1, 0 where undefined, and the support of one class.

    correct: true positives. predicted: times it was predicted. support: times it is right.
    """
    total = predicted + support
    return {
        "precision": correct / predicted if predicted else 0.0,
        "recall": correct / support if support else 0.0,
        "f1": 2 * correct / total if total else 0.0,
        "support": support,
    }


def classification_report(predicted: Ints, right: Ints, labels: Sequence[str]) -> dict[str, Any]:
    """Return ``classes``, the scores of each label, and ``confusion``, of two int64 [n].

    ``confusion`` maps each right label to the counts of what was predicted, without zeros.
    """
    matrix = confusion_matrix(predicted, right, len(labels))
    totals = zip(labels, matrix.diagonal(), matrix.sum(0), matrix.sum(1), strict=True)
    return {
        "classes": {name: scores_from_counts(*map(int, counts)) for name, *counts in totals},
        "confusion": {
            name: {labels[place]: int(row[place]) for place in np.flatnonzero(row).tolist()}
            for name, row in zip(labels, matrix, strict=True)
        },
    }


def pearson(predicted: Floats, right: Floats) -> float:
    """Return Pearson's correlation of two float64 [n]; NaN where either is constant."""
    if len(right) < 2 or np.ptp(predicted) == 0 or np.ptp(right) == 0:
        return float("nan")
    x, y = predicted - predicted.mean(), right - right.mean()
    # Scaled first, so that squares of very small or very large numbers stay finite.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman(predicted: Floats, right: Floats) -> float:
    """Return Spearman's correlation of two float64 [n], ties by their mean rank."""
    return pearson(_ranks(predicted), _ranks(right))


def mse(predicted: Floats, right: Floats) -> float:
    """Return the mean squared error of two float64 [n]."""
    return float(np.mean((predicted - right) ** 2))


def mae(predicted: Floats, right: Floats) -> float:
    """Return the mean absolute error of two float64 [n]."""
    return float(np.mean(np.abs(predicted - right)))


def f1_at_3(predicted: Floats, right: Floats) -> float:
    """Return the F1 of the scores from 3.0 on of two float64 [n], as KLUE-STS has it.

    Park et al. 2021 (arXiv:2105.09680): similarities from 0 to 5 are binarized at 3.
    """
    return f1((predicted >= 3.0).astype(np.int64), (right >= 3.0).astype(np.int64))


def roc_auc(scores: Floats, right: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve; NaN where ``right`` has one value only.

    It is the probability that a positive example scores above a negative one, ties counting half.
    scores: float64 [n]. right: bool [n].
    """
    positives = int(right.sum())
    negatives = len(right) - positives
    if not positives or not negatives:
        return float("nan")
    above = _ranks(scores)[right].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def mean_roc_auc(scores: Floats, right: NDArray[np.bool_]) -> float:
    """Return the mean ROC-AUC of the columns that have both values, NaN where none has.

    scores: float64 [n, C]. right: bool [n, C], one-vs-rest for classes.
    """
    areas = [roc_auc(*column) for column in zip(scores.T, right.T, strict=True)]
    defined = [area for area in areas if not np.isnan(area)]
    return float(np.mean(defined)) if defined else float("nan")


def parse_label_metric(name: str) -> tuple[str, str] | None:
    """Return score and label of a metric of one label, such as ("f1", "LOC") of "f1:LOC"."""
    score, colon, label = name.partition(":")
    return (score, label) if colon and label and score in PER_LABEL_SCORES else None


def select_label_scores(
    names: Sequence[str], classes: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return those of the named metrics that are of one label; see ``classification_report``."""
    parts = {name: parse_label_metric(name) for name in names}
    # A type of entities that occurs nowhere has no scores.
    return {
        name: classes.get(part[1], {}).get(part[0], 0.0)
        for name, part in parts.items()
        if part is not None
    }


def _ranks(values: Floats) -> Floats:
    """Return the rank of each of [n] values from 1, float64; equal ones share their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[place].astype(np.float64)
    return ranks


#: Metrics of which less is better; of all others more is.
LOWER_IS_BETTER = frozenset({"mse", "mae"})
#: Scores that there are of each label, named as in "f1:LOC".
PER_LABEL_SCORES = ("precision", "recall", "f1")
#: Metrics over class numbers, and over numbers.
CLASSIFICATION_METRICS: dict[str, Callable[[Ints, Ints], float]] = {
    "accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews_correlation,
}  # fmt: skip
REGRESSION_METRICS: dict[str, Callable[[Floats, Floats], float]] = {
    "pearson": pearson, "spearman": spearman, "mse": mse, "mae": mae, "f1_at_3.0": f1_at_3,
}  # fmt: skip
