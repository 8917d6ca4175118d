"""Evaluate the vectors of a model on scored pairs, pairs, triplets, labeled texts or retrieval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError
from bertsmith.tasks.beir import RetrievalSet, find_qrels, is_beir_folder, read_retrieval_set
from bertsmith.tasks.embedding_data import EmbeddingExamples, read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.embedding.evaluation import compute_metrics
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import VectorSettings


def evaluate_embeddings(
    model: Embedder | Path | str,
    data: Path | str,
    *,
    settings: EmbeddingSettings | None = None,
    split: str = "test",
    dimensions: int | None = None,
    fast: bool = False,
) -> dict[str, Any]:
    """Compute the metrics of a model's vectors.

    Args:
        model: An embedder, a model directory, a run directory or a hub id. Any BERT has vectors;
            see ``Embedder.encode`` for how they are pooled.
        data: A table as for ``finetune_embedder``, or a folder in BEIR's format.
        settings: Columns of the table and how to read it.
        split: The split of a folder: the name of a file in qrels, without its suffix.
        dimensions: Use only this many first dimensions of the vectors; None for all.
        fast: Whether to use 8-bit or 16-bit arithmetic.

    Returns:
        The metrics by name, and ``counts``, the number of examples read and used. Scored pairs have
        the Spearman and Pearson correlation of cosine similarity and score; pairs and BEIR have
        nDCG@10, MRR@10 and recall; pairs with negatives also triplet accuracy; labeled texts have
        the share of texts whose nearest neighbor has the same label.

    Raises:
        BertsmithError: The model or the data cannot be read.
    """
    embedder = model if isinstance(model, Embedder) else Embedder.load(model, fast=fast)
    spec = embedder.resolve_settings(VectorSettings())
    if dimensions is not None and not 1 <= dimensions <= spec.width:
        raise InputError(
            f"dimensions is {dimensions}, but the vectors have {spec.width}; give at most that many"
        )

    def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        tokenized = embedder.with_token_counter(counts.token_counts).tokenize(texts)
        counts.num_truncated += tokenized.num_truncated
        return tokenized.sequences

    path = Path(data)
    examples: EmbeddingExamples | RetrievalSet
    if is_beir_folder(path):
        examples, counts = read_retrieval_set(path, find_qrels(path, [split]), tokenize)
    else:
        settings = settings or EmbeddingSettings()
        examples, file_counts = read_examples([path], settings, tokenize, settings.columns)
        counts = file_counts[0]
        if examples.kind == "texts":
            raise InputError(
                f"{path}: texts without a pair, score or label have no metric; name more columns "
                "(--pair, --score or --label)"
            )
    numbers = examples.list_used_texts()
    sequences = [examples.texts.get(number) for number in numbers.tolist()]
    vectors = np.zeros((len(examples.texts), spec.width), np.float32)
    for rows, batch_vectors in embedder.encode_batches(sequences, spec):
        vectors[numbers[rows]] = batch_vectors
    metrics = compute_metrics(vectors[:, :dimensions], examples)
    return {**metrics, "counts": counts.as_dict()}
