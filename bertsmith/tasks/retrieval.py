"""Retrieval metrics: how high the relevant documents of a query are ranked.

In shapes, Q is the number of queries, N that of documents, K the length of a ranking, and W the
width of the vectors.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

#: Weights of the first 10 ranks in nDCG.
_DISCOUNTS: Final = 1 / np.log2(np.arange(2, 12))
#: Maximum number of similarities that are in memory at once: 64 MB in float32.
_MAX_SIMILARITIES: Final = 2**24


def rank_documents(
    queries: Floats, documents: Floats, top: int, excluded: Ints | None = None
) -> Ints:
    """Return the most similar documents of each query by cosine similarity, most similar first.

    Args:
        queries: float32 [Q, W].
        documents: float32 [N, W].
        top: K, the number of documents to return; at most N are returned.
        excluded: int64 [Q], a document that is ranked last, such as the query itself; -1 for none.

    Returns:
        int64 [Q, K]. Documents of equal similarity are in ascending order.
    """
    queries, documents = normalize_rows(queries), normalize_rows(documents)
    top = min(top, len(documents))
    rankings = np.empty((len(queries), top), np.int64)
    rows = max(1, _MAX_SIMILARITIES // max(len(documents), 1))
    for start in range(0, len(queries), rows):
        similarities = queries[start : start + rows] @ documents.T
        if excluded is not None:
            part = excluded[start : start + rows]
            has_excluded = np.flatnonzero(part >= 0)
            similarities[has_excluded, part[has_excluded]] = -np.inf
        if top < len(documents):
            candidates = np.argpartition(-similarities, top - 1, axis=1)[:, :top]
            candidates.sort(axis=1)
        else:
            candidates = np.broadcast_to(np.arange(top), similarities.shape)
        values = np.take_along_axis(similarities, candidates, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        rankings[start : start + rows] = np.take_along_axis(candidates, order, axis=1)
    return rankings


def normalize_rows(vectors: Floats) -> Floats:
    """Scale each row to length 1; rows of zeros stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Floats = vectors / np.maximum(norms, 1e-12)
    return result


def compute_retrieval_metrics(
    rankings: Ints, relevance: Sequence[Mapping[int, float]], recall_cutoffs: Sequence[int]
) -> dict[str, float]:
    """Return nDCG@10, MRR@10 and recall@k, averaged over all queries.

    nDCG has linear gains, as in trec_eval and BEIR.

    Args:
        rankings: int64 [Q, K], the documents found for each query.
        relevance: For each query, the grade of each relevant document, above 0; at least one.
        recall_cutoffs: Values of k.
    """
    ndcg, reciprocal_ranks = [], []
    recalls: dict[int, list[float]] = {cutoff: [] for cutoff in recall_cutoffs}
    for ranking, grades in zip(rankings.tolist(), relevance, strict=True):
        gains = np.array([grades.get(document, 0.0) for document in ranking[:10]])
        ndcg.append(_compute_ndcg(gains, np.array(list(grades.values()))))
        reciprocal_ranks.append(_compute_reciprocal_rank(gains))
        for cutoff, values in recalls.items():
            num_found = sum(document in grades for document in ranking[:cutoff])
            values.append(num_found / len(grades))
    return {
        "ndcg@10": float(np.mean(ndcg)),
        "mrr@10": float(np.mean(reciprocal_ranks)),
        **{f"recall@{cutoff}": float(np.mean(values)) for cutoff, values in recalls.items()},
    }


def compute_reranking_metrics(predicted: Floats, grades: Floats, offsets: Ints) -> dict[str, float]:
    """Return nDCG@10, MRR@10 and MAP of ranked candidates, averaged over all queries.

    Of documents with equal predictions, those with lower grades are ranked first, so that a model
    that predicts a constant has the worst metrics.

    Args:
        predicted: float32 [n], the predicted score of each candidate.
        grades: float32 [n], the grade of each candidate, above 0 for relevant documents. Each query
            has a relevant document.
        offsets: int64 [Q + 1], the first candidate of each query.
    """
    ndcg, reciprocal_ranks, average_precisions = [], [], []
    for start, end in pairwise(offsets.tolist()):
        query_grades = grades[start:end].astype(np.float64)
        order = np.lexsort((query_grades, -predicted[start:end]))
        gains = query_grades[order]
        ndcg.append(_compute_ndcg(gains[:10], gains))
        reciprocal_ranks.append(_compute_reciprocal_rank(gains[:10]))
        ranks = np.flatnonzero(gains) + 1
        average_precisions.append(float(np.mean(np.arange(1, len(ranks) + 1) / ranks)))
    return {
        "ndcg@10": float(np.mean(ndcg)),
        "mrr@10": float(np.mean(reciprocal_ranks)),
        "map": float(np.mean(average_precisions)),
    }


def _compute_ndcg(gains: NDArray[np.float64], grades: NDArray[np.float64]) -> float:
    """Return nDCG@10 of a query.

    Args:
        gains: The grades of the first 10 documents of the ranking, in its order.
        grades: The grades of all documents, in any order.
    """
    ideal_gains = np.sort(grades)[::-1][:10]
    return float(gains @ _DISCOUNTS[: len(gains)] / (ideal_gains @ _DISCOUNTS[: len(ideal_gains)]))


def _compute_reciprocal_rank(gains: NDArray[np.float64]) -> float:
    """Return 1 / the rank of the first relevant document; 0 if there is none."""
    hits = np.flatnonzero(gains)
    return float(1 / (1 + hits[0])) if len(hits) else 0.0
