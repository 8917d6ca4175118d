"""Losses of sentence-embedding models, as functions of the vectors of a batch.

The loss of a batch is the sum of terms. Each term has its own autograd graph, so that a large batch
needs the memory of only one term at a time: multiple negatives ranking has a term for every few
anchors. In shapes, U is the number of vectors in the batch, and W their width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.tasks.embedding_settings import EmbeddingSettings

#: Maximum number of similarities in a term of the ranking loss: 16 MB in float32.
_MAX_SIMILARITIES: Final = 2**22
#: Returns the vectors with the given indices, [number of indices, W].
SelectVectors = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RankingTargets:
    """Anchors, and the candidates among which each anchor is to find its positive.

    Attributes:
        anchors: int64 [B], indices of the anchors' vectors.
        candidates: int64 [C], indices of the candidates' vectors; the first B are the positives.
        excluded_anchors: int64 [E], sorted. The anchor of each pair of anchor and candidate that
            are not compared, because the candidate is no negative of the anchor.
        excluded_candidates: int64 [E], the candidate of each of these pairs.
    """

    anchors: Tensor
    candidates: Tensor
    excluded_anchors: Tensor
    excluded_candidates: Tensor


@dataclass(frozen=True)
class ScoredTargets:
    """Pairs with similarities.

    Attributes:
        first: int64 [B], indices of the vectors of the first texts.
        second: int64 [B], indices of the vectors of the second texts.
        scores: float32 [B].
    """

    first: Tensor
    second: Tensor
    scores: Tensor


@dataclass(frozen=True)
class TripletTargets:
    """Triplets; each int64 [B] has indices of vectors."""

    anchors: Tensor
    positives: Tensor
    negatives: Tensor


Targets = RankingTargets | ScoredTargets | TripletTargets


def iter_loss_terms(
    vectors: Tensor, targets: Targets, settings: EmbeddingSettings
) -> Iterator[Tensor]:
    """Yield the terms of the loss of a batch, float32 [].

    With Matryoshka dimensions, the loss is the weighted sum of the losses of the first dimensions
    of the vectors (Kusupati et al. 2022, arXiv:2205.13147).

    Args:
        vectors: float32 [U, W].
        targets: The targets of the batch.
        settings: The loss and its parameters.
    """
    dims = settings.matryoshka_dims
    if not dims:
        yield from _iter_terms(lambda indices: vectors.index_select(0, indices), targets, settings)
        return
    weights = settings.matryoshka_weights or [1.0] * len(dims)
    for dim, weight in zip(dims, weights, strict=True):
        for term in _iter_terms(_shorten_vectors(vectors, dim), targets, settings):
            yield weight * term


def _shorten_vectors(vectors: Tensor, dim: int) -> SelectVectors:
    """Return a function that selects the first ``dim`` dimensions of vectors, with length 1."""
    return lambda indices: F.normalize(vectors[:, :dim].index_select(0, indices), dim=-1)


def _iter_terms(
    select: SelectVectors, targets: Targets, settings: EmbeddingSettings
) -> Iterator[Tensor]:
    if isinstance(targets, RankingTargets):
        yield from iter_ranking_terms(select, targets, settings.temperature)
    elif isinstance(targets, TripletTargets):
        yield compute_triplet_loss(select, targets, settings)
    elif settings.loss == "cosent":
        yield compute_cosent_loss(select, targets, settings.temperature)
    else:
        yield compute_cosine_loss(select, targets, settings.max_score)


def iter_ranking_terms(
    select: SelectVectors, targets: RankingTargets, temperature: float
) -> Iterator[Tensor]:
    """Yield the terms of the multiple negatives ranking loss (InfoNCE; Henderson et al. 2017).

    The loss is the mean cross-entropy of each anchor's positive among all candidates; the logits
    are cosine similarities divided by the temperature.
    """
    num_anchors, num_candidates = len(targets.anchors), len(targets.candidates)
    rows = max(1, _MAX_SIMILARITIES // num_candidates)
    for start in range(0, num_anchors, rows):
        anchors = F.normalize(select(targets.anchors[start : start + rows]), dim=-1)
        candidates = F.normalize(select(targets.candidates), dim=-1)
        logits = anchors @ candidates.T / temperature
        end = start + len(anchors)
        bounds = torch.tensor([start, end], device=logits.device)
        first, last = torch.searchsorted(targets.excluded_anchors, bounds).tolist()
        is_excluded = torch.zeros_like(logits, dtype=torch.bool)
        is_excluded[
            targets.excluded_anchors[first:last] - start, targets.excluded_candidates[first:last]
        ] = True
        logits = logits.masked_fill(is_excluded, -torch.inf)
        labels = torch.arange(start, end, device=logits.device)
        yield F.cross_entropy(logits, labels, reduction="sum") / num_anchors


def compute_cosent_loss(
    select: SelectVectors, targets: ScoredTargets, temperature: float
) -> Tensor:
    """Return the CoSENT loss (Su 2022): log(1 + sum of exp((s_i - s_j) / temperature)).

    The sum is over all pairs of examples of which example i has the lower score; s are cosine
    similarities. Sorting the examples by score avoids a matrix of all pairs.
    """
    similarities = _compute_cosines(select, targets) / temperature
    scores, order = targets.scores.sort(stable=True)
    similarities = similarities[order]
    # log sum of exp(-s_j) over all examples j from each index to the end, and 0 after the end.
    suffix_sums = torch.logcumsumexp(-similarities.flip(0), 0).flip(0)
    suffix_sums = F.pad(suffix_sums, (0, 1), value=-torch.inf)
    first_higher = torch.searchsorted(scores, scores, right=True)
    differences = similarities + suffix_sums[first_higher]
    return torch.logsumexp(F.pad(differences, (1, 0)), 0)


def compute_cosine_loss(select: SelectVectors, targets: ScoredTargets, max_score: float) -> Tensor:
    """Return the mean squared difference of cosine similarity and score / ``max_score``."""
    return ((_compute_cosines(select, targets) - targets.scores / max_score) ** 2).mean()


def _compute_cosines(select: SelectVectors, targets: ScoredTargets) -> Tensor:
    """Return the cosine similarity of each pair, float32 [B]."""
    first = F.normalize(select(targets.first), dim=-1)
    return (first * F.normalize(select(targets.second), dim=-1)).sum(-1)


def compute_triplet_loss(
    select: SelectVectors, targets: TripletTargets, settings: EmbeddingSettings
) -> Tensor:
    """Return the mean of max(0, d(anchor, positive) - d(anchor, negative) + margin)."""
    anchors, positives, negatives = map(
        select, (targets.anchors, targets.positives, targets.negatives)
    )
    if settings.triplet_distance == "cosine":
        positive_distances = 1 - F.cosine_similarity(anchors, positives)
        negative_distances = 1 - F.cosine_similarity(anchors, negatives)
    else:
        positive_distances = F.pairwise_distance(anchors, positives)
        negative_distances = F.pairwise_distance(anchors, negatives)
    assert settings.triplet_margin is not None
    return F.relu(positive_distances - negative_distances + settings.triplet_margin).mean()
