"""A reranker to start from, and rows of queries with relevant and other documents."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.model.task_models import BertForSequenceClassification
from bertsmith.train.reranking.finetune import HEAD
from tests.train.embedding.conftest import (
    TOPICS,
    WriteTable,
    make_text,
    save_start_model,
    write_rows,
)

#: Topics whose documents are relevant to every query, so that a small model learns it fast.
NUM_RELEVANT_TOPICS = len(TOPICS) // 2


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with random weights and the vocabulary WORDS."""
    return save_start_model(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture
def write_table(tmp_path: Path) -> WriteTable:
    """A function that writes rows as JSON lines to a file in tmp_path."""
    return lambda name, rows: write_rows(tmp_path / name, rows)


@pytest.fixture(scope="session")
def start_reranker(start_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a reranker with random weights that predicts very different scores."""
    torch.manual_seed(1)
    model = bundle.load_for_fine_tuning(start_model, HEAD)
    assert isinstance(model.model, BertForSequenceClassification)
    torch.nn.init.normal_(model.model.output.weight, std=0.3)
    directory = tmp_path_factory.mktemp("reranker") / "model"
    bundle.save_fine_tuned(directory, model.model, model.tokenizer, HEAD, {})
    return directory


def make_documents(
    num_queries: int, num_documents: int, seed: int = 0
) -> list[tuple[str, list[str], list[float]]]:
    """Return queries, documents and their relevance; all documents are different.

    Documents with an even index are relevant.
    """
    rng = np.random.default_rng(seed)
    seen: set[str] = set()

    def draw(first_topic: int) -> str:
        while True:
            text = make_text(first_topic + int(rng.integers(NUM_RELEVANT_TOPICS)), rng)
            if text not in seen:
                seen.add(text)
                return text

    queries = []
    for _ in range(num_queries):
        query = draw(0)
        relevance = [float(index % 2 == 0) for index in range(num_documents)]
        documents = [draw(0 if value else NUM_RELEVANT_TOPICS) for value in relevance]
        queries.append((query, documents, relevance))
    return queries


def make_rows(kind: str, num_queries: int, num_documents: int = 4, seed: int = 0) -> list[Any]:
    """Return rows with standard column names.

    Args:
        kind: "scored" (a row for each document), "lists" (a row for each query), "triplets" or
            "pairs" (only relevant documents).
        num_queries: Number of queries.
        num_documents: Number of documents of each query, in pairs half of that.
        seed: Seed of the texts.
    """
    rows: list[dict[str, Any]] = []
    for query, documents, relevance in make_documents(num_queries, num_documents, seed):
        if kind == "lists":
            rows.append({"query": query, "docs": documents, "labels": relevance})
        elif kind == "triplets":
            rows.append({"query": query, "positive": documents[0], "negative": documents[1::2]})
        else:
            for document, value in zip(documents, relevance, strict=True):
                if kind == "scored":
                    rows.append({"query": query, "document": document, "score": value})
                elif value:
                    rows.append({"query": query, "positive": document})
    return rows
