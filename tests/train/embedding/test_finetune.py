"""Training of embedding models: learning, resuming, prompts, memory and the saved model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from bertsmith import bundle
from bertsmith.bundle.metadata import read_info
from bertsmith.files import write_json
from bertsmith.interop.sentence_transformers import read_pooling
from bertsmith.tasks.embedding_data import TextPrompts, read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.embedding.batches import build_batch
from bertsmith.train.embedding.losses import RankingTargets, iter_loss_terms
from bertsmith.train.embedding.start_model import load_start_model, save_embedder
from bertsmith.train.embedding.training_data import build_tokenize_function, get_text_prompts
from bertsmith.train.engine import loop
from bertsmith.train.engine.step import take_step
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.use.embed import Embedder, embed
from bertsmith.use.evaluate_embeddings import evaluate_embeddings
from tests.tasks.test_beir import write_beir_folder
from tests.train.embedding.conftest import WIDTH, WriteTable, make_rows, train


@pytest.mark.parametrize(
    ("kind", "loss", "metric", "min_score"),
    [
        ("pairs", "mnrl", "ndcg@10", 0.6),
        ("triplets", "triplet", "triplet_accuracy", 0.9),
        ("scored_pairs", "cosent", "spearman", 0.8),
        ("scored_pairs", "cosine", "spearman", 0.8),
        ("labeled_texts", "mnrl", "nearest_neighbor_accuracy", 0.9),
        ("labeled_texts", "triplet", "nearest_neighbor_accuracy", 0.9),
    ],
)
def test_each_kind_is_learned(
    start_model: Path,
    write_table: WriteTable,
    tmp_path: Path,
    kind: str,
    loss: str,
    metric: str,
    min_score: float,
) -> None:
    """Held-out metrics after training are high, and better than those of the start model."""
    table = write_table("train.jsonl", make_rows(kind, 240))
    dev = write_table("dev.jsonl", make_rows(kind, 40, seed=1))
    embedding = {"loss": loss, "batch_size": 16, "validation_files": {"dev": str(dev)}}
    result = train(start_model, tmp_path / "run", table, embedding=embedding)
    untrained = train(
        start_model, tmp_path / "untrained", table, embedding=embedding, schedule={"steps": 1,
        "epochs": None}, optim={"lr": 1e-12},
    )  # fmt: skip
    assert result.metrics["examples"] == 40
    assert result.metrics[metric] >= min_score
    assert result.metrics[metric] > untrained.metrics[metric] + 0.02
    assert result.metric_names[0] in result.metrics


@pytest.mark.parametrize("micro_batch_tokens", [16384, 64], ids=["direct", "cached"])
def test_interrupted_run_ends_with_the_same_bytes(
    start_model: Path,
    write_table: WriteTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    micro_batch_tokens: int,
) -> None:
    """A run interrupted within an epoch ends with the same weights and metrics."""
    table = write_table("train.jsonl", make_rows("labeled_texts", 80))
    tables: dict[str, Any] = {
        "run": {"micro_batch_tokens": micro_batch_tokens}, "checkpoint": {"steps": 2}
    }  # fmt: skip
    expected = train(start_model, tmp_path / "uninterrupted", table, **tables)
    num_steps = 0

    def interrupt_step_8(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 8:
            raise KeyboardInterrupt
        return take_step(*arguments, **keywords)

    monkeypatch.setattr(loop, "take_step", interrupt_step_8)
    with pytest.raises(KeyboardInterrupt):
        train(start_model, tmp_path / "interrupted", table, **tables)
    assert not (tmp_path / "interrupted" / "model").exists()
    monkeypatch.undo()
    resumed = train(start_model, tmp_path / "interrupted", table, **tables)
    assert expected.model is not None
    assert resumed.model is not None
    name = bundle.WEIGHTS_FILE
    assert (resumed.model / name).read_bytes() == (expected.model / name).read_bytes()
    assert resumed.metrics == expected.metrics
    again = train(start_model, tmp_path / "interrupted", table, **tables)
    assert again.metrics == expected.metrics, "a finished run returns its result"


def test_sentence_transformers_loads_the_model(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """sentence-transformers loads the model directory and computes the same vectors within 1e-6."""
    rows = make_rows("pairs", 60)
    embedding = {"matryoshka_dims": [WIDTH, 8], "prompt": "ba be ", "batch_size": 16}
    result = train(
        start_model, tmp_path / "run", write_table("train.jsonl", rows), embedding=embedding
    )
    assert result.model is not None
    assert {"ndcg@10_dim32", "ndcg@10_dim8"} <= result.metrics.keys()
    model = SentenceTransformer(str(result.model), device="cpu")
    texts = [row["anchor"] for row in rows] + [" ".join(["bo"] * 60)]
    expected = model.encode(texts)
    np.testing.assert_allclose(embed(result.model, texts), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-5)
    assert model.prompts["default"] == "ba be "
    # Training sees the same tokens as inference.
    embedder = Embedder.load(result.model)
    pooling = read_pooling(result.model)
    assert pooling is not None
    tokenize = build_tokenize_function(embedder.tokenizer, pooling)
    counts = ExampleCounts()
    prompted = ["ba be " + text for text in texts]
    assert tokenize(prompted, counts) == embedder.tokenize(texts).sequences
    assert counts.num_truncated == 1
    assert (pooling.prompt, pooling.matryoshka_dims) == ("ba be ", (WIDTH, 8))
    card = (result.model / "README.md").read_text()
    assert 'library_name: "sentence-transformers"' in card
    assert "Matryoshka dimensions: 32, 8" in card
    assert read_info(result.model)["heldout_metrics"] == result.metrics
    write_latest_snapshot(tmp_path / "run", tmp_path / "snapshot")
    np.testing.assert_array_equal(embed(tmp_path / "snapshot", texts), embed(result.model, texts))


def test_queries_and_documents_have_separate_prompts(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """encode_query and encode_document of sentence-transformers compute the same vectors.

    The prompts are also used in held-out metrics, in ``evaluate_embeddings``, and when the model is
    trained further.
    """
    rows = make_rows("pairs", 40)
    table, dev = write_table("train.jsonl", rows), write_table("dev.jsonl", rows[:20])
    folder = write_beir_folder(
        tmp_path / "beir",
        [{"_id": f"d{i}", "text": row["positive"]} for i, row in enumerate(rows)],
        [{"_id": f"q{i}", "text": row["anchor"]} for i, row in enumerate(rows)],
        [(f"q{i}", f"d{i}", 1) for i in range(len(rows))],
    )
    embedding = {
        "query_prompt": "ba be ", "document_prompt": "bo ", "batch_size": 16,
        "validation_files": {"dev": str(dev), "beir": str(folder)},
    }  # fmt: skip
    result = train(start_model, tmp_path / "run", table, embedding=embedding)
    assert result.model is not None
    reference = SentenceTransformer(str(result.model), device="cpu")
    embedder = Embedder.load(result.model)
    texts = [row["anchor"] for row in rows]
    queries, documents = reference.encode_query(texts), reference.encode_document(texts)
    for vectors, expected in (
        (embedder.with_query_prompt().encode(texts), queries),
        (embedder.with_document_prompt().encode(texts), documents),
        (embedder.encode(texts), reference.encode(texts)),
    ):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    assert np.abs(queries - documents).max() > 1e-3
    for data, prefix in ((dev, ""), (folder, "beir_")):
        metrics = evaluate_embeddings(result.model, data)
        assert metrics["mrr@10"] == pytest.approx(result.metrics[f"{prefix}mrr@10"], abs=1e-6)
    unprompted = evaluate_embeddings(embedder.with_prompt("document"), folder)
    assert unprompted["mrr@10"] != pytest.approx(result.metrics["beir_mrr@10"], abs=1e-6)
    for settings, expected_prompts in (
        (EmbeddingSettings(), ("ba be ", "bo ")),
        (EmbeddingSettings(query_prompt=""), ("", "bo ")),
        (EmbeddingSettings(prompt="be ", document_prompt="ba "), ("be ", "ba ")),
    ):
        prompts = get_text_prompts(load_start_model(result.model, settings, {}).pooling)
        assert (prompts.query, prompts.document) == expected_prompts


@pytest.mark.parametrize("kind", ["scored_pairs", "texts"])
def test_truncated_vectors_are_evaluated(
    start_model: Path, write_table: WriteTable, tmp_path: Path, kind: str
) -> None:
    """Metrics are those of vectors with ``truncate_dim``; old Matryoshka dimensions are dropped."""
    start = tmp_path / "start"
    save_embedder(start, load_start_model(start_model, EmbeddingSettings(), {}), {})
    config = start / "config_sentence_transformers.json"
    table = write_table("train.jsonl", make_rows(kind, 40))
    metrics = []
    for truncate_dim in (3, None):
        write_json(config, {"truncate_dim": truncate_dim, "matryoshka_dims": [WIDTH, 3]})
        result = train(
            start, tmp_path / f"run-{truncate_dim}", table, schedule={"steps": 1, "epochs": None}
        )
        assert result.model is not None
        pooling = read_pooling(result.model)
        assert pooling is not None
        assert (pooling.truncate_dim, pooling.matryoshka_dims) == (truncate_dim, ())
        metrics.append(result.metrics[result.metric_names[0]])
    assert metrics[0] != metrics[1]
    if kind == "scored_pairs":
        dev = write_table("dev.jsonl", make_rows(kind, 30, seed=1))
        embedding = {"validation_files": {"dev": str(dev)}}
        result = train(start, tmp_path / "dev", table, embedding=embedding)
        assert result.model is not None
        expected = evaluate_embeddings(result.model, dev)["spearman"]
        assert result.metrics["spearman"] == pytest.approx(expected, abs=1e-6)


def test_a_query_is_not_its_own_negative_with_another_prompt(
    start_model: Path, write_table: WriteTable
) -> None:
    """The exclusion of an anchor from its candidates does not depend on prompts."""
    rows = [
        {"anchor": "ba", "positive": "be"},
        {"anchor": "bo", "positive": "ba"},
        {"anchor": "ba", "positive": "bo be"},
    ]
    table = write_table("train.jsonl", rows)
    settings = EmbeddingSettings(train_files=[str(table)], loss="mnrl")
    model = load_start_model(start_model, settings, {})
    tokenize = build_tokenize_function(model.encoder.tokenizer, model.pooling)
    excluded = []
    for prompts in (TextPrompts(), TextPrompts(query="ba be ")):
        examples, _ = read_examples([table], settings, tokenize, TextColumns(), prompts=prompts)
        targets = build_batch(examples, np.arange(3), settings).targets
        assert isinstance(targets, RankingTargets)
        pairs = zip(
            targets.excluded_anchors.tolist(), targets.excluded_candidates.tolist(), strict=True
        )
        excluded.append(set(pairs))
    assert excluded[0] == excluded[1] == {(0, 1), (0, 2), (2, 0), (2, 1)}


def test_dense_modules_are_trained(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """A start model with cls pooling and a Dense module keeps them, and its Dense weights learn."""
    torch.manual_seed(0)
    SentenceTransformer(
        modules=[
            modules.Transformer(str(start_model)),
            modules.Pooling(WIDTH, pooling_mode="cls"),
            modules.Dense(WIDTH, 11),
        ]
    ).save(str(tmp_path / "st"))
    table = write_table("train.jsonl", make_rows("pairs", 60))
    result = train(tmp_path / "st", tmp_path / "run", table)
    assert result.model is not None
    texts = [row["anchor"] for row in make_rows("pairs", 9)]
    vectors = embed(result.model, texts)
    expected = SentenceTransformer(str(result.model), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    assert vectors.shape == (9, 11)
    old, new = (
        load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"]
        for folder in (tmp_path / "st", result.model)
    )
    assert not torch.equal(old, new)


def test_large_batches_need_no_more_memory_for_activations(
    start_model: Path, write_table: WriteTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward pass has more tokens than run.micro_batch_tokens, whatever the batch size."""
    sizes: list[int] = []
    forward = bundle.load_encoder(start_model).model.__class__.forward

    def record(self: Any, batch: Any, *arguments: Any) -> Any:
        sizes.append(len(batch.ids))
        return forward(self, batch, *arguments)

    monkeypatch.setattr("bertsmith.model.bert.BertModel.forward", record)
    table = write_table("train.jsonl", make_rows("pairs", 200))
    train(
        start_model, tmp_path / "run", table, embedding={"batch_size": 180},
        run={"micro_batch_tokens": 100}, schedule={"steps": 1, "epochs": None},
    )  # fmt: skip
    num_training_passes = sum(size <= 100 for size in sizes)
    assert num_training_passes > 20
    assert sizes[: num_training_passes - 1] == [size for size in sizes if size <= 100][:-1]


def test_loss_of_a_dense_module_has_full_precision(
    start_model: Path, write_table: WriteTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bf16, the linear layer computes vectors in bf16; their loss is computed in float32."""
    parts = [
        modules.Transformer(str(start_model)),
        modules.Pooling(WIDTH),
        modules.Dense(WIDTH, 11),
    ]
    SentenceTransformer(modules=parts).save(str(tmp_path / "st"))
    dtypes = set()

    def record_dtype(vectors: torch.Tensor, *arguments: Any) -> Iterator[torch.Tensor]:
        dtypes.add(vectors.dtype)
        return iter_loss_terms(vectors, *arguments)

    monkeypatch.setattr("bertsmith.train.embedding.objective.iter_loss_terms", record_dtype)
    table = write_table("train.jsonl", make_rows("pairs", 30))
    train(tmp_path / "st", tmp_path / "run", table, run={"precision": "bf16"},
          schedule={"steps": 1, "epochs": None})  # fmt: skip
    assert dtypes == {torch.float32}
