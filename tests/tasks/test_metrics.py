"""Metrics, compared with scikit-learn and SciPy on random inputs and edge cases."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics

from bertsmith.tasks import metrics

#: Predicted and true classes of 1 to 60 examples.
CLASS_PAIRS = st.integers(1, 60).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
    )
)
#: Predicted and true classes, 0 or 1, of 1 to 40 examples.
BINARY_PAIRS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
    )
)
#: Predicted and true scores of 3 to 40 examples. Small integers make ties frequent.
NUMBER_PAIRS = st.integers(3, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-5, 5), min_size=n, max_size=n),
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=n, max_size=n),
    )
)


@given(CLASS_PAIRS)
def test_multiclass_metrics_equal_scikit_learn(pair: tuple[list[int], list[int]]) -> None:
    """Accuracy, Matthews correlation and macro F1 agree, also for one class or one example."""
    predicted, true = np.array(pair[0]), np.array(pair[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert metrics.accuracy_score(predicted, true) == pytest.approx(
            sklearn_metrics.accuracy_score(true, predicted)
        )
        assert metrics.matthews_corrcoef(predicted, true) == pytest.approx(
            sklearn_metrics.matthews_corrcoef(true, predicted), abs=1e-12
        )
        assert metrics.macro_f1_score(predicted, true) == pytest.approx(
            sklearn_metrics.f1_score(true, predicted, average="macro", zero_division=0)
        )


@given(BINARY_PAIRS)
def test_binary_f1_equals_scikit_learn(pair: tuple[list[int], list[int]]) -> None:
    """F1 is computed for class 1, and is 0 if class 1 does not occur."""
    predicted, true = np.array(pair[0]), np.array(pair[1])
    assert metrics.f1_score(predicted, true) == pytest.approx(
        sklearn_metrics.f1_score(true, predicted, zero_division=0)
    )


@given(CLASS_PAIRS)
def test_classification_report_equals_scikit_learn(pair: tuple[list[int], list[int]]) -> None:
    """Scores by class and confusion counts agree, also for classes that do not occur."""
    predicted, true = np.array(pair[0]), np.array(pair[1])
    labels = "abcde"
    report = metrics.classification_report(predicted, true, labels)
    expected_scores = sklearn_metrics.precision_recall_fscore_support(
        true, predicted, labels=range(5), zero_division=0
    )
    for label, *scores in zip(labels, *expected_scores, strict=True):
        assert list(report["classes"][label].values()) == pytest.approx(scores)
    expected_matrix = sklearn_metrics.confusion_matrix(true, predicted, labels=range(5))
    matrix = [
        [report["confusion"][label].get(predicted_label, 0) for predicted_label in labels]
        for label in labels
    ]
    assert matrix == expected_matrix.tolist()
    assert all(count for row in report["confusion"].values() for count in row.values())


def test_many_classes_need_no_dense_matrix() -> None:
    """With 200,000 classes, a matrix of all pairs of classes would need 320 GB."""
    num_classes = 200_000
    true = np.arange(num_classes)
    predicted = np.where(true % 4 == 0, 0, true)
    report = metrics.classification_report(predicted, true, list(map(str, range(num_classes))))
    assert report["confusion"]["8"] == {"0": 1}
    assert report["classes"]["9"]["f1"] == 1.0
    assert metrics.macro_f1_score(predicted, true) == pytest.approx(0.75, abs=1e-4)
    assert metrics.matthews_corrcoef(predicted, true) == pytest.approx(0.775, abs=0.01)


def test_multilabel_f1_equals_scikit_learn() -> None:
    """F1 of 0/1 matrices is micro-averaged."""
    rng = np.random.default_rng(0)
    predicted, true = rng.integers(0, 2, (2, 31, 7))
    assert metrics.f1_score(predicted, true) == pytest.approx(
        sklearn_metrics.f1_score(true, predicted, average="micro")
    )


@given(NUMBER_PAIRS)
def test_correlations_equal_scipy(pair: tuple[list[int], list[float]]) -> None:
    """Pearson and Spearman correlations agree, also for ties and constants."""
    predicted, true = np.array(pair[0], np.float64), np.array(pair[1], np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stats.spearmanr(predicted, true).statistic
        assert metrics.spearman_correlation(predicted, true) == pytest.approx(
            expected, abs=1e-9, nan_ok=True
        )
        # SciPy loses precision for nearly constant input and warns about it.
        if np.ptp(true) > 1e-6 * max(abs(true).max(), 1.0) or np.ptp(true) == 0:
            expected = stats.pearsonr(predicted, true).statistic
            assert metrics.pearson_correlation(predicted, true) == pytest.approx(
                expected, abs=1e-6, nan_ok=True
            )


@given(NUMBER_PAIRS)
def test_regression_metrics_equal_scikit_learn(pair: tuple[list[int], list[float]]) -> None:
    """Squared error, absolute error, and F1 of scores binarized at 3 agree."""
    predicted, true = np.array(pair[0], np.float64), np.array(pair[1], np.float64)
    assert metrics.mean_squared_error(predicted, true) == pytest.approx(
        sklearn_metrics.mean_squared_error(true, predicted)
    )
    assert metrics.mean_absolute_error(predicted, true) == pytest.approx(
        sklearn_metrics.mean_absolute_error(true, predicted)
    )
    assert metrics.f1_score_at_3(predicted, true) == pytest.approx(
        sklearn_metrics.f1_score(true >= 3, predicted >= 3, zero_division=0)
    )


@given(BINARY_PAIRS, st.integers(0, 2**32 - 1))
def test_binary_roc_auc_equals_scikit_learn(pair: tuple[list[int], list[int]], seed: int) -> None:
    """The area agrees, also for ties; it is NaN if only one class occurs."""
    is_positive = np.array(pair[0]) == 1
    scores = np.random.default_rng(seed).integers(0, 6, len(is_positive)) / 5
    area = metrics.roc_auc_score(scores, is_positive)
    if is_positive.all() or not is_positive.any():
        assert np.isnan(area)
    else:
        assert area == pytest.approx(sklearn_metrics.roc_auc_score(is_positive, scores))


def test_mean_roc_auc_equals_scikit_learn() -> None:
    """One-vs-rest and multi-label means agree; columns with a single class are skipped."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        probabilities = rng.random((40, 4)).round(1) + 0.01
        probabilities /= probabilities.sum(-1, keepdims=True)
        classes = np.r_[np.arange(4), rng.integers(0, 4, 36)]
        is_class = classes[:, None] == np.arange(4)
        expected = sklearn_metrics.roc_auc_score(
            classes, probabilities, multi_class="ovr", average="macro"
        )
        assert metrics.macro_roc_auc_score(probabilities, is_class) == pytest.approx(expected)
        labels = rng.random((40, 4)) < 0.4
        # Each column has both classes.
        labels[0] = True
        labels[1] = False
        expected = sklearn_metrics.roc_auc_score(labels, probabilities, average="macro")
        assert metrics.macro_roc_auc_score(probabilities, labels) == pytest.approx(expected)
    labels[:, 2] = True  # Column 2 has a single class and is skipped.
    expected = sklearn_metrics.roc_auc_score(labels[:, [0, 1, 3]], probabilities[:, [0, 1, 3]])
    assert metrics.macro_roc_auc_score(probabilities, labels) == pytest.approx(expected)
    assert np.isnan(metrics.macro_roc_auc_score(probabilities, np.ones((40, 4), np.bool_)))


def test_correlation_of_large_numbers_does_not_overflow() -> None:
    """Numbers around 1e200, whose squares overflow, give a finite correlation."""
    x = np.array([1e200, 2e200, 4e200])
    assert metrics.pearson_correlation(x, np.array([1.0, 2.0, 4.0])) == pytest.approx(1.0)
