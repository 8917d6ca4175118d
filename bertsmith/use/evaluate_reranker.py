"""Evaluate how well a model with one output ranks the documents of queries."""

from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.reranking_data import PairEncoder, read_reranking_examples
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.train.reranking.evaluation import build_heldout_queries
from bertsmith.use.model_setup import resolve_reranker


def evaluate_reranker(
    model: FineTunedBundle | Path | str,
    data: Path | str,
    *,
    settings: RerankingSettings | None = None,
    fast: bool = False,
) -> dict[str, Any]:
    """Compute the metrics of a reranker on queries with candidate documents.

    Args:
        model: A loaded model, or the path of a model directory or run directory. The model has one
            output.
        data: A table as for ``finetune_reranker``.
        settings: Columns of the table, how to read it, and which scores are relevant.
        fast: Whether to use 8-bit or 16-bit arithmetic.

    Returns:
        nDCG@10, MRR@10 and MAP by name; if no query has a relevant and another document, ROC-AUC or
        correlations of scores and predictions. ``examples`` is the number of evaluated queries (or
        pairs), and ``counts`` the number of rows read and used.

    Raises:
        BertsmithError: The model or the data cannot be read, or all documents are equally relevant.
    """
    bundle = resolve_reranker(model, fast=fast)
    settings = settings or RerankingSettings()
    max_seqlen = get_task_settings(bundle).max_seqlen
    assert max_seqlen is not None
    path = Path(data)
    examples, file_counts = read_reranking_examples(
        [path], settings, bundle.tokenizer, max_seqlen, settings.columns
    )
    heldout = build_heldout_queries(examples, settings.relevance_threshold, str(path))
    encoder = PairEncoder(examples.texts, bundle.tokenizer, max_seqlen)
    metrics = heldout.evaluate(bundle.model, encoder)
    return {**metrics, "counts": file_counts[0].as_dict()}
