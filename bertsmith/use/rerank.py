"""Order documents by their relevance to a query, with a model with one output."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.use.inputs import check_is_text_list
from bertsmith.use.model_setup import resolve_reranker
from bertsmith.use.predict import Prediction, iter_predictions


@dataclass(frozen=True)
class RankedDocument:
    """A document and its relevance to the query.

    Attributes:
        index: Index of the document in the list of documents, from 0.
        score: Relevance from 0 to 1, the sigmoid of the model's output; with raw scores the output.
        text: The document.
        is_truncated: Whether the query or the document was truncated to the maximum length.
    """

    index: int
    score: float
    text: str
    is_truncated: bool


def rerank(
    model: FineTunedBundle | Path | str,
    query: str,
    documents: Sequence[str],
    *,
    top: int | None = None,
    raw_scores: bool = False,
    fast: bool = False,
) -> list[RankedDocument]:
    """Order documents by their relevance to a query, most relevant first.

    Args:
        model: A loaded model, or the path of a model directory or run directory. The model has one
            output, such as those of ``finetune_reranker`` and of sentence-transformers'
            ``CrossEncoder``.
        query: The query.
        documents: The documents.
        top: Maximum number of documents to return; None for all.
        raw_scores: Whether to return the outputs of the model instead of their sigmoid.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        The documents; those with equal scores in input order.

    Raises:
        ModelError: The model does not have one output.
        InputError: A text is empty, or ``top`` is less than 1.
    """
    check_is_text_list(documents)
    if top is not None and top < 1:
        raise InputError(f"top is {top}; expected 1 or more")
    bundle = resolve_reranker(model, fast=fast)
    return rank_documents(bundle, query, documents, raw_scores=raw_scores)[:top]


def check_ranking_texts(query: str, documents: Sequence[str]) -> None:
    """Raise InputError if the query or a document is empty."""
    if not query.strip():
        raise InputError("the query is empty; expected at least one word")
    for number, document in enumerate(documents, 1):
        if not document.strip():
            raise InputError(f"document {number:,} is empty; expected at least one word")


def rank_documents(
    bundle: FineTunedBundle, query: str, documents: Sequence[str], *, raw_scores: bool = False
) -> list[RankedDocument]:
    """Order documents with a loaded model; see ``rerank``."""
    check_ranking_texts(query, documents)
    predictions = list(iter_predictions(bundle, [(query, document) for document in documents]))
    return [
        RankedDocument(index, score, documents[index], predictions[index].is_truncated)
        for index, score in order_scores(predictions, raw=raw_scores)
    ]


def order_scores(
    predictions: Sequence[Prediction], *, raw: bool = False
) -> list[tuple[int, float]]:
    """Return (index, score) of each prediction, highest score first.

    Args:
        predictions: Predictions of a model with one output.
        raw: Return the outputs; otherwise their sigmoid, which has the same order.
    """
    outputs = [prediction.score or 0.0 for prediction in predictions]
    order = sorted(range(len(outputs)), key=lambda index: -outputs[index])
    return [(index, outputs[index] if raw else sigmoid(outputs[index])) for index in order]


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)), without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))
