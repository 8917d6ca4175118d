"""Held-out queries of a reranker, whose documents need a contrast."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import TaskError
from bertsmith.tasks.reranking_settings import LossName, RerankingSettings
from bertsmith.train.reranking.batches import BatchSampler
from bertsmith.train.reranking.evaluation import RANKING_METRICS, HeldoutQueries
from bertsmith.train.reranking.training_data import read_data
from tests.train.conftest import WORDS, make_tokenizer
from tests.train.embedding.conftest import WriteTable
from tests.train.reranking.conftest import make_rows


def read_heldout(table: Path, **values: Any) -> HeldoutQueries:
    """Return the first held-out queries of a run."""
    settings = RerankingSettings(train_files=[str(table)], max_seqlen=43, **values)
    return next(iter(read_data(settings, make_tokenizer()).heldout.values()))


def test_a_single_held_out_query_is_ranked_among_training_documents(
    write_table: WriteTable,
) -> None:
    """With few queries that have only positives, one is held out and gets random negatives."""
    heldout = read_heldout(write_table("t.jsonl", make_rows("pairs", 5, num_documents=2)))
    assert heldout.metric_names == RANKING_METRICS
    assert heldout.examples.counts.tolist() == [5], "all documents"
    assert sorted(heldout.examples.scores.tolist()) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("loss", ["ranknet", "mnrl"])
def test_documents_of_unusable_queries_are_random_negatives(
    write_table: WriteTable, loss: LossName
) -> None:
    """A query that is usable only with random negatives gets those of queries that are not."""
    words = WORDS[:12]
    rows = [{"query": f"fa {word}", "document": f"ba {word}", "score": 0.0} for word in words]
    rows[0]["score"] = 1.0
    settings = RerankingSettings(
        train_files=[str(write_table("t.jsonl", rows))],
        validation_files={"dev": str(write_table("dev.jsonl", make_rows("scored", 4)))},
        max_seqlen=43,
        loss=loss,
        random_negatives=4,
    )
    data = read_data(settings, make_tokenizer())
    sampler = BatchSampler(data.train, settings, 0, data.negatives)
    (group,) = sampler.draw_batch(0, 0)
    assert group.scores.tolist() == [1, 0, 0, 0, 0]


def test_held_out_queries_without_contrast_get_other_documents(write_table: WriteTable) -> None:
    """Held-out queries may have only relevant documents although others are in the table."""
    rows = make_rows("scored", 20)
    for row in rows:
        row["score"] = 1.0
    # A document of a training query.
    rows[1]["score"] = 0.0
    heldout = read_heldout(write_table("t.jsonl", rows))
    assert heldout.metric_names == RANKING_METRICS
    assert len(heldout.examples) == 2
    assert heldout.examples.counts.tolist() == [24, 24], "4 relevant ones and 20 others"
    dev = write_table("dev.jsonl", rows[4:])
    heldout = read_heldout(write_table("t.jsonl", rows), validation_files={"dev": str(dev)})
    assert heldout.examples.counts.tolist() == [24] * 19


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_impossible_contrast_is_an_error_that_names_dev(
    write_table: WriteTable, score: float
) -> None:
    """Without a document that is not judged, or without a relevant one, there is no metric."""
    rows: list[dict[str, Any]] = [
        {"query": query, "document": document, "score": score}
        for query in ("ba", "be", "bi")
        for document in ("bo", "bu")
    ]
    if not score:
        # A training query; its score makes the table usable.
        rows[0]["score"] = 1.0
    with pytest.raises(TaskError, match=r"held out from .* every document has the score .* --dev"):
        read_heldout(write_table("t.jsonl", rows))
