"""Our metrics beside scikit-learn's and SciPy's, on random and on awkward inputs."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as peer

from bertsmith.tasks import metrics

PAIRS = st.integers(1, 60).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
    )
)
BITS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
    )
)
NUMBERS = st.integers(3, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-5, 5), min_size=n, max_size=n),
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=n, max_size=n),
    )
)


@given(PAIRS)
def test_of_several_classes(pair: tuple[list[int], list[int]]) -> None:
    """Accuracy, Matthews and macro F1 are scikit-learn's, also with one class or one example."""
    predicted, right = np.array(pair[0]), np.array(pair[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert metrics.accuracy(predicted, right) == pytest.approx(
            peer.accuracy_score(right, predicted)
        )
        assert metrics.matthews_correlation(predicted, right) == pytest.approx(
            peer.matthews_corrcoef(right, predicted), abs=1e-12
        )
        assert metrics.macro_f1(predicted, right) == pytest.approx(
            peer.f1_score(right, predicted, average="macro", zero_division=0)
        )


@given(BITS)
def test_f1_of_two_classes(pair: tuple[list[int], list[int]]) -> None:
    """F1 is that of class 1, 0 where nothing is there to be found."""
    predicted, right = np.array(pair[0]), np.array(pair[1])
    assert metrics.f1(predicted, right) == pytest.approx(
        peer.f1_score(right, predicted, zero_division=0)
    )


@given(PAIRS)
def test_class_report(pair: tuple[list[int], list[int]]) -> None:
    """Scores by class and the confusion counts are scikit-learn's, for absent classes too."""
    predicted, right, names = np.array(pair[0]), np.array(pair[1]), "abcde"
    report = metrics.classification_report(predicted, right, names)
    expected = peer.precision_recall_fscore_support(
        right, predicted, labels=range(5), zero_division=0
    )
    for name, *scores in zip(names, *expected, strict=True):
        assert list(report["classes"][name].values()) == pytest.approx(scores)
    matrix = peer.confusion_matrix(right, predicted, labels=range(5))
    counts = [[report["confusion"][one].get(other, 0) for other in names] for one in names]
    assert counts == matrix.tolist()
    assert all(count for row in report["confusion"].values() for count in row.values())


def test_f1_of_many_labels() -> None:
    """Over 0/1 matrices F1 is micro-averaged."""
    chance = np.random.default_rng(0)
    predicted, right = chance.integers(0, 2, (2, 31, 7))
    assert metrics.f1(predicted, right) == pytest.approx(
        peer.f1_score(right, predicted, average="micro")
    )


@given(NUMBERS)
def test_correlations(pair: tuple[list[int], list[float]]) -> None:
    """Pearson and Spearman are SciPy's, ties and constants included."""
    predicted, right = np.array(pair[0], np.float64), np.array(pair[1], np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = stats.spearmanr(predicted, right).statistic
        assert metrics.spearman(predicted, right) == pytest.approx(wanted, abs=1e-9, nan_ok=True)
        # SciPy itself warns that nearly constant input loses its digits.
        if np.ptp(right) > 1e-6 * max(abs(right).max(), 1.0) or np.ptp(right) == 0:
            wanted = stats.pearsonr(predicted, right).statistic
            assert metrics.pearson(predicted, right) == pytest.approx(wanted, abs=1e-6, nan_ok=True)


@given(NUMBERS)
def test_errors_of_numbers(pair: tuple[list[int], list[float]]) -> None:
    """Squared and absolute error, and the F1 of scores from 3 on, are scikit-learn's."""
    predicted, right = np.array(pair[0], np.float64), np.array(pair[1], np.float64)
    assert metrics.mse(predicted, right) == pytest.approx(peer.mean_squared_error(right, predicted))
    assert metrics.mae(predicted, right) == pytest.approx(
        peer.mean_absolute_error(right, predicted)
    )
    assert metrics.f1_at_3(predicted, right) == pytest.approx(
        peer.f1_score(right >= 3, predicted >= 3, zero_division=0)
    )


@given(BITS, st.integers(0, 2**32 - 1))
def test_roc_auc_of_two_classes(pair: tuple[list[int], list[int]], seed: int) -> None:
    """The area is scikit-learn's, ties included; NaN where only one class occurs."""
    right = np.array(pair[0]) == 1
    scores = np.random.default_rng(seed).integers(0, 6, len(right)) / 5
    area = metrics.roc_auc(scores, right)
    if right.all() or not right.any():
        assert np.isnan(area)
    else:
        assert area == pytest.approx(peer.roc_auc_score(right, scores))


def test_roc_auc_of_several_classes_and_labels() -> None:
    """Both means over columns are scikit-learn's; a column with one value is left out."""
    chance = np.random.default_rng(0)
    for _ in range(50):
        shares = chance.random((40, 4)).round(1) + 0.01
        shares /= shares.sum(-1, keepdims=True)
        classes = np.r_[np.arange(4), chance.integers(0, 4, 36)]
        right = classes[:, None] == np.arange(4)
        expected = peer.roc_auc_score(classes, shares, multi_class="ovr", average="macro")
        assert metrics.mean_roc_auc(shares, right) == pytest.approx(expected)
        labels = chance.random((40, 4)) < 0.4
        labels[0], labels[1] = True, False
        expected = peer.roc_auc_score(labels, shares, average="macro")
        assert metrics.mean_roc_auc(shares, labels) == pytest.approx(expected)
    labels[:, 2] = True
    expected = peer.roc_auc_score(labels[:, [0, 1, 3]], shares[:, [0, 1, 3]])
    assert metrics.mean_roc_auc(shares, labels) == pytest.approx(expected)
    assert np.isnan(metrics.mean_roc_auc(shares, np.ones((40, 4), np.bool_)))


def test_correlations_of_extreme_numbers() -> None:
    """Very large numbers do not overflow."""
    x = np.array([1e200, 2e200, 4e200])
    assert metrics.pearson(x, np.array([1.0, 2.0, 4.0])) == pytest.approx(1.0)
