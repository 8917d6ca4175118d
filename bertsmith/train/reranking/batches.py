"""Batches of a reranker: queries with their documents, or single pairs for a pointwise loss.

Batches are a pure function of (seed, epoch, step), so a resumed run sees the same batches.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from bertsmith.tasks.embedding_data import Ints
from bertsmith.tasks.reranking_data import RerankingExamples
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.train.reranking.losses import Floats

#: Numbers of the random generators of an epoch or a batch.
_ORDER_STREAM, _DRAW_STREAM = 0, 1
#: Seed of the random documents that are added to held-out queries.
_HELDOUT_SEED: Final = 0
#: Documents that are added to each held-out query if all documents are relevant.
_NUM_HELDOUT_DOCUMENTS: Final = 20


@dataclass(frozen=True)
class DocumentGroup:
    """A query and documents that a loss compares with each other, or a single document.

    Attributes:
        query: The text of the query.
        documents: int64 [m], the text of each document.
        scores: float32 [m], the relevance of each document.
    """

    query: int
    documents: Ints
    scores: Floats


class NegativeSampler:
    """Draws documents that are not judged for a query, and are not its text."""

    def __init__(self, documents: Ints) -> None:
        """Create the sampler from the documents that can be drawn; duplicates count once."""
        self._pool = np.unique(documents)

    def draw(self, query: int, judged: Ints, count: int, rng: np.random.Generator) -> Ints:
        """Draw at most ``count`` distinct documents other than the query and ``judged``.

        Args:
            query: The number of the query's text. In pairs of similar texts, it may also be a
                document, which would be a wrong negative.
            judged: The numbers of the documents that are judged for the query.
            count: Maximum number of documents.
            rng: Random generator.
        """
        excluded = np.append(judged, query)
        size = min(len(self._pool), count + len(excluded))
        drawn = self._pool[rng.choice(len(self._pool), size, replace=False)]
        documents: Ints = drawn[~np.isin(drawn, excluded)][:count]
        return documents


class BatchSampler:
    """Draws the batches of each epoch."""

    def __init__(
        self,
        examples: RerankingExamples,
        settings: RerankingSettings,
        seed: int,
        negatives: Ints | None = None,
    ) -> None:
        """Create the sampler.

        Args:
            examples: The training examples; see ``find_usable_queries``.
            settings: Loss, batch size and negatives.
            seed: Seed of the order of the examples and of random documents.
            negatives: The documents that can be drawn as random negatives; None: those of
                ``examples``.
        """
        self._examples = examples
        self._settings = settings
        self._seed = seed
        self._is_pointwise = settings.loss == "bce"
        self._query_rows = examples.query_rows
        self._negatives = NegativeSampler(examples.documents if negatives is None else negatives)
        self._epoch: int | None = None
        self._order = np.empty(0, np.int64)

    @property
    def num_groups(self) -> int:
        """Number of queries in an epoch; of pairs for a pointwise loss."""
        return len(self._examples.documents) if self._is_pointwise else len(self._examples)

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        return math.ceil(self.num_groups / self._settings.get_batch_size())

    def draw_batch(self, epoch: int, step: int) -> list[DocumentGroup]:
        """Return the groups of a batch; ``step`` counts from 0 in the epoch.

        The sizes of batches differ by at most one group.
        """
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch, _ORDER_STREAM))
            self._order, self._epoch = rng.permutation(self.num_groups), epoch
        start, end = (self.num_groups * number // self.num_batches for number in (step, step + 1))
        rng = np.random.default_rng((self._seed, epoch, _DRAW_STREAM, step))
        return [self._draw_group(index, rng) for index in self._order[start:end].tolist()]

    def _draw_group(self, index: int, rng: np.random.Generator) -> DocumentGroup:
        examples, settings = self._examples, self._settings
        query = int(self._query_rows[index]) if self._is_pointwise else index
        judged = np.arange(examples.offsets[query], examples.offsets[query + 1])
        pairs = np.array([index]) if self._is_pointwise else judged
        if len(pairs) > settings.max_documents:
            pairs = draw_documents(examples.scores, pairs, settings.max_documents, rng)
        group = DocumentGroup(
            int(examples.queries[query]), examples.documents[pairs], examples.scores[pairs]
        )
        count = settings.random_negatives or 0
        if not count or not (group.scores > settings.relevance_threshold).any():
            return group
        negatives = self._negatives.draw(group.query, examples.documents[judged], count, rng)
        return _add_negatives(group, negatives)


def draw_documents(scores: Floats, pairs: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw documents of a query, in their order.

    One has the highest score and one the lowest, so that the documents can be compared.

    Args:
        scores: float32 [n], the scores of all pairs.
        pairs: The pairs of the query, at least ``count``.
        count: Number of documents to draw, at least 2.
        rng: Random generator.
    """
    shuffled = rng.permutation(pairs)
    best = shuffled[scores[shuffled].argmax()]
    # If all scores are equal, the worst document is another one than the best.
    others = shuffled[shuffled != best]
    worst = others[scores[others].argmin()]
    others = others[others != worst]
    drawn: Ints = np.sort(np.concatenate([[best, worst], others[: count - 2]]))
    return drawn


def _add_negatives(group: DocumentGroup, negatives: Ints) -> DocumentGroup:
    """Add documents with the score 0."""
    return DocumentGroup(
        group.query,
        np.concatenate([group.documents, negatives]),
        np.concatenate([group.scores, np.zeros(len(negatives), np.float32)]),
    )


def find_usable_queries(examples: RerankingExamples, settings: RerankingSettings) -> Ints:
    """Return the queries with a term in the loss.

    A pairwise or listwise loss needs documents with different scores, and ``mnrl`` a relevant and
    another document. Random negatives are such other documents.
    """
    if settings.loss == "bce":
        return np.arange(len(examples))
    is_relevant = examples.is_relevant(settings.relevance_threshold)
    num_relevant = np.add.reduceat(is_relevant.astype(np.int64), examples.offsets[:-1])
    has_relevant = num_relevant > 0
    if settings.loss == "mnrl":
        has_contrast = has_relevant & (num_relevant < examples.counts)
    else:
        highest = np.maximum.reduceat(examples.scores, examples.offsets[:-1])
        has_contrast = highest > np.minimum.reduceat(examples.scores, examples.offsets[:-1])
    if settings.random_negatives:
        # If all other documents are judged for a query, none can be drawn.
        num_documents = len(np.unique(examples.documents)) - np.isin(
            examples.queries, examples.documents
        )
        has_contrast |= has_relevant & (examples.counts < num_documents)
    return np.flatnonzero(has_contrast)


def add_heldout_negatives(examples: RerankingExamples, documents: Ints) -> RerankingExamples:
    """Add up to 20 random documents of other queries to each query, with the score 0.

    The documents do not depend on ``run.seed``.

    Args:
        examples: The held-out queries.
        documents: The documents that can be drawn, as numbers of ``examples.texts``. Those that are
            judged for a query are not added to it.
    """
    sampler = NegativeSampler(documents)
    rng = np.random.default_rng(_HELDOUT_SEED)
    groups = []
    for index, query in enumerate(examples.queries.tolist()):
        pairs = slice(examples.offsets[index], examples.offsets[index + 1])
        group = DocumentGroup(query, examples.documents[pairs], examples.scores[pairs])
        negatives = sampler.draw(query, group.documents, _NUM_HELDOUT_DOCUMENTS, rng)
        groups.append(_add_negatives(group, negatives))
    counts = [len(group.documents) for group in groups]
    return RerankingExamples(
        examples.texts,
        examples.queries,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([group.documents for group in groups]),
        np.concatenate([group.scores for group in groups]),
    )
