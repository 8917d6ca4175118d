"""Losses of rerankers, as functions of the scores of the documents in a batch.

Each loss is a sum of terms and their number, so that it can be computed in micro-batches. A term
compares documents of the same query. In shapes, n is the number of pairs of a query and a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.tasks.embedding_data import Ints
from bertsmith.tasks.reranking_settings import RerankingSettings

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PointTargets:
    """The relevance of each document.

    Attributes:
        labels: float32 [n], from 0 to 1.
    """

    labels: Tensor

    def __len__(self) -> int:
        """Return the number of terms."""
        return len(self.labels)


@dataclass(frozen=True)
class PairTargets:
    """Pairs of documents of the same query, of which the first has a higher score.

    Attributes:
        first: int64 [E], the document with the higher score.
        second: int64 [E], the document with the lower score.
        differences: float32 [E], the difference of their scores.
    """

    first: Tensor
    second: Tensor
    differences: Tensor

    def __len__(self) -> int:
        """Return the number of terms."""
        return len(self.first)


@dataclass(frozen=True)
class ListTargets:
    """Lists of documents of the same query, and the probability of each to be ranked first.

    Attributes:
        documents: int64 [R, C], padded with -1.
        probabilities: float32 [R, C], 0 for padding.
    """

    documents: Tensor
    probabilities: Tensor

    def __len__(self) -> int:
        """Return the number of terms."""
        return len(self.documents)


Targets = PointTargets | PairTargets | ListTargets


def build_targets(groups: Sequence[Floats], settings: RerankingSettings) -> Targets:
    """Return the targets of the documents of several queries.

    Args:
        groups: float32 [number of documents] for each query, the scores of its documents.
        settings: The loss and its parameters.
    """
    lengths = [len(scores) for scores in groups]
    starts = np.cumsum(lengths) - lengths
    if settings.loss == "bce":
        labels = np.concatenate(groups) / np.float32(settings.max_score)
        return PointTargets(torch.from_numpy(labels))
    if settings.loss in ("ranknet", "margin_mse"):
        pairs = [
            start + find_ordered_pairs(scores) for start, scores in zip(starts, groups, strict=True)
        ]
        first, second = np.concatenate(pairs, axis=1)
        scores = np.concatenate(groups)
        differences = torch.from_numpy(scores[first] - scores[second])
        return PairTargets(torch.from_numpy(first), torch.from_numpy(second), differences)
    rows: list[tuple[Ints, Floats]] = []
    for start, scores in zip(starts, groups, strict=True):
        indices = start + np.arange(len(scores))
        if settings.loss == "listnet":
            rows.append((indices, _softmax(scores)))
            continue
        is_relevant = scores > settings.relevance_threshold
        negatives = indices[~is_relevant]
        for positive in indices[is_relevant]:
            is_positive = np.zeros(1 + len(negatives), np.float32)
            is_positive[0] = 1
            rows.append((np.concatenate([[positive], negatives]), is_positive))
    return _pad_lists(rows)


def find_ordered_pairs(scores: Floats) -> Ints:
    """Return the pairs of documents with different scores, higher first, int64 [2, E]."""
    return np.stack(np.nonzero(scores[:, None] > scores[None, :])).astype(np.int64)


def _softmax(scores: Floats) -> Floats:
    exponentials = np.exp(scores - scores.max())
    probabilities: Floats = (exponentials / exponentials.sum()).astype(np.float32)
    return probabilities


def _pad_lists(rows: Sequence[tuple[Ints, Floats]]) -> ListTargets:
    length = max(len(documents) for documents, _ in rows)
    documents = np.full((len(rows), length), -1, np.int64)
    probabilities = np.zeros((len(rows), length), np.float32)
    for row, (row_documents, row_probabilities) in enumerate(rows):
        documents[row, : len(row_documents)] = row_documents
        probabilities[row, : len(row_documents)] = row_probabilities
    return ListTargets(torch.from_numpy(documents), torch.from_numpy(probabilities))


def sum_loss_terms(outputs: Tensor, targets: Targets, settings: RerankingSettings) -> Tensor:
    """Return the sum of the terms of the loss, float32 [].

    Args:
        outputs: float32 [n], the outputs of the model.
        targets: The targets of the same documents.
        settings: The loss and its parameters.
    """
    if isinstance(targets, PointTargets):
        return F.binary_cross_entropy_with_logits(
            outputs,
            targets.labels,
            reduction="sum",
            pos_weight=torch.tensor(settings.positive_weight, device=outputs.device),
        )
    if isinstance(targets, PairTargets):
        differences = outputs[targets.first] - outputs[targets.second]
        if settings.loss == "ranknet":
            return F.softplus(-differences).sum()
        return ((differences - targets.differences) ** 2).sum()
    if settings.loss == "mnrl":
        outputs = outputs.sigmoid() / settings.temperature
    is_padding = targets.documents < 0
    lists = outputs[targets.documents.clamp(min=0)].masked_fill(is_padding, -torch.inf)
    log_probabilities = lists.log_softmax(-1).masked_fill(is_padding, 0.0)
    return -(targets.probabilities * log_probabilities).sum()
