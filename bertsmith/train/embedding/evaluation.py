"""Held-out metrics of an embedding model during training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding
from bertsmith.runtime.device import Machine, seed_dropout
from bertsmith.runtime.inference_batches import batch_by_length, choose_batch_tokens
from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.tasks import metrics
from bertsmith.tasks.beir import METRIC_NAMES as RETRIEVAL_METRIC_NAMES
from bertsmith.tasks.beir import RetrievalSet
from bertsmith.tasks.embedding_data import EmbeddingExamples, EncodedTexts, Ints
from bertsmith.tasks.embedding_settings import EmbeddingSettings, ExampleKind
from bertsmith.tasks.retrieval import compute_retrieval_metrics, normalize_rows, rank_documents
from bertsmith.text.wordpiece import Tokenizer

Floats = NDArray[np.float32]
#: The metrics of each kind of examples; the first one selects the best epoch.
METRIC_NAMES: Final[dict[ExampleKind, tuple[str, ...]]] = {
    "pairs": ("ndcg@10", "mrr@10", "recall@1", "recall@10"),
    "scored_pairs": ("spearman", "pearson"),
    "labeled_texts": ("nearest_neighbor_accuracy",),
    "texts": ("loss",),
}
_RECALL_CUTOFFS: Final = (1, 10)
#: Name of the share of triplets whose positive is closer to the anchor than the negative.
_TRIPLET_ACCURACY: Final = "triplet_accuracy"


@dataclass(frozen=True)
class HeldoutTexts:
    """Held-out examples, and how their metrics are computed.

    Attributes:
        examples: The examples, or queries and documents, with their texts and no others.
        settings: Temperature of the loss and Matryoshka dimensions.
        truncate_dim: Number of first dimensions that the vectors of the saved model keep; None for
            all.
    """

    examples: EmbeddingExamples | RetrievalSet
    settings: EmbeddingSettings
    truncate_dim: int | None = None

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; the first one selects the best epoch."""
        if isinstance(self.examples, RetrievalSet):
            return list(RETRIEVAL_METRIC_NAMES)
        has_negatives = len(self.examples.negatives) > 0
        names = METRIC_NAMES[self.examples.kind]
        return [*names, _TRIPLET_ACCURACY] if has_negatives else [*names]

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the first metric is better."""
        return self.metric_names[0] != "loss"

    def evaluate(self, model: BertForSentenceEmbedding, machine: Machine) -> dict[str, float]:
        """Return the metrics and the number of examples.

        With Matryoshka dimensions, the first metric is also returned for each dimension.
        """
        examples = self.examples
        num_examples = float(len(examples))
        if isinstance(examples, EmbeddingExamples) and examples.kind == "texts":
            loss = compute_simcse_loss(model, machine, examples, self.settings, self.truncate_dim)
            return {"loss": loss, "examples": num_examples}
        vectors = encode_texts(model, machine, examples.texts, np.arange(len(examples.texts)))
        results = compute_metrics(vectors[:, : self.truncate_dim], examples)
        for dim in self.settings.matryoshka_dims:
            name = self.metric_names[0]
            results[f"{name}_dim{dim}"] = compute_metrics(vectors[:, :dim], examples)[name]
        return {**results, "examples": num_examples}


def describe_texts(epoch: int, texts: EncodedTexts, numbers: Ints, tokenizer: Tokenizer) -> str:
    """Return the epoch (from 0) and the start of the first text of a batch, for error messages."""
    first_text = tokenizer.decode(texts.get(int(numbers[0]))[1:-1])
    return f"epoch {epoch + 1}, {first_text[:60]!r} and {len(numbers) - 1} more texts"


def encode_texts(
    model: BertForSentenceEmbedding,
    machine: Machine,
    texts: EncodedTexts,
    numbers: Ints,
    dropout_seed: int | None = None,
) -> Floats:
    """Return the vectors of the texts with these numbers, float32 [n, W].

    Args:
        model: The model, in eval mode; with dropout in train mode.
        machine: Device and precision.
        texts: Tokenized texts.
        numbers: int64 [n].
        dropout_seed: Seed of the dropout masks; None for no dropout.
    """
    lengths = texts.get_lengths(numbers).tolist()
    max_tokens = choose_batch_tokens(machine.device, model.config.feed_forward)

    @torch.no_grad()
    def encode(rows: list[int]) -> Floats:
        seed = None
        if dropout_seed is not None:
            # The first row is different in each batch.
            seed = DropoutSeed(torch.tensor(dropout_seed + rows[0]))
            seed_dropout(machine.device, dropout_seed + rows[0])
        packed = pack_texts(texts, numbers[rows].tolist()).to(machine.device)
        with machine.autocast():
            vectors: Floats = model(packed, seed).float().cpu().numpy()
        return vectors

    batches = batch_by_length(lengths, max_tokens)
    parts = list(map_in_threads(encode, batches, machine.device))
    rows = np.concatenate([np.array(batch) for batch, _ in parts])
    vectors = np.concatenate([part for _, part in parts])
    return vectors[np.argsort(rows)]


def pack_texts(texts: EncodedTexts, numbers: Sequence[int]) -> PackedBatch:
    """Pack the texts with these numbers."""
    sequences = [texts.get(number) for number in numbers]
    return pack_sequences([(ids, [0] * len(ids)) for ids in sequences])


def compute_simcse_loss(
    model: BertForSentenceEmbedding,
    machine: Machine,
    examples: EmbeddingExamples,
    settings: EmbeddingSettings,
    truncate_dim: int | None = None,
) -> float:
    """Return the SimCSE loss of unlabeled texts.

    Each text is to find its vector with another dropout mask. The other texts of a group of
    ``batch_size`` texts are the negatives. Only the first ``truncate_dim`` dimensions are compared.
    """
    numbers = examples.anchors
    was_training = model.training
    model.train()
    first, second = (
        normalize_rows(
            encode_texts(model, machine, examples.texts, numbers, seed)[:, :truncate_dim]
        )
        for seed in (0, 2**40)
    )
    model.train(was_training)
    total = 0.0
    for start in range(0, len(numbers), settings.batch_size):
        end = start + settings.batch_size
        logits = torch.from_numpy(first[start:end] @ second[start:end].T) / settings.temperature
        targets = torch.arange(len(logits))
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return total / len(numbers)


def compute_metrics(
    vectors: Floats, examples: EmbeddingExamples | RetrievalSet
) -> dict[str, float]:
    """Return the metrics of examples of any kind but unlabeled texts.

    Args:
        vectors: Vectors of all texts, float32 [number of texts, W].
        examples: The examples.
    """
    if isinstance(examples, RetrievalSet):
        return examples.compute_metrics(vectors)
    compute: Mapping[ExampleKind, Callable[[Floats, EmbeddingExamples], dict[str, float]]] = {
        "pairs": _compute_pair_metrics,
        "scored_pairs": _compute_score_metrics,
        "labeled_texts": _compute_label_metrics,
    }
    return compute[examples.kind](vectors, examples)


def _compute_score_metrics(vectors: Floats, examples: EmbeddingExamples) -> dict[str, float]:
    """Return the correlations of cosine similarities with scores."""
    unit_vectors = normalize_rows(vectors)
    cosines = (unit_vectors[examples.anchors] * unit_vectors[examples.positives]).sum(1)
    predicted, true = cosines.astype(np.float64), examples.scores.astype(np.float64)
    return {
        name: metrics.REGRESSION_METRICS[name](predicted, true)
        for name in METRIC_NAMES["scored_pairs"]
    }


def _compute_label_metrics(vectors: Floats, examples: EmbeddingExamples) -> dict[str, float]:
    """Return the share of texts whose nearest neighbor among the other texts has their label."""
    if len(examples) < 2:
        return {METRIC_NAMES["labeled_texts"][0]: float("nan")}
    text_vectors = vectors[examples.anchors]
    neighbors = rank_documents(text_vectors, text_vectors, 1, np.arange(len(examples)))[:, 0]
    is_correct = examples.labels[neighbors] == examples.labels
    return {METRIC_NAMES["labeled_texts"][0]: float(is_correct.mean())}


def _compute_pair_metrics(vectors: Floats, examples: EmbeddingExamples) -> dict[str, float]:
    """Return how high anchors rank their positives among all positives and negatives."""
    documents = np.unique(np.concatenate([examples.positives, examples.negatives]))
    anchors, anchor_rows = np.unique(examples.anchors, return_inverse=True)
    relevance: list[dict[int, float]] = [{} for _ in anchors]
    document_rows = np.searchsorted(documents, examples.positives)
    for row, document in zip(anchor_rows.tolist(), document_rows.tolist(), strict=True):
        relevance[row][document] = 1.0
    # An anchor that is also a document would find itself.
    identities = examples.texts.identities
    document_of_identity = np.full(len(examples.texts), -1)
    document_of_identity[identities[documents]] = np.arange(len(documents))
    excluded = document_of_identity[identities[anchors]]
    rankings = rank_documents(vectors[anchors], vectors[documents], max(_RECALL_CUTOFFS), excluded)
    results = compute_retrieval_metrics(rankings, relevance, _RECALL_CUTOFFS)
    if len(examples.negatives):
        results[_TRIPLET_ACCURACY] = _compute_triplet_accuracy(vectors, examples)
    return results


def _compute_triplet_accuracy(vectors: Floats, examples: EmbeddingExamples) -> float:
    """Return the share of triplets whose positive is closer to the anchor than the negative."""
    unit_vectors = normalize_rows(vectors)
    counts = np.diff(examples.negative_offsets)
    anchors = unit_vectors[examples.anchors.repeat(counts)]
    positives = unit_vectors[examples.positives.repeat(counts)]
    negatives = unit_vectors[examples.negatives]
    is_closer = (anchors * positives).sum(1) > (anchors * negatives).sum(1)
    return float(is_closer.mean())
