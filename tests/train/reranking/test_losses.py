"""Losses and gradients equal those of sentence-transformers, in one or several micro-batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.cross_encoder import CrossEncoder
from sentence_transformers.cross_encoder import losses as reference_losses
from torch import Tensor

from bertsmith import bundle
from bertsmith.bundle import to_hf_state_dict
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.tasks.reranking_data import read_reranking_examples
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.train.reranking.finetune import HEAD
from bertsmith.train.reranking.objective import RerankingObjective
from tests.train.embedding.conftest import WriteTable
from tests.train.reranking.conftest import make_documents

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
MACHINE = Machine(torch.device("cpu"), "fp32", "padded")
MAX_SEQLEN = 37
#: Maximum tokens of a micro-batch: for the whole batch, and for about one query.
LARGE, SMALL = 16384, 48
#: Queries, documents and scores. Numbers of documents differ, and scores have ties.
QUERIES = [
    (query, documents[:count], [((index + count) % 4) / 3 for index in range(count)])
    for count, (query, documents, _) in zip([3, 5, 2, 4, 5], make_documents(5, 5), strict=True)
]
#: For each query a positive and three negatives.
TRIPLETS = [
    (query, documents, [1.0, 0.0, 0.0, 0.0]) for query, documents, _ in make_documents(5, 4)
]


def build_objective(
    model_path: Path, settings: RerankingSettings, table: Path, micro_batch_tokens: int
) -> RerankingObjective:
    """Return the objective of a table whose examples are all in one batch."""
    model = bundle.load_for_fine_tuning(model_path, HEAD, NO_DROPOUT, keep_head=True)
    examples, _ = read_reranking_examples(
        [table], settings, model.tokenizer, MAX_SEQLEN, settings.columns
    )
    model.model.train()
    return RerankingObjective(
        model.model, settings, examples, {}, MACHINE, model.tokenizer,
        micro_batch_tokens=micro_batch_tokens, seed=0,
    )  # fmt: skip


def compute_gradients(objective: RerankingObjective) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the first batch and the gradients by name."""
    micro_batches = objective.make_micro_batches(0)
    total = 0.0
    for micro_batch in micro_batches:
        seed = DropoutSeed(torch.tensor(0))
        loss = objective.compute_losses(micro_batch, micro_batches, seed)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    parameters = objective.model.named_parameters()
    return total, {name: p.grad for name, p in parameters if p.grad is not None}


def compute_reference_loss(
    model: CrossEncoder, queries: list[Any], settings: RerankingSettings
) -> Any:
    """Return the loss of sentence-transformers with the same settings."""
    texts, documents, scores = map(list, zip(*queries, strict=True))
    pairs = [(query, document, score) for query, *lists in queries
             for document, score in zip(*lists, strict=True)]  # fmt: skip
    loss: Any
    if settings.loss == "bce":
        columns = [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
        weight = torch.tensor(settings.positive_weight)
        loss = reference_losses.BinaryCrossEntropyLoss(model, pos_weight=weight)
        return loss(columns, torch.tensor([pair[2] for pair in pairs]) / settings.max_score)
    labels = [torch.tensor(values) for values in scores]
    if settings.loss == "ranknet":
        loss = reference_losses.RankNetLoss(model, reduction_log="natural")
        return loss([texts, documents], labels)
    if settings.loss == "listnet":
        return reference_losses.ListNetLoss(model)([texts, documents], labels)
    columns = [texts, *map(list, zip(*documents, strict=True))]
    if settings.loss == "margin_mse":
        return reference_losses.MarginMSELoss(model)(columns, torch.tensor(scores))
    loss = reference_losses.MultipleNegativesRankingLoss(model, scale=int(1 / settings.temperature))
    # Only the negatives in the table.
    loss.get_in_batch_negatives = lambda *_: iter(())
    return loss(columns, torch.empty(0))


@pytest.mark.parametrize("micro_batch_tokens", [LARGE, SMALL], ids=["one", "several"])
@pytest.mark.parametrize(
    ("queries", "values"),
    [
        (QUERIES, {"loss": "bce", "max_score": 1.25}),
        (QUERIES, {"loss": "bce", "positive_weight": 3.0}),
        (QUERIES, {"loss": "ranknet"}),
        (QUERIES, {"loss": "listnet"}),
        (TRIPLETS, {"loss": "margin_mse"}),
        (TRIPLETS, {"loss": "mnrl", "temperature": 0.25}),
    ],
    ids=["bce", "weighted", "ranknet", "listnet", "margin_mse", "mnrl"],
)
def test_loss_and_gradients_equal_those_of_sentence_transformers(
    start_reranker: Path,
    write_table: WriteTable,
    queries: list[Any],
    values: dict[str, Any],
    micro_batch_tokens: int,
) -> None:
    """From the same weights, the loss and all gradients agree within 1e-6."""
    settings = RerankingSettings(batch_size=100, max_seqlen=MAX_SEQLEN, **values)
    table = write_table(
        "t.jsonl",
        [{"query": query, "docs": docs, "labels": labels} for query, docs, labels in queries],
    )
    objective = build_objective(start_reranker, settings, table, micro_batch_tokens)
    assert (len(objective.make_micro_batches(0)) > 2) == (micro_batch_tokens == SMALL)
    loss, gradients = compute_gradients(objective)
    model = CrossEncoder(str(start_reranker), device="cpu", max_length=MAX_SEQLEN)
    model.eval()
    expected_loss = compute_reference_loss(model, queries, settings)
    expected_loss.backward()
    assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-6, abs=1e-6)
    expected = {
        name.removeprefix("0.model."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    actual = to_hf_state_dict(gradients)
    assert actual.keys() == expected.keys()
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in expected.values()))
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=1e-6 * scale, err_msg=name)


def test_mnrl_compares_each_positive_with_the_negatives(
    start_reranker: Path, write_table: WriteTable
) -> None:
    """A query with two positives has two terms, each without the other positive."""
    query, documents, _ = TRIPLETS[0]
    settings = RerankingSettings(loss="mnrl", batch_size=9, max_seqlen=MAX_SEQLEN)
    losses = []
    for name, rows in [
        ("both", [(0, 1), (1, 1), (2, 0), (3, 0)]),
        ("first", [(0, 1), (2, 0), (3, 0)]),
        ("second", [(1, 1), (2, 0), (3, 0)]),
    ]:
        table = write_table(
            f"{name}.jsonl",
            [{"query": query, "document": documents[i], "score": score} for i, score in rows],
        )
        losses.append(compute_gradients(build_objective(start_reranker, settings, table, LARGE))[0])
    assert losses[0] == pytest.approx((losses[1] + losses[2]) / 2)
    assert losses[1] != pytest.approx(losses[2])
