"""Batches of an embedding model: the texts to encode, and the targets of the loss.

Batches are a pure function of (seed, epoch, step), so a resumed run sees the same batches.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.tasks.embedding_data import EmbeddingExamples, Ints
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.losses import (
    RankingTargets,
    ScoredTargets,
    Targets,
    TripletTargets,
)
from bertsmith.train.engine.batch_split import split_lengths

#: Numbers of the random generators of an epoch or a batch.
_ORDER_STREAM, _DRAW_STREAM = 0, 1


@dataclass(frozen=True)
class EmbeddingBatch:
    """The texts of a batch, and the targets of its loss.

    Attributes:
        texts: int64 [U], the number of each text to encode. With SimCSE, each text occurs twice.
        targets: The targets; indices refer to ``texts``.
    """

    texts: Ints
    targets: Targets


class BatchSampler:
    """Draws the batches of each epoch."""

    def __init__(self, examples: EmbeddingExamples, settings: EmbeddingSettings, seed: int) -> None:
        """Create the sampler.

        Args:
            examples: The training examples.
            settings: Loss, batch size and weights of the files.
            seed: Seed of the order of the examples.
        """
        self._examples = examples
        self._settings = settings
        self._seed = seed
        self._classes = None
        anchors = np.arange(len(examples))
        if examples.kind == "labeled_texts":
            self._classes = ClassIndex(examples.labels)
            # A text without another text of its class has no positive; it is only a negative.
            anchors = np.flatnonzero(self._classes.sizes[examples.labels] > 1)
        weights = settings.file_weights or [1.0] * len(settings.train_files)
        self._files = [
            (anchors[examples.file_indices[anchors] == index], weight)
            for index, weight in enumerate(weights)
        ]
        self._epoch: int | None = None
        self._order = np.empty(0, np.int64)

    @property
    def num_examples(self) -> int:
        """Number of examples in an epoch."""
        return sum(_count_draws(group, weight) for group, weight in self._files)

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        return math.ceil(self.num_examples / self._settings.batch_size)

    def draw_batch(self, epoch: int, step: int) -> EmbeddingBatch:
        """Return a batch of an epoch; ``step`` counts from 0 in the epoch."""
        indices = self.get_indices(epoch, step)
        if self._classes is None:
            return build_batch(self._examples, indices, self._settings)
        rng = np.random.default_rng((self._seed, epoch, _DRAW_STREAM, step))
        positives = self._classes.draw_positives(indices, rng)
        negatives = self._classes.draw_negatives(indices, rng)
        return build_labeled_batch(self._examples, indices, positives, negatives, self._settings)

    def get_indices(self, epoch: int, step: int) -> Ints:
        """Return the indices of the examples of a batch. Sizes differ by at most one example."""
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffle(epoch), epoch
        start, end = (self.num_examples * number // self.num_batches for number in (step, step + 1))
        return self._order[start:end]

    def _shuffle(self, epoch: int) -> Ints:
        """Return the indices of the examples of an epoch in random order.

        An example of a file with the weight 2.5 occurs two or three times.
        """
        rng = np.random.default_rng((self._seed, epoch, _ORDER_STREAM))
        parts = []
        for group, weight in self._files:
            size = _count_draws(group, weight)
            num_copies, num_drawn = divmod(size, len(group)) if len(group) else (0, 0)
            parts += [group] * num_copies
            if num_drawn:
                parts.append(rng.choice(group, num_drawn, replace=False))
        order: Ints = rng.permutation(np.concatenate(parts))
        return order


def _count_draws(group: Ints, weight: float) -> int:
    """Return how many examples of a file are drawn in an epoch, at least one."""
    return max(1, round(len(group) * weight)) if len(group) else 0


class ClassIndex:
    """The examples of each class, for drawing positives and negatives."""

    def __init__(self, labels: Ints) -> None:
        """Create the index from the class of each example, int64 [n]."""
        self._labels = labels
        self.sizes = np.bincount(labels)
        self._starts = np.cumsum(self.sizes) - self.sizes
        #: The examples sorted by class.
        self._sorted = np.argsort(labels, kind="stable")
        self._positions = np.empty_like(self._sorted)
        self._positions[self._sorted] = np.arange(len(labels))

    def draw_positives(self, indices: Ints, rng: np.random.Generator) -> Ints:
        """Draw another example of the same class for each example; its class has at least two."""
        labels = self._labels[indices]
        drawn = self._starts[labels] + rng.integers(0, self.sizes[labels] - 1)
        drawn += drawn >= self._positions[indices]
        examples: Ints = self._sorted[drawn]
        return examples

    def draw_negatives(self, indices: Ints, rng: np.random.Generator) -> Ints:
        """Draw an example of another class for each example."""
        labels = self._labels[indices]
        drawn = rng.integers(0, len(self._labels) - self.sizes[labels])
        drawn += np.where(drawn >= self._starts[labels], self.sizes[labels], 0)
        examples: Ints = self._sorted[drawn]
        return examples


def split_by_length(lengths: Sequence[int], max_tokens: int, num_processes: int) -> list[list[int]]:
    """Group texts of similar length into micro-batches, which the processes divide among them.

    Args:
        lengths: Number of tokens of each text.
        max_tokens: Maximum number of tokens of a micro-batch.
        num_processes: Number of processes, which compute about as many tokens each.

    Returns:
        The indices of the texts of each micro-batch, longest first.
    """
    groups = list(batch_by_length(lengths, max_tokens))
    if len(groups) % num_processes == 0:
        return groups
    order = [row for group in groups for row in group]
    sorted_lengths = [lengths[row] for row in order]
    parts = split_lengths(sorted_lengths, max_tokens, num_processes)
    return [order[start:end] for start, end in parts]


def build_batch(
    examples: EmbeddingExamples, indices: Ints, settings: EmbeddingSettings
) -> EmbeddingBatch:
    """Return the batch of the examples with these indices; they are not labeled texts."""
    anchors, positives = examples.anchors[indices], examples.positives[indices]
    if examples.kind == "texts":
        # Each text is encoded twice, with different dropout masks (SimCSE; Gao et al. 2021,
        # arXiv:2104.08821).
        size = len(indices)
        excluded = _find_excluded_pairs(anchors, anchors, anchors)
        rows = torch.arange(2 * size)
        targets = RankingTargets(rows[:size], rows[size:], *excluded)
        return EmbeddingBatch(np.concatenate([anchors, anchors]), targets)
    negatives = examples.get_negatives(indices)
    if examples.kind == "scored_pairs":
        texts, (first, second) = _number_texts(anchors, positives)
        scores = torch.from_numpy(examples.scores[indices])
        return EmbeddingBatch(texts, ScoredTargets(first, second, scores))
    if settings.loss == "triplet":
        counts = examples.count_negatives(indices)
        return _build_triplets(anchors.repeat(counts), positives.repeat(counts), negatives)
    candidates = np.concatenate([positives, negatives])
    identities = examples.texts.identities
    excluded = _find_excluded_pairs(
        identities[anchors], identities[positives], identities[candidates]
    )
    texts, (anchor_rows, candidate_rows) = _number_texts(anchors, candidates)
    return EmbeddingBatch(texts, RankingTargets(anchor_rows, candidate_rows, *excluded))


def build_labeled_batch(
    examples: EmbeddingExamples,
    indices: Ints,
    positives: Ints,
    negatives: Ints,
    settings: EmbeddingSettings,
) -> EmbeddingBatch:
    """Return the batch of labeled texts with a drawn positive and negative.

    Args:
        examples: Labeled texts.
        indices: int64 [B], the anchors.
        positives: int64 [B], for each anchor an example of the same class.
        negatives: int64 [B], for each anchor an example of another class, for the triplet loss.
        settings: The loss.
    """
    anchor_texts, positive_texts = examples.anchors[indices], examples.anchors[positives]
    if settings.loss == "triplet":
        return _build_triplets(anchor_texts, positive_texts, examples.anchors[negatives])
    labels = examples.labels[indices]
    is_same_class = labels[:, None] == labels[None, :]
    np.fill_diagonal(is_same_class, val=False)
    # np.nonzero returns strided views of one array, and torch.searchsorted warns about those.
    excluded = [torch.from_numpy(rows.copy()) for rows in np.nonzero(is_same_class)]
    texts, (anchor_rows, candidate_rows) = _number_texts(anchor_texts, positive_texts)
    return EmbeddingBatch(texts, RankingTargets(anchor_rows, candidate_rows, *excluded))


def _build_triplets(anchors: Ints, positives: Ints, negatives: Ints) -> EmbeddingBatch:
    texts, rows = _number_texts(anchors, positives, negatives)
    return EmbeddingBatch(texts, TripletTargets(*rows))


def _number_texts(*groups: Ints) -> tuple[Ints, list[Tensor]]:
    """Return the distinct texts of all groups, int64 [U], and each group as indices into them.

    A text that occurs several times in a batch is encoded once.
    """
    texts, indices = np.unique(np.concatenate(groups), return_inverse=True)
    ends = np.cumsum([len(group) for group in groups])[:-1]
    return texts, [torch.from_numpy(part) for part in np.split(indices, ends)]


def _find_excluded_pairs(anchors: Ints, positives: Ints, candidates: Ints) -> tuple[Tensor, Tensor]:
    """Return the pairs of an anchor and a candidate that is no negative of the anchor.

    Such a candidate is the anchor itself, or the positive of the same anchor in another example.

    Args:
        anchors: int64 [B], numbers of texts or classes.
        positives: int64 [B].
        candidates: int64 [C]; the first B are ``positives``.

    Returns:
        Rows in ascending order and columns, int64 [number of pairs].
    """
    columns_of_candidate: dict[int, list[int]] = defaultdict(list)
    for column, candidate in enumerate(candidates.tolist()):
        columns_of_candidate[candidate].append(column)
    equivalents: dict[int, set[int]] = defaultdict(set)
    for anchor, positive in zip(anchors.tolist(), positives.tolist(), strict=True):
        equivalents[anchor] |= {anchor, positive}
    rows: list[int] = []
    columns: list[int] = []
    for row, anchor in enumerate(anchors.tolist()):
        for candidate in sorted(equivalents[anchor]):
            excluded = [col for col in columns_of_candidate.get(candidate, ()) if col != row]
            columns += excluded
            rows += [row] * len(excluded)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(columns, dtype=torch.int64)
