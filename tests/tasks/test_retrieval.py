"""Rankings of documents and retrieval metrics."""

import math
from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, ndcg_score

from bertsmith.tasks import retrieval
from bertsmith.tasks.retrieval import (
    compute_reranking_metrics,
    compute_retrieval_metrics,
    rank_documents,
)


def test_rankings_equal_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The top documents are those of a full sort, in parts of any size, without excluded ones."""
    rng = np.random.default_rng(0)
    queries, documents = (rng.normal(size=(count, 5)).astype(np.float32) for count in (7, 23))
    documents[4] = 3 * documents[9]  # the same direction, so the same similarity
    excluded = np.array([3, -1, -1, 0, -1, 22, 9])
    similarities = (queries / np.linalg.norm(queries, axis=1)[:, None]) @ (
        documents / np.linalg.norm(documents, axis=1)[:, None]
    ).T
    similarities = similarities.round(6)
    for row, document in enumerate(excluded):
        if document >= 0:
            similarities[row, document] = -math.inf
    expected = np.argsort(-similarities, axis=1, kind="stable")
    monkeypatch.setattr(retrieval, "_MAX_SIMILARITIES", 2 * 23)
    rankings = rank_documents(queries, documents, 6, excluded)
    for row in range(7):
        # The order of the two documents of equal similarity may depend on rounding.
        assert [4 if d == 9 else d for d in rankings[row]] == [
            4 if d == 9 else d for d in expected[row, :6]
        ]
    assert rank_documents(queries, documents, 50).shape == (7, 23)


def test_metrics_of_a_ranking_by_hand() -> None:
    """NDCG has linear gains and the ideal ranking of all grades; MRR uses the first hit."""
    rankings = np.array([[5, 3, 8, 1], [2, 4, 6, 7]])
    relevance = [{3: 2.0, 1: 1.0, 9: 1.0}, {0: 1.0}]
    metrics = compute_retrieval_metrics(rankings, relevance, (1, 2, 4))
    dcg = 2 / math.log2(3) + 1 / math.log2(5)
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    assert metrics["ndcg@10"] == pytest.approx(dcg / ideal / 2)
    assert metrics["mrr@10"] == pytest.approx((1 / 2 + 0) / 2)
    assert metrics["recall@1"] == 0.0
    assert metrics["recall@2"] == pytest.approx((1 / 3) / 2)
    assert metrics["recall@4"] == pytest.approx((2 / 3) / 2)


def test_hits_after_rank_10_only_count_for_recall() -> None:
    """nDCG@10 and MRR@10 ignore ranks above 10."""
    metrics = compute_retrieval_metrics(np.arange(12)[None], [{10: 1.0}], (10, 11))
    expected = {"ndcg@10": 0.0, "mrr@10": 0.0, "recall@10": 0.0, "recall@11": 1.0}
    assert metrics == expected


def test_reranking_metrics_equal_those_of_scikit_learn() -> None:
    """nDCG@10 with grades and average precision agree with scikit-learn; MRR by hand."""
    rng = np.random.default_rng(0)
    counts = [3, 15, 40]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    predicted = rng.normal(size=sum(counts)).astype(np.float32)
    grades = rng.integers(0, 3, sum(counts)).astype(np.float32)
    grades[offsets[:-1]] = 1
    metrics = compute_reranking_metrics(predicted, grades, offsets)
    ndcg, precisions, reciprocal_ranks = [], [], []
    for start, end in pairwise(offsets.tolist()):
        true, scores = grades[start:end], predicted[start:end]
        ndcg.append(ndcg_score([true], [scores], k=10))
        precisions.append(average_precision_score(true > 0, scores))
        ranking = true[np.argsort(-scores)] > 0
        reciprocal_ranks.append(1 / (1 + ranking.argmax()) if ranking[:10].any() else 0)
    assert metrics["ndcg@10"] == pytest.approx(np.mean(ndcg))
    assert metrics["map"] == pytest.approx(np.mean(precisions))
    assert metrics["mrr@10"] == pytest.approx(np.mean(reciprocal_ranks))


def test_equal_predictions_rank_relevant_documents_last() -> None:
    """A constant prediction is not rewarded for relevant documents that come first in the file."""
    grades = np.array([1, 0, 0, 0], np.float32)
    metrics = compute_reranking_metrics(np.zeros(4, np.float32), grades, np.array([0, 4]))
    assert (metrics["mrr@10"], metrics["map"]) == (0.25, 0.25)
