"""Held-out metrics of a reranker during training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np

from bertsmith.errors import TaskError
from bertsmith.model.task_models import TaskModel
from bertsmith.tasks import metrics
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.reranking_data import PairEncoder, RerankingExamples
from bertsmith.tasks.retrieval import compute_reranking_metrics
from bertsmith.train.reranking.losses import Floats

RANKING_METRICS: Final = ("ndcg@10", "mrr@10", "map")
_CORRELATIONS: Final = ("spearman", "pearson")
_ROC_AUC: Final = "roc_auc"
#: Number of pairs whose token ids are in memory at once.
_PAIRS_PER_CHUNK: Final = 8192


@dataclass(frozen=True)
class HeldoutQueries:
    """Queries and candidate documents.

    Attributes:
        examples: The queries and documents. If documents are ranked, each query has a relevant and
            another document.
        metric_names: Names of the metrics; the first one selects the best epoch.
        threshold: Documents with a higher score are relevant.
    """

    examples: RerankingExamples
    metric_names: tuple[str, ...]
    threshold: float

    def evaluate(
        self,
        model: TaskModel,
        encoder: PairEncoder,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> dict[str, float]:
        """Return the metrics and the number of queries, or of pairs if no documents are ranked."""
        examples = self.examples
        predicted = predict_scores(model, encoder, examples, autocast)
        if self.metric_names == RANKING_METRICS:
            grades = np.where(examples.is_relevant(self.threshold), examples.scores, np.float32(0))
            results = compute_reranking_metrics(predicted, grades, examples.offsets)
            return {**results, "examples": float(len(examples))}
        scores, values = examples.scores.astype(np.float64), predicted.astype(np.float64)
        if self.metric_names == (_ROC_AUC,):
            results = {_ROC_AUC: metrics.roc_auc_score(values, scores > scores.min())}
        else:
            results = {
                name: metrics.REGRESSION_METRICS[name](values, scores) for name in _CORRELATIONS
            }
        return {**results, "examples": float(len(scores))}


def build_heldout_queries(
    examples: RerankingExamples,
    threshold: float,
    name: str,
    advice: str = "expected queries with relevant and other documents",
) -> HeldoutQueries:
    """Choose the metrics of held-out queries.

    If a query has a relevant and another document, documents are ranked, and queries without both
    are left out. Otherwise predictions for single pairs are compared with their scores: with
    ROC-AUC if there are two scores.

    Args:
        examples: The queries and documents.
        threshold: Documents with a higher score are relevant.
        name: The file, for error messages.
        advice: How to correct the data, for the error message.

    Raises:
        TaskError: No metric can be computed.
    """
    is_relevant = examples.is_relevant(threshold).astype(np.int64)
    num_relevant = np.add.reduceat(is_relevant, examples.offsets[:-1])
    ranked_queries = np.flatnonzero((num_relevant > 0) & (num_relevant < examples.counts))
    if len(ranked_queries):
        return HeldoutQueries(examples.select(ranked_queries), RANKING_METRICS, threshold)
    num_scores = len(np.unique(examples.scores))
    if num_scores < 2:
        raise TaskError(f"{name}: every document has the score {examples.scores[0]:g}; {advice}")
    names = (_ROC_AUC,) if num_scores == 2 else _CORRELATIONS
    return HeldoutQueries(examples, names, threshold)


def predict_scores(
    model: TaskModel,
    encoder: PairEncoder,
    examples: RerankingExamples,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Floats:
    """Return the output of the model for each pair, float32 [n].

    Args:
        model: The model, in eval mode.
        encoder: Joins queries and documents.
        examples: The queries and documents.
        autocast: Returns the autocast context in which a batch is computed.
    """
    queries = examples.queries[examples.query_rows]
    parts = []
    for start in range(0, len(queries), _PAIRS_PER_CHUNK):
        chunk = slice(start, start + _PAIRS_PER_CHUNK)
        pairs = zip(queries[chunk].tolist(), examples.documents[chunk].tolist(), strict=True)
        sequences = [[encoder.encode(query, document)] for query, document in pairs]
        inputs = ModelInputs(sequences, [""] * len(sequences), [False] * len(sequences))
        parts.append(np.concatenate(compute_outputs(model, inputs, autocast))[:, 0])
    return np.concatenate(parts)
