"""Batches of a reranker: groups of documents, random negatives and held-out queries."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.tasks.reranking_data import RerankingExamples, read_reranking_examples
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.train.reranking.batches import (
    BatchSampler,
    add_heldout_negatives,
    draw_documents,
    find_usable_queries,
)
from bertsmith.train.reranking.training_data import hold_out_queries
from tests.train.conftest import make_tokenizer
from tests.train.embedding.conftest import WriteTable
from tests.train.reranking.conftest import make_rows


def read(table: Path, **values: Any) -> tuple[RerankingExamples, RerankingSettings]:
    """Return the examples of a table, and settings."""
    settings = RerankingSettings(train_files=[str(table)], **values)
    examples, _ = read_reranking_examples([table], settings, make_tokenizer(), 43, settings.columns)
    return examples, settings


def get_judged(examples: RerankingExamples) -> dict[int, dict[int, float]]:
    """Return the score of each document of each query."""
    judged: dict[int, dict[int, float]] = {}
    for row, document, score in zip(
        examples.query_rows.tolist(),
        examples.documents.tolist(),
        examples.scores.tolist(),
        strict=True,
    ):
        judged.setdefault(int(examples.queries[row]), {})[document] = score
    return judged


@pytest.mark.parametrize("loss", ["ranknet", "listnet", "mnrl"])
def test_documents_of_a_query_are_in_one_batch(write_table: WriteTable, loss: str) -> None:
    """An epoch has each query once, with all documents; order and batches depend on the epoch."""
    rows = make_rows("scored", 11)
    # The documents of a query are not in consecutive rows.
    table = write_table("t.jsonl", rows[::2] + rows[1::2])
    examples, settings = read(table, loss=loss, batch_size=4)
    sampler = BatchSampler(examples, settings, seed=0)
    assert sampler.num_batches == 3
    epochs = []
    for epoch in (0, 1):
        batches = [sampler.draw_batch(epoch, step) for step in range(3)]
        assert [len(batch) for batch in batches] == [3, 4, 4]
        epochs.append([group for batch in batches for group in batch])
    judged = get_judged(examples)
    for groups in epochs:
        assert sorted(group.query for group in groups) == sorted(judged)
        for group in groups:
            pairs = zip(group.documents.tolist(), group.scores.tolist(), strict=True)
            assert dict(pairs) == judged[group.query]
    assert [group.query for group in epochs[0]] != [group.query for group in epochs[1]]


def test_batch_is_a_function_of_seed_epoch_and_step(write_table: WriteTable) -> None:
    """A new sampler draws the same documents for a step; seed and epoch change them."""
    table = write_table("t.jsonl", make_rows("pairs", 20))
    examples, settings = read(table, loss="mnrl", batch_size=5, random_negatives=3)

    def draw(seed: int, epoch: int, step: int) -> list[list[int]]:
        batch = BatchSampler(examples, settings, seed).draw_batch(epoch, step)
        return [[group.query, *group.documents.tolist()] for group in batch]

    sampler = BatchSampler(examples, settings, 7)
    for epoch, step in [(0, 0), (0, 1), (2, 3)]:
        drawn = [[g.query, *g.documents.tolist()] for g in sampler.draw_batch(epoch, step)]
        assert drawn == draw(7, epoch, step)
    assert draw(7, 0, 0) != draw(8, 0, 0)
    # The random documents of a query change from epoch to epoch.
    documents = [
        {group[0]: group[1:] for step in range(4) for group in draw(7, epoch, step)}
        for epoch in (0, 1)
    ]
    assert documents[0].keys() == documents[1].keys()
    num_changed = sum(documents[0][query] != documents[1][query] for query in documents[0])
    assert num_changed > 10


@pytest.mark.parametrize("loss", ["bce", "mnrl"])
def test_random_negatives_are_not_judged_for_the_query(write_table: WriteTable, loss: str) -> None:
    """Each query, or relevant pair, gets distinct documents of other queries with the score 0."""
    examples, settings = read(
        write_table("t.jsonl", make_rows("scored", 6)), loss=loss, batch_size=100,
        random_negatives=5,
    )  # fmt: skip
    judged = get_judged(examples)
    groups = BatchSampler(examples, settings, seed=0).draw_batch(0, 0)
    assert len(groups) == (24 if loss == "bce" else 6)
    drawn = set()
    for group in groups:
        num_judged = 1 if loss == "bce" else 4
        negatives = group.documents[num_judged:].tolist()
        if group.scores[0] == 0 and loss == "bce":
            assert not negatives, "a pair that is not relevant gets no negatives"
            continue
        assert len(set(negatives)) == 5
        assert not set(negatives) & judged[group.query].keys()
        assert not group.scores[num_judged:].any()
        drawn |= set(negatives)
    assert len(drawn) > 15


@pytest.mark.parametrize("loss", ["bce", "mnrl"])
def test_a_query_is_not_its_own_negative(write_table: WriteTable, loss: str) -> None:
    """In pairs of similar texts, each of which is a query and a document, its text is not drawn."""
    words = ["ba", "be", "bi", "bo", "bu", "da"]
    pairs = [(words[i], words[i ^ 1]) for i in range(6)]
    rows = [{"query": query, "document": document} for query, document in pairs]
    examples, settings = read(
        write_table("t.jsonl", rows), loss=loss, batch_size=6, random_negatives=4
    )
    groups = BatchSampler(examples, settings, seed=0).draw_batch(0, 0)
    assert len(groups) == 6
    for group in groups:
        assert group.query not in group.documents
        assert len(group.documents) == 5
    heldout = add_heldout_negatives(examples, examples.documents)
    for query, documents in get_judged(heldout).items():
        assert query not in documents
        assert len(documents) == 5


def test_query_with_all_documents_needs_different_scores(write_table: WriteTable) -> None:
    """No random negative can be drawn for queries that all have the only document."""
    rows = [{"query": query, "document": "d"} for query in ("ba", "be", "bi", "bo")]
    examples, settings = read(write_table("t.jsonl", rows), loss="ranknet", random_negatives=4)
    assert not len(find_usable_queries(examples, settings))
    # The only other document is the query itself.
    rows = [{"query": "ba", "document": "be"}, {"query": "be", "document": "ba"}]
    examples, settings = read(write_table("u.jsonl", rows), loss="ranknet", random_negatives=4)
    assert not len(find_usable_queries(examples, settings))


def test_best_and_worst_document_are_drawn() -> None:
    """A subset of a query's documents has one with the highest score and one with the lowest."""
    scores = np.array([9, 0.5, 1, 0, 0.5, 0.5, 0, 1, 7], np.float32)
    pairs = np.arange(1, 8)
    subsets = set()
    for seed in range(300):
        drawn = draw_documents(scores, pairs, 3, np.random.default_rng(seed))
        assert len(set(drawn.tolist())) == 3
        assert set(drawn.tolist()) <= set(pairs.tolist())
        assert (scores[drawn].min(), scores[drawn].max()) == (0, 1)
        subsets.add(tuple(drawn.tolist()))
    # 2 best documents, 2 worst ones and 5 others; some subsets have two best or worst ones.
    assert len(subsets) == 16


def test_documents_with_equal_scores_are_drawn_once() -> None:
    """If all scores are equal, the best and the worst document are different documents."""
    scores, pairs = np.ones(5, np.float32), np.arange(5)
    for seed in range(20):
        drawn = draw_documents(scores, pairs, 3, np.random.default_rng(seed))
        assert len(set(drawn.tolist())) == len(drawn) == 3


@pytest.mark.parametrize(
    ("loss", "random_negatives", "expected"),
    [
        ("bce", 0, [0, 1, 2, 3]),
        ("ranknet", 0, [0, 3]),
        ("listnet", 0, [0, 3]),
        ("mnrl", 0, [0]),
        ("mnrl", 2, [0, 1, 3]),
        ("ranknet", 2, [0, 1, 3]),
    ],
)
def test_queries_without_contrast_are_not_used(
    write_table: WriteTable, loss: str, random_negatives: int, expected: list[int]
) -> None:
    """Pairwise and listwise losses need documents with different scores."""
    scores: dict[str, list[float]] = {"ba": [1, 0], "be": [1, 1], "bi": [0, 0], "bo": [0.5, 1]}
    rows = [
        {"query": query, "document": f"{query} d{index}", "score": score}
        for query, values in scores.items()
        for index, score in enumerate(values)
    ]
    examples, settings = read(
        write_table("t.jsonl", rows), loss=loss, random_negatives=random_negatives
    )
    assert find_usable_queries(examples, settings).tolist() == expected


def test_held_out_queries_are_not_trained_on(write_table: WriteTable) -> None:
    """A tenth of the queries is held out with all documents, the same for every seed."""
    examples, settings = read(write_table("t.jsonl", make_rows("scored", 30)))
    train, heldout = hold_out_queries(examples, settings)
    assert (len(train), len(heldout)) == (27, 3)
    assert not set(train.queries.tolist()) & set(heldout.queries.tolist())
    judged = get_judged(examples)
    assert get_judged(train) | get_judged(heldout) == judged


def test_held_out_pairs_are_ranked_among_other_documents(write_table: WriteTable) -> None:
    """Held-out queries with only relevant documents get documents of the other queries."""
    examples, _ = read(write_table("t.jsonl", make_rows("pairs", 5)))
    extended = add_heldout_negatives(examples, examples.documents)
    assert extended.counts.tolist() == [10] * 5, "all documents of 5 queries with 2 documents each"
    judged = get_judged(examples)
    for query, documents in get_judged(extended).items():
        assert {document for document, score in documents.items() if score} == set(judged[query])
