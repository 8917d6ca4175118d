"""Losses and gradients equal those of sentence-transformers, with and without gradient caching."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as reference_losses
from torch import Tensor

from bertsmith.bundle import to_hf_state_dict
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.tasks.embedding_data import read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding import losses
from bertsmith.train.embedding.batches import build_batch
from bertsmith.train.embedding.losses import RankingTargets, iter_loss_terms
from bertsmith.train.embedding.objective import EmbeddingObjective
from bertsmith.train.embedding.start_model import EmbeddingBundle, load_start_model
from bertsmith.train.embedding.training_data import build_tokenize_function
from bertsmith.train.engine.step import derive_dropout_seed
from tests.train.embedding.conftest import WIDTH, WriteTable, make_rows

NUM_EXAMPLES = 17
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
MACHINE = Machine(torch.device("cpu"), "fp32", "padded")
#: Maximum tokens of a micro-batch: for the whole batch, and for a few texts.
LARGE, SMALL = 16384, 48


def build_objective(
    bundle: EmbeddingBundle, table: Path, settings: EmbeddingSettings, micro_batch_tokens: int
) -> EmbeddingObjective:
    """Return the objective of a table whose examples are all in one batch."""
    tokenize = build_tokenize_function(bundle.encoder.tokenizer, bundle.pooling)
    examples, _ = read_examples([table], settings, tokenize, settings.columns)
    bundle.model.train()
    return EmbeddingObjective(
        bundle.model, settings, examples, {}, MACHINE, bundle.encoder.tokenizer,
        micro_batch_tokens=micro_batch_tokens, seed=0,
    )  # fmt: skip


def compute_gradients(
    objective: EmbeddingObjective, step: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch and the gradients by name, as ``take_step`` computes them."""
    model = objective.model
    model.zero_grad()
    micro_batches = objective.make_micro_batches(step)
    total = 0.0
    for index, micro_batch in enumerate(micro_batches):
        seed = DropoutSeed(torch.tensor(derive_dropout_seed(0, step, index)))
        loss = objective.compute_losses(micro_batch, micro_batches, seed)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_reference_loss(
    model: SentenceTransformer, settings: EmbeddingSettings, *, is_cached: bool
) -> Any:
    """Return the loss of sentence-transformers with the same settings."""
    scale = 1 / settings.temperature
    loss: Any
    if settings.loss == "cosent":
        loss = reference_losses.CoSENTLoss(model, scale=scale)
    elif settings.loss == "cosine":
        loss = reference_losses.CosineSimilarityLoss(model)
    elif settings.loss == "triplet":
        metrics = reference_losses.TripletDistanceMetric
        distance = metrics.COSINE if settings.triplet_distance == "cosine" else metrics.EUCLIDEAN
        assert settings.triplet_margin is not None
        loss = reference_losses.TripletLoss(model, distance, settings.triplet_margin)
    elif is_cached:
        loss = reference_losses.CachedMultipleNegativesRankingLoss(
            model, scale=scale, mini_batch_size=3
        )
    else:
        loss = reference_losses.MultipleNegativesRankingLoss(model, scale=scale)
    if settings.matryoshka_dims:
        weights = settings.matryoshka_weights or None
        loss = reference_losses.MatryoshkaLoss(model, loss, settings.matryoshka_dims, weights)
    return loss


CASES: list[tuple[str, dict[str, Any]]] = [
    ("pairs", {"loss": "mnrl"}),
    ("triplets", {"loss": "mnrl", "temperature": 0.11}),
    ("scored_pairs", {"loss": "cosent"}),
    ("scored_pairs", {"loss": "cosine"}),
    ("triplets", {"loss": "triplet", "triplet_margin": 0.5}),
    ("triplets", {"loss": "triplet", "triplet_margin": 5.0, "triplet_distance": "euclidean"}),
    ("triplets", {"loss": "mnrl", "matryoshka_dims": [WIDTH, 9], "matryoshka_weights": [1.0, 0.3]}),
    ("scored_pairs", {"loss": "cosent", "matryoshka_dims": [WIDTH, 17, 5]}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("is_cached", [False, True], ids=["direct", "cached"])
@pytest.mark.parametrize(
    ("kind", "values"), CASES, ids=[f"{kind}-{'-'.join(values)}" for kind, values in CASES]
)
def test_loss_and_gradients_equal_those_of_sentence_transformers(
    start_model: Path,
    write_table: WriteTable,
    tmp_path: Path,
    kind: str,
    values: dict[str, Any],
    is_cached: bool,
    dtype: torch.dtype,
) -> None:
    """From the same weights, the loss and all gradients agree within 1e-6.

    The temperature of the float32 tests is higher, because it divides the rounding errors of the
    cosine similarities.
    """
    if dtype == torch.float32:
        values = values | {"temperature": 0.5}
    rows = make_rows(kind, NUM_EXAMPLES)
    if kind == "scored_pairs":
        # Scores with ties.
        for index, row in enumerate(rows):
            row["score"] = (index % 5) / 4
    settings = EmbeddingSettings(
        train_files=["a"], batch_size=NUM_EXAMPLES, normalize=False, **values
    )
    bundle = load_start_model(start_model, settings, NO_DROPOUT)
    bundle.model.to(dtype)
    objective = build_objective(
        bundle, write_table("t.jsonl", rows), settings, SMALL if is_cached else LARGE
    )
    assert (len(objective.make_micro_batches(0)) > 1) == is_cached
    loss, gradients = compute_gradients(objective)
    expected_loss, expected = compute_reference_gradients(
        start_model, tmp_path / "st", rows, settings, dtype=dtype, is_cached=is_cached
    )
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
    hf_gradients = to_hf_state_dict(gradients)
    actual = {name.removeprefix("bert."): gradient for name, gradient in hf_gradients.items()}
    assert actual.keys() == expected.keys()
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in expected.values()))
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=1e-6 * scale, err_msg=name)


def compute_reference_gradients(
    start_model: Path,
    folder: Path,
    rows: list[dict[str, Any]],
    settings: EmbeddingSettings,
    *,
    dtype: torch.dtype,
    is_cached: bool,
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients that sentence-transformers computes for all rows."""
    write_sentence_transformers(start_model, folder, normalize=False)
    model = SentenceTransformer(str(folder), device="cpu").to(dtype)
    # In eval mode there is no dropout, and gradients are computed all the same.
    model.eval()
    columns = [name for name in rows[0] if name != "score"]
    features = [model.preprocess([row[name] for row in rows]) for name in columns]
    labels = torch.tensor([row.get("score", 0.0) for row in rows])
    loss = make_reference_loss(model, settings, is_cached=is_cached)(features, labels)
    loss.backward()
    parameters = model[0].auto_model.named_parameters()
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("kind", ["triplets", "scored_pairs", "texts", "labeled_texts"])
def test_cached_gradients_are_those_of_the_whole_graph_with_dropout(
    start_model: Path, write_table: WriteTable, kind: str
) -> None:
    """With dropout, caching gives the gradient of the loss with all graphs in memory."""
    loss_name: Any = "cosent" if kind == "scored_pairs" else "mnrl"
    settings = EmbeddingSettings(train_files=["a"], batch_size=NUM_EXAMPLES, loss=loss_name)
    bundle = load_start_model(start_model, settings, {})
    table = write_table("t.jsonl", make_rows(kind, 2 * NUM_EXAMPLES))
    objective = build_objective(bundle, table, settings, SMALL)
    loss, gradients = compute_gradients(objective, step=1)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}

    model = objective.model
    model.zero_grad()
    micro_batches = objective.make_micro_batches(1)
    assert len(micro_batches) > 2
    targets = micro_batches[0].targets
    # torch.searchsorted warns about other tensors.
    assert not isinstance(targets, RankingTargets) or targets.excluded_anchors.is_contiguous()
    vectors = torch.empty(sum(len(micro_batch.rows) for micro_batch in micro_batches), WIDTH)
    for index, micro_batch in enumerate(micro_batches):
        seed = DropoutSeed(torch.tensor(derive_dropout_seed(0, 1, index)))
        vectors = vectors.index_copy(0, micro_batch.rows, model(micro_batch.packed, seed))
    expected = torch.stack([*iter_loss_terms(vectors, micro_batches[0].targets, settings)]).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = max(1.0, float(parameter.grad.abs().max()))
        np.testing.assert_allclose(
            gradients[name], parameter.grad, rtol=0, atol=1e-6 * scale, err_msg=name
        )


def test_terms_add_up_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking loss is a cross-entropy without excluded candidates, in terms of any size."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(30, 7, generator=generator)
    pairs = torch.tensor([[0, 12], [3, 1], [3, 2], [9, 11]])
    targets = RankingTargets(torch.arange(10), torch.arange(10, 30), *pairs.T.contiguous())
    settings = EmbeddingSettings(temperature=1.0)
    expected = torch.stack([*iter_loss_terms(vectors, targets, settings)])
    monkeypatch.setattr(losses, "_MAX_SIMILARITIES", 3 * 20)
    terms = torch.stack([*iter_loss_terms(vectors, targets, settings)])
    assert (len(expected), len(terms)) == (1, 4)
    assert float(terms.sum()) == pytest.approx(float(expected), rel=1e-6)
    cosines = torch.cosine_similarity(vectors[:10, None], vectors[None, 10:], dim=-1).double()
    weights = torch.exp(cosines / settings.temperature)
    weights[pairs[:, 0], pairs[:, 1]] = 0
    probabilities = weights.diagonal() / weights.sum(1)
    assert float(expected) == pytest.approx(float(-probabilities.log().mean()), rel=1e-5)


def test_duplicates_are_no_negatives(start_model: Path, write_table: WriteTable) -> None:
    """An anchor is not compared with itself or with the positive of an equal anchor."""
    a, b, c, d, e = ("ba", "be", "bi", "bo", "bu")
    pairs = [(a, b), (a, c), (c, d), (d, a), (e, b)]
    rows = [{"anchor": anchor, "positive": positive} for anchor, positive in pairs]
    settings = EmbeddingSettings(train_files=["a"], loss="mnrl")
    bundle = load_start_model(start_model, settings, NO_DROPOUT)
    tokenize = build_tokenize_function(bundle.encoder.tokenizer, bundle.pooling)
    examples, _ = read_examples(
        [write_table("t.jsonl", rows)], settings, tokenize, settings.columns
    )
    batch = build_batch(examples, np.arange(len(pairs)), settings)
    targets = batch.targets
    assert isinstance(targets, RankingTargets)
    assert len(batch.texts) == 5, "each text is encoded once"
    excluded = zip(
        targets.excluded_anchors.tolist(), targets.excluded_candidates.tolist(), strict=True
    )
    # The first anchor: the positives c (of its other example), a (itself) and b (a duplicate of its
    # positive). The second anchor: b twice, and a. The third: c itself. The fourth: d itself. The
    # last: the duplicate of its positive.
    expected = {(0, 1), (0, 3), (0, 4), (1, 0), (1, 3), (1, 4), (2, 1), (3, 2), (4, 0)}
    assert set(excluded) == expected
