"""Evaluate the vectors of a model on scored pairs, pairs, triplets, labeled texts or retrieval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError
from bertsmith.tasks.beir import RetrievalSet, find_qrels, is_beir_folder, read_retrieval_set
from bertsmith.tasks.embedding_data import (
    EmbeddingExamples,
    TextPrompts,
    TokenizeTexts,
    read_examples,
)
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.embedding.evaluation import compute_metrics
from bertsmith.train.embedding.training_data import get_text_prompts
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

    In pairs and BEIR, the texts have the model's prompts of queries and documents.

    Args:
        model: An embedder, a model directory, a run directory or a hub id. Any BERT has vectors;
            see ``Embedder.encode`` for how they are pooled. An embedder with a named prompt adds it
            to every text.
        data: A table as for ``finetune_embedder``, or a folder in BEIR's format.
        settings: Columns of the table and how to read it.
        split: The split of a folder: the name of a file in qrels, without its suffix.
        dimensions: Use only this many first dimensions of the vectors; None for all.
        fast: Whether to use 8-bit or 16-bit arithmetic; an Embedder keeps its own.

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
    tokenize = build_tokenize_function(embedder)
    config = embedder.text_config
    prompts = get_text_prompts(config)
    if embedder.prompt_name is not None:
        prompts = TextPrompts(config.prompt, config.prompt, config.prompt)
    path = Path(data)
    examples: EmbeddingExamples | RetrievalSet
    if is_beir_folder(path):
        qrels = find_qrels(path, [split])
        examples, counts = read_retrieval_set(path, qrels, tokenize, prompts)
    else:
        settings = settings or EmbeddingSettings()
        examples, file_counts = read_examples(
            [path],
            settings,
            tokenize,
            settings.columns,
            prompts=prompts,
            keep_duplicate_scores=True,
        )
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


def build_tokenize_function(embedder: Embedder) -> TokenizeTexts:
    """Return a function that tokenizes texts that include their prompts."""

    def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        counting_embedder = embedder.without_prompt().with_token_counter(counts.token_counts)
        tokenized = counting_embedder.tokenize(texts)
        counts.num_truncated += tokenized.num_truncated
        return tokenized.sequences

    return tokenize
