"""Training of rerankers: learning, resuming, output and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.cross_encoder import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith import bundle
from bertsmith.bundle.metadata import read_info
from bertsmith.errors import BertsmithError
from bertsmith.interop.huggingface import write_huggingface
from bertsmith.interop.onnx import write_onnx
from bertsmith.train.engine import loop
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.step import take_step
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.train.reranking.finetune import finetune_reranker
from bertsmith.use.embed import embed
from bertsmith.use.evaluate_reranker import evaluate_reranker
from bertsmith.use.rerank import rerank, sigmoid
from tests.train.conftest import RecordingProgress
from tests.train.embedding.conftest import WriteTable
from tests.train.reranking.conftest import make_rows

#: Settings with which a small model learns fast.
FAST_SETTINGS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-3},
    "run": {"threads": 1, "precision": "fp32"},
    "reranking": {"batch_size": 8},
    "schedule": {"epochs": 2.0},
}


def train(
    start_model: Path,
    out: Path,
    *data: Path,
    progress: RecordingProgress | None = None,
    **tables: dict[str, Any],
) -> FinetuneResult:
    """Train with fast settings; keywords are tables of settings."""
    values = FAST_SETTINGS | {
        name: FAST_SETTINGS.get(name, {}) | table for name, table in tables.items()
    }
    return finetune_reranker(start_model, out, data=data, values=values, progress=progress)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("scored", "bce"),
        ("scored", "ranknet"),
        ("lists", "listnet"),
        ("triplets", "margin_mse"),
        ("triplets", "mnrl"),
    ],
)
def test_each_loss_learns_to_rank(
    start_model: Path, write_table: WriteTable, tmp_path: Path, kind: str, loss: str
) -> None:
    """Relevant documents of held-out queries are ranked first after training, not before."""
    table = write_table("train.jsonl", make_rows(kind, 60))
    dev = write_table("dev.jsonl", make_rows("scored", 20, seed=1))
    reranking = {"loss": loss, "validation_files": {"dev": str(dev)}}
    result = train(start_model, tmp_path / "run", table, reranking=reranking)
    untrained = train(
        start_model, tmp_path / "untrained", table, reranking=reranking,
        schedule={"steps": 1, "epochs": None}, optim={"lr": 1e-12},
    )  # fmt: skip
    assert result.metric_names == ["ndcg@10", "mrr@10", "map"]
    assert result.metrics["examples"] == 20
    assert result.metrics["map"] > 0.95
    assert untrained.metrics["map"] < 0.85
    assert result.model is not None
    metrics = evaluate_reranker(result.model, dev)
    for name in result.metric_names:
        assert metrics[name] == pytest.approx(result.metrics[name], abs=1e-6)
    assert metrics["counts"]["num_used"] == 80


def test_relevant_documents_alone_are_compared_with_random_ones(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """Pairs without negatives are trained and evaluated with documents of other queries."""
    progress = RecordingProgress()
    table = write_table("train.jsonl", make_rows("pairs", 40))
    result = train(start_model, tmp_path / "run", table, progress=progress)
    assert result.metrics["examples"] == 4
    assert 0 < result.metrics["ndcg@10"] < 1
    assert any("4 random negatives each" in line for line in progress.messages)


def test_interrupted_run_ends_with_the_same_bytes(
    start_model: Path, write_table: WriteTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run interrupted within an epoch ends with the same weights and metrics."""
    table = write_table("train.jsonl", make_rows("triplets", 40))
    tables: dict[str, Any] = {
        "reranking": {"loss": "listnet", "random_negatives": 2, "batch_size": 8},
        "run": {"micro_batch_tokens": 128, "threads": 1, "precision": "fp32"},
        "checkpoint": {"steps": 2},
        "model": {"dropout": 0.05},
    }
    expected = train(start_model, tmp_path / "uninterrupted", table, **tables)
    num_steps = 0

    def interrupt_step_8(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 8:
            raise KeyboardInterrupt
        assert len(arguments[1]) > 1, "several micro-batches"
        return take_step(*arguments, **keywords)

    monkeypatch.setattr(loop, "take_step", interrupt_step_8)
    with pytest.raises(KeyboardInterrupt):
        train(start_model, tmp_path / "interrupted", table, **tables)
    assert not (tmp_path / "interrupted" / "model").exists()
    write_latest_snapshot(tmp_path / "interrupted", tmp_path / "snapshot")
    assert rerank(tmp_path / "snapshot", "ba", ["bo", "ku"])
    assert bundle.load(tmp_path / "snapshot").config.dropout == 0.05
    monkeypatch.undo()
    resumed = train(start_model, tmp_path / "interrupted", table, **tables)
    assert expected.model is not None
    assert resumed.model is not None
    name = bundle.WEIGHTS_FILE
    assert (resumed.model / name).read_bytes() == (expected.model / name).read_bytes()
    assert resumed.metrics == expected.metrics
    with pytest.raises(BertsmithError, match="random_negatives: 2 in the run, 3 now"):
        train(start_model, tmp_path / "interrupted", table, **{
            **tables, "reranking": {**tables["reranking"], "random_negatives": 3}
        })  # fmt: skip


def test_other_libraries_compute_the_same_scores(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """Transformers and CrossEncoder load the model and predict the same scores within 1e-5."""
    rows = make_rows("scored", 20)
    result = train(
        start_model, tmp_path / "run", write_table("train.jsonl", rows),
        reranking={"max_seqlen": 20, "batch_size": 8},
    )  # fmt: skip
    assert result.model is not None
    query = rows[0]["query"]
    documents = [row["document"] for row in rows] + [" ".join(["bo"] * 60)]
    ranking = rerank(result.model, query, documents)
    assert [item.score for item in ranking] == sorted((i.score for i in ranking), reverse=True)
    assert [item.index for item in ranking if item.is_truncated] == [len(documents) - 1]
    scores = np.zeros(len(documents))
    for item in ranking:
        scores[item.index] = item.score
        assert item.text == documents[item.index]
    cross_encoder = CrossEncoder(str(result.model), device="cpu")
    expected = cross_encoder.predict([(query, document) for document in documents])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    best = cross_encoder.rank(query, documents, top_k=3)
    assert [item.index for item in ranking[:3]] == [item["corpus_id"] for item in best]
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    model = AutoModelForSequenceClassification.from_pretrained(result.model).eval()
    assert model.config.num_labels == 1
    inputs = tokenizer(
        [query] * len(documents), documents, padding=True, truncation=True, return_tensors="pt"
    )
    assert inputs.input_ids.shape[1] == 20
    with torch.no_grad():
        logits = model(**inputs).logits[:, 0].numpy()
    raw = {
        item.index: item.score for item in rerank(result.model, query, documents, raw_scores=True)
    }
    np.testing.assert_allclose([raw[i] for i in range(len(raw))], logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose([sigmoid(raw[i]) for i in range(len(raw))], scores, atol=1e-12)
    card = (result.model / "README.md").read_text()
    assert 'pipeline_tag: "text-ranking"' in card
    assert "CrossEncoder" in card
    assert "- loss: bce" in card
    assert read_info(result.model)["heldout_metrics"] == result.metrics


def test_documents_are_truncated_to_the_length_of_a_cross_encoder(
    start_reranker: Path, tmp_path: Path
) -> None:
    """Long documents have the scores of a CrossEncoder with a maximum length."""
    original = CrossEncoder(str(start_reranker), device="cpu", max_length=12)
    original.save(str(tmp_path / "model"))
    documents = ["bo ku", " ".join(["bo ku"] * 10)]
    ranking = sorted(rerank(tmp_path / "model", "ba", documents), key=lambda item: item.index)
    expected = original.predict([("ba", document) for document in documents])
    np.testing.assert_allclose([item.score for item in ranking], expected, rtol=0, atol=1e-5)
    assert [item.is_truncated for item in ranking] == [False, True]


@pytest.mark.parametrize("format_version", ["recent", "old"])
def test_a_converted_cross_encoder_predicts_the_same_scores(
    start_reranker: Path, tmp_path: Path, format_version: str
) -> None:
    """Conversions keep the activation function and the maximum length of a CrossEncoder."""
    original = CrossEncoder(
        str(start_reranker), device="cpu", max_length=12, activation_fn=torch.nn.Identity()
    )
    directory = tmp_path / "original"
    original.save(str(directory))
    assert (directory / "modules.json").is_file()
    if format_version == "old":
        (directory / "modules.json").unlink()
        (directory / "config_sentence_transformers.json").unlink()
        config = json.loads((directory / "config.json").read_text())
        config.pop("sentence_transformers", None)
        config["sbert_ce_default_activation_function"] = "torch.nn.modules.linear.Identity"
        (directory / "config.json").write_text(json.dumps(config))
    assert write_huggingface(directory, tmp_path / "converted") == []
    pairs = [("ba", "bo ku"), ("ba", " ".join(["bo ku"] * 20))]
    expected = original.predict(pairs)
    with_sigmoid = CrossEncoder(str(start_reranker), device="cpu", max_length=12).predict(pairs)
    np.testing.assert_allclose(with_sigmoid, 1 / (1 + np.exp(-expected)), rtol=0, atol=1e-5)
    converted = CrossEncoder(str(tmp_path / "converted"), device="cpu")
    np.testing.assert_allclose(converted.predict(pairs), expected, rtol=0, atol=1e-5)
    write_onnx(directory, tmp_path / "onnx")
    activation = json.loads((tmp_path / "onnx" / "config.json").read_text())
    hf_config = json.loads((tmp_path / "converted" / "config.json").read_text())
    keys = ("sentence_transformers", "sbert_ce_default_activation_function")
    assert [activation.get(key) for key in keys] == [hf_config.get(key) for key in keys]
    assert any(activation.get(key) for key in keys)
    # A CrossEncoder has no pooling, so the vectors are those of any other encoder.
    np.testing.assert_array_equal(embed(directory, ["ba"]), embed(tmp_path / "converted", ["ba"]))


def test_output_layer_of_a_reranker_is_kept(
    start_reranker: Path, start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """Training continues from another reranker's scores, but not from a classifier's head."""
    table = write_table("train.jsonl", make_rows("scored", 20))
    schedule = {"steps": 1, "epochs": None}
    result = train(start_reranker, tmp_path / "run", table, schedule=schedule, optim={"lr": 1e-12})
    assert result.model is not None
    documents = [row["document"] for row in make_rows("scored", 5)]
    expected = rerank(start_reranker, "ba", documents)
    assert [item.index for item in rerank(result.model, "ba", documents)] == [
        item.index for item in expected
    ]
    classifier = bundle.HeadConfig("single", ("no", "yes"))
    loaded = bundle.load_for_fine_tuning(start_model, classifier)
    bundle.save_fine_tuned(tmp_path / "classifier", loaded.model, loaded.tokenizer, classifier, {})
    result = train(tmp_path / "classifier", tmp_path / "from-classifier", table, schedule=schedule)
    assert result.metrics["examples"] == 2


def test_scored_pairs_of_different_queries_have_correlations(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """If no query has several documents, predictions are compared with scores, or labels."""
    rows = [{"sentence1": row["query"], "sentence2": row["document"], "score": number % 6}
            for number, row in enumerate(make_rows("scored", 24, num_documents=1))]  # fmt: skip
    reranking = {"max_score": 5.0, "validation_fraction": 0.5, "batch_size": 8}
    table = write_table("train.jsonl", rows)
    result = train(start_model, tmp_path / "scores", table, reranking=reranking)
    assert result.metric_names == ["spearman", "pearson"]
    assert -1 <= result.metrics["spearman"] <= 1
    table = write_table("labels.jsonl", [{**row, "score": row["score"] > 3} for row in rows])
    result = train(start_model, tmp_path / "labels", table, reranking=reranking)
    assert result.metric_names == ["roc_auc"]
    assert result.metrics["examples"] == 12


@pytest.mark.parametrize(
    ("kind", "changes", "reranking", "message"),
    [
        ("scored", {"score": 1}, {"random_negatives": 0}, "every document has the score 1; expec"),
        ("scored", {"score": 0}, {}, "every document has the score 0; expected"),
        ("scored", {"score": 0}, {"random_negatives": 3}, "no document is relevant: the highest"),
        ("scored", {"score": 2}, {}, "the scores are 2 to 2, but the loss bce needs 0 to 1; give"),
        ("scored", {"score": -1}, {}, "needs 0 to 1; use the loss ranknet, margin_mse or listn"),
        ("scored", {"score": -1}, {"random_negatives": 1}, "lowest score is -1, less than the 0"),
        ("scored", {}, {"relevance_threshold": 2.0, "loss": "mnrl"}, "no document is relevant"),
        ("scored", {"query": "ba"}, {}, "there is 1 query, so none can be held out"),
        ("pairs", {}, {"loss": "ranknet", "random_negatives": 0}, "every document has the score 1"),
        ("scored", {"document": ""}, {}, "line 1: an empty text in column 'document'"),
        ("scored", {"query": "ba", "document": "be"}, {}, "two different scores for its query"),
        ("scored", {}, {"columns": {"text": "query"}}, "no column of the document; set pair"),
        ("scored", {}, {"columns": {"text": "query", "label": "x"}}, "relevance of a document is"),
        ("scored", {}, {"max_seqlen": 99}, "the model takes at most 43 tokens"),
        ("scored", {}, {"validation_files": {"dev": "lost.csv"}}, "lost.csv: no such file"),
        ("scored", {}, {"loss": "hinge"}, "reranking.loss: Input should be"),
    ],
)
def test_unsuitable_data_and_settings_are_errors(
    start_model: Path,
    write_table: WriteTable,
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    reranking: dict[str, Any],
    message: str,
) -> None:
    """The error says what is wrong, and no run directory is left behind."""
    table = write_table("train.jsonl", [row | changes for row in make_rows(kind, 20)])
    with pytest.raises(BertsmithError, match=message):
        train(start_model, tmp_path / "run", table, reranking=reranking)
    assert not (tmp_path / "run").exists()


def test_queries_without_contrast_are_reported(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """Queries that a listwise loss cannot use are reported; it is an error if none is left."""
    rows = make_rows("scored", 20)
    for row in rows[:8]:
        row["score"] = 0
    progress = RecordingProgress()
    dev = write_table("dev.jsonl", make_rows("scored", 4, seed=1))
    reranking = {"loss": "listnet", "validation_files": {"dev": str(dev)}}
    table = write_table("train.jsonl", rows)
    train(start_model, tmp_path / "run", table, progress=progress, reranking=reranking)
    assert "2 training queries without documents with different scores: not used by" in "\n".join(
        progress.messages
    )
    for number, row in enumerate(rows):
        row["score"] = number // 4 % 2
    table = write_table("constant.jsonl", rows)
    with pytest.raises(BertsmithError, match="no query has documents with different scores"):
        train(start_model, tmp_path / "none", table, reranking=reranking)


def test_a_run_is_not_resumed_on_other_columns(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """If the column options of a run are left out, columns with standard names are an error."""
    rows = [{**row, "grade": 1 - row["score"]} for row in make_rows("scored", 20)]
    table = write_table("train.jsonl", rows)
    schedule = {"steps": 1, "epochs": None}
    columns = {"text": "query", "pair": "document", "score": "grade"}
    train(start_model, tmp_path / "run", table, schedule=schedule, reranking={"columns": columns})
    with pytest.raises(BertsmithError, match=r"columns\.score: 'grade' in the run, None now"):
        train(start_model, tmp_path / "run", table, schedule=schedule)


def test_settings_of_another_kind_of_run_are_rejected(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """settings.toml of a run starts another run; that of an embedding model does not."""
    table = write_table("train.jsonl", make_rows("scored", 20))
    train(start_model, tmp_path / "run", table)
    config = tmp_path / "run" / "settings.toml"
    result = finetune_reranker(start_model, tmp_path / "again", data=table, config=config)
    assert result.metrics["examples"] == 2
    (tmp_path / "embed.toml").write_text("[embedding]\nloss = 'mnrl'\n")
    with pytest.raises(BertsmithError, match="not the settings of `finetune rerank`"):
        finetune_reranker(
            start_model, tmp_path / "other", data=table, config=tmp_path / "embed.toml"
        )
