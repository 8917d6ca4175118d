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
        assert metrics.matthews(predicted, right) == pytest.approx(
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
    report = metrics.class_report(predicted, right, names)
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


def test_correlations_of_extreme_numbers() -> None:
    """Very large numbers do not overflow."""
    x = np.array([1e200, 2e200, 4e200])
    assert metrics.pearson(x, np.array([1.0, 2.0, 4.0])) == pytest.approx(1.0)
