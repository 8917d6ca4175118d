"""Metrics of GLUE and KLUE, ROC-AUC, regression errors, and scores by class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def accuracy_score(predicted: Ints, true: Ints) -> float:
    """Return the share of correct predictions; both arrays are int64 [n]."""
    return float((predicted == true).mean())


def f1_score(predicted: Ints, true: Ints) -> float:
    """Return the F1 of class 1, 0 without true positives; both arrays are int64 of equal shape.

    For matrices [n, C] of zeros and ones, this is the micro-averaged F1 of multi-label
    classification.
    """
    true_positives = int(((predicted == 1) & (true == 1)).sum())
    total = int((predicted == 1).sum()) + int((true == 1).sum())
    return 2 * true_positives / total if total else 0.0


def macro_f1_score(predicted: Ints, true: Ints) -> float:
    """Return the mean F1 of the classes that occur in either array; both are int64 [n]."""
    predicted_counts, true_counts, correct_counts = _count_classes(predicted, true)
    return float(np.mean(2 * correct_counts / (predicted_counts + true_counts)))


def _count_classes(predicted: Ints, true: Ints) -> tuple[Ints, Ints, Ints]:
    """Count the predicted, true and correctly predicted examples of each class that occurs.

    Both arrays are int64 [n]; each result is int64 [C].
    """
    classes, indices = np.unique(np.concatenate([predicted, true]), return_inverse=True)
    predicted_indices, true_indices = indices[: len(true)], indices[len(true) :]
    correct_indices = true_indices[predicted_indices == true_indices]
    predicted_counts, true_counts, correct_counts = (
        np.bincount(class_indices, minlength=len(classes)).astype(np.int64)
        for class_indices in (predicted_indices, true_indices, correct_indices)
    )
    return predicted_counts, true_counts, correct_counts


def matthews_corrcoef(predicted: Ints, true: Ints) -> float:
    """Return the Matthews correlation for any number of classes (Gorodkin 2004).

    Both arrays are int64 [n]. The correlation is 0 if either has a single class, as in
    scikit-learn.
    """
    n = len(true)
    # Products of integers could overflow.
    predicted_counts, true_counts, correct_counts = (
        counts.astype(np.float64) for counts in _count_classes(predicted, true)
    )
    numerator = correct_counts.sum() * n - predicted_counts @ true_counts
    squared_denominator = (n * n - predicted_counts @ predicted_counts) * (
        n * n - true_counts @ true_counts
    )
    if squared_denominator <= 0:
        return 0.0
    return float(numerator / np.sqrt(squared_denominator))


def compute_class_scores(num_correct: int, num_predicted: int, support: int) -> dict[str, float]:
    """Return precision, recall, F1 and support of a class; undefined scores are 0.

    Args:
        num_correct: Number of true positives.
        num_predicted: Number of examples that are predicted as the class.
        support: Number of examples of the class.
    """
    total = num_predicted + support
    return {
        "precision": num_correct / num_predicted if num_predicted else 0.0,
        "recall": num_correct / support if support else 0.0,
        "f1": 2 * num_correct / total if total else 0.0,
        "support": support,
    }


def classification_report(predicted: Ints, true: Ints, labels: Sequence[str]) -> dict[str, Any]:
    """Return the scores of each class and the confusion matrix.

    Memory and time do not grow with the square of the number of classes.

    Args:
        predicted: Class indices, int64 [n].
        true: Class indices, int64 [n].
        labels: Names of the classes.

    Returns:
        ``classes`` has the scores of each label. ``confusion`` maps each true label to the nonzero
        counts of the labels that are predicted for it.
    """
    num_classes = len(labels)
    pairs, counts = np.unique(true * num_classes + predicted, return_counts=True)
    confusion: dict[str, dict[str, int]] = {label: {} for label in labels}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        true_index, predicted_index = divmod(pair, num_classes)
        confusion[labels[true_index]][labels[predicted_index]] = count
    predicted_counts = np.bincount(predicted, minlength=num_classes).tolist()
    true_counts = np.bincount(true, minlength=num_classes).tolist()
    classes = {
        label: compute_class_scores(
            confusion[label].get(label, 0), predicted_counts[index], true_counts[index]
        )
        for index, label in enumerate(labels)
    }
    return {"classes": classes, "confusion": confusion}


def pearson_correlation(predicted: Floats, true: Floats) -> float:
    """Return the Pearson correlation, NaN if either array is constant; both are float64 [n]."""
    if len(true) < 2 or np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return float("nan")
    x, y = predicted - predicted.mean(), true - true.mean()
    # Without scaling, squares of very large or very small numbers overflow or become 0.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman_correlation(predicted: Floats, true: Floats) -> float:
    """Return the Spearman correlation; both arrays are float64 [n]. Ties get their mean rank."""
    return pearson_correlation(_mean_ranks(predicted), _mean_ranks(true))


def mean_squared_error(predicted: Floats, true: Floats) -> float:
    """Return the mean squared error; both arrays are float64 [n]."""
    return float(np.mean((predicted - true) ** 2))


def mean_absolute_error(predicted: Floats, true: Floats) -> float:
    """Return the mean absolute error; both arrays are float64 [n]."""
    return float(np.mean(np.abs(predicted - true)))


def f1_score_at_3(predicted: Floats, true: Floats) -> float:
    """Return the F1 of KLUE-STS, for which similarity scores from 0 to 5 are binarized at 3.

    Both arrays are float64 [n]. Source: Park et al. 2021 (arXiv:2105.09680).
    """
    return f1_score((predicted >= 3.0).astype(np.int64), (true >= 3.0).astype(np.int64))


def roc_auc_score(scores: Floats, is_positive: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve, NaN if all examples are of one class.

    The area is the probability that a random positive example has a higher score than a random
    negative example. Equal scores count half.

    Args:
        scores: float64 [n].
        is_positive: bool [n].
    """
    num_positive = int(is_positive.sum())
    num_negative = len(is_positive) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    # The sum of the ranks of the positive examples if all of them had the lowest scores.
    min_rank_sum = num_positive * (num_positive + 1) / 2
    num_ordered_pairs = _mean_ranks(scores)[is_positive].sum() - min_rank_sum
    return float(num_ordered_pairs / (num_positive * num_negative))


def macro_roc_auc_score(scores: Floats, is_positive: NDArray[np.bool_]) -> float:
    """Return the mean ROC-AUC of the columns, NaN if it is undefined for all of them.

    Columns without positive or without negative examples are ignored.

    Args:
        scores: float64 [n, C].
        is_positive: Whether example i has class c, bool [n, C].
    """
    areas = [
        roc_auc_score(column_scores, is_column_positive)
        for column_scores, is_column_positive in zip(scores.T, is_positive.T, strict=True)
    ]
    defined_areas = [area for area in areas if not np.isnan(area)]
    return float(np.mean(defined_areas)) if defined_areas else float("nan")


def parse_label_metric(name: str) -> tuple[str, str] | None:
    """Split a metric of one label, such as "f1:LOC", into ("f1", "LOC"); None for other metrics."""
    score, _, label = name.partition(":")
    if not label or score not in PER_LABEL_SCORES:
        return None
    return score, label


def select_label_scores(
    names: Sequence[str],
    classes: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Return the named metrics of single labels, such as "f1:LOC".

    Args:
        names: Names of metrics. Metrics that are not of a single label are ignored.
        classes: The scores of each label; see ``classification_report``.
    """
    scores = {}
    for name in names:
        score_and_label = parse_label_metric(name)
        if score_and_label is not None:
            score, label = score_and_label
            # ``classes`` lacks entity types that do not occur.
            scores[name] = classes.get(label, {}).get(score, 0.0)
    return scores


def _mean_ranks(values: Floats) -> Floats:
    """Return the 1-based ranks of the values, float64 [n]; equal values get their mean rank."""
    _, value_indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    mean_ranks: Floats = (last_ranks - (counts - 1) / 2).astype(np.float64)
    return mean_ranks[value_indices]


LOWER_IS_BETTER = frozenset({"mse", "mae"})
#: Scores of a single label, which are selected by metrics such as "f1:LOC".
PER_LABEL_SCORES = ("precision", "recall", "f1")
CLASSIFICATION_METRICS: dict[str, Callable[[Ints, Ints], float]] = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "macro_f1": macro_f1_score,
    "matthews": matthews_corrcoef,
}
REGRESSION_METRICS: dict[str, Callable[[Floats, Floats], float]] = {
    "pearson": pearson_correlation,
    "spearman": spearman_correlation,
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
    "f1_at_3.0": f1_score_at_3,
}
