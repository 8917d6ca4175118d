"""Data of embedding training: kinds of files, weights, validation sets, and what is rejected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.bundle.config import read_config
from bertsmith.bundle.metadata import read_info
from bertsmith.errors import BertsmithError, SettingsError
from bertsmith.tasks.embedding_data import read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.batches import BatchSampler, ClassIndex
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.embedding.start_model import load_start_model
from bertsmith.train.embedding.training_data import build_tokenize_function
from bertsmith.use.evaluate_embeddings import evaluate_embeddings
from tests.tasks.test_beir import write_beir_folder
from tests.train.conftest import RecordingProgress
from tests.train.embedding.conftest import WriteTable, make_rows, train


def test_unlabeled_text_is_evaluated_on_another_kind(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """SimCSE lowers its loss; a validation file of scored pairs has a correlation."""
    (tmp_path / "lines.txt").write_text(
        "".join(row["text"] + "\n" for row in make_rows("texts", 120))
    )
    dev = write_table("dev.jsonl", make_rows("scored_pairs", 30, seed=1))
    result = train(start_model, tmp_path / "run", tmp_path / "lines.txt")
    assert result.metric_names == ["loss"]
    slow = train(start_model, tmp_path / "slow", tmp_path / "lines.txt", optim={"lr": 1e-12})
    assert result.metrics["loss"] < slow.metrics["loss"]
    embedding = {"batch_size": 16, "validation_files": {"dev": str(dev)}}
    result = train(start_model, tmp_path / "sts", tmp_path / "lines.txt", embedding=embedding)
    assert result.metric_names == ["spearman", "pearson"]
    assert result.counts["train"]["num_used"] == 120


def test_file_weights_repeat_and_draw_examples(start_model: Path, write_table: WriteTable) -> None:
    """A file of weight 2 is used twice per epoch; of one with 0.5, a new half in each epoch."""
    tables = [write_table(f"{seed}.jsonl", make_rows("pairs", 20, seed)) for seed in range(3)]
    settings = EmbeddingSettings(
        train_files=list(map(str, tables)), file_weights=[2.0, 1.0, 0.5], batch_size=16, loss="mnrl"
    )
    model = load_start_model(start_model, settings, {})
    tokenize = build_tokenize_function(model.encoder.tokenizer, model.pooling)
    examples, _ = read_examples(tables, settings, tokenize, settings.columns)
    sampler = BatchSampler(examples, settings, seed=0)
    assert (sampler.num_examples, sampler.num_batches) == (70, 5)
    epochs = []
    for epoch in range(2):
        batches = [sampler.get_indices(epoch, step) for step in range(5)]
        assert [len(batch) for batch in batches] == [14] * 5
        indices = np.concatenate(batches)
        assert np.bincount(indices, minlength=60)[:40].tolist() == [2] * 20 + [1] * 20
        assert len(set(indices[indices >= 40])) == 10
        epochs.append(indices)
    assert set(epochs[0]) != set(epochs[1])
    again = BatchSampler(examples, settings, seed=0)
    assert again.get_indices(1, 3).tolist() == epochs[1][42:56].tolist()


def test_small_file_weight_draws_at_least_one_example(
    start_model: Path, write_table: WriteTable
) -> None:
    """A weight that rounds to no example does not leave an epoch without a batch."""
    table = write_table("a.jsonl", make_rows("pairs", 20, 0))
    settings = EmbeddingSettings(
        train_files=[str(table)], file_weights=[0.01], batch_size=16, loss="mnrl"
    )
    model = load_start_model(start_model, settings, {})
    tokenize = build_tokenize_function(model.encoder.tokenizer, model.pooling)
    examples, _ = read_examples([table], settings, tokenize, settings.columns)
    sampler = BatchSampler(examples, settings, seed=0)
    assert (sampler.num_examples, sampler.num_batches) == (1, 1)
    assert len(sampler.get_indices(0, 0)) == 1


def test_labels_determine_positives_and_negatives() -> None:
    """Drawn positives are other examples of the class, negatives of other classes, all possible."""
    labels = np.array([2, 0, 1, 0, 2, 2, 0, 3, 1])
    index = ClassIndex(labels)
    anchors = np.array([0, 1, 2, 3, 4, 5, 6, 8])
    drawn = set()
    for seed in range(50):
        rng = np.random.default_rng(seed)
        positives = index.draw_positives(anchors, rng)
        negatives = index.draw_negatives(anchors, rng)
        assert (labels[positives] == labels[anchors]).all()
        assert (positives != anchors).all()
        assert (labels[negatives] != labels[anchors]).all()
        drawn |= {*zip(anchors.tolist(), positives.tolist(), strict=True)}
        drawn |= {*zip(anchors.tolist(), negatives.tolist(), strict=True)}
    assert drawn == {(a, b) for a in anchors.tolist() for b in range(9) if a != b}


@pytest.mark.parametrize(
    ("kind", "changes", "embedding", "message"),
    [
        ("scored_pairs", {"score": 1}, {}, "every score is 1; expected at least two different"),
        ("scored_pairs", {}, {"loss": "mnrl"}, "examples are scored pairs; use cosent or cosine"),
        (
            "scored_pairs",
            {},
            {"loss": "cosine", "max_score": 0.5},
            "the scores are 0 to 1",
        ),
        ("labeled_texts", {"label": "x"}, {}, "all texts have the same label"),
        ("pairs", {}, {"loss": "triplet"}, "needs negatives, but 18 of 18 pairs have none"),
        ("triplets", {}, {"loss": "triplet", "temperature": 0.02}, "no effect on the loss 'trip"),
        ("pairs", {}, {"triplet_margin": 0.2}, "leave it out, or use the loss triplet"),
        ("pairs", {"anchor": "ba"}, {}, "all examples have the same first text"),
        ("pairs", {}, {"matryoshka_dims": [64]}, "vectors have 32 dimensions"),
        ("pairs", {}, {"matryoshka_dims": [16, 8]}, "after the first 16 would not be .* add 32"),
        (
            "triplets",
            {},
            {"loss": "triplet", "triplet_distance": "euclidean", "triplet_margin": 2.0},
            "triplet_margin is 2, but the Euclidean distance of normalized vectors is at most 2",
        ),
        ("pairs", {}, {"max_seqlen": 99}, "the model takes at most 43 tokens"),
        ("pairs", {}, {"validation_files": {"dev": "lost.csv"}}, "lost.csv: no such file"),
        ("pairs", {}, {"pooling": "first"}, "embedding.pooling: Input should be"),
        ("scored_pairs", {}, {"query_prompt": "ba"}, "query_prompt needs pairs of a query and a"),
    ],
)
def test_unsuitable_data_and_settings_are_errors(
    start_model: Path,
    write_table: WriteTable,
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    embedding: dict[str, Any],
    message: str,
) -> None:
    """The error says what is wrong, and no run directory is left behind."""
    table = write_table("train.jsonl", [row | changes for row in make_rows(kind, 20)])
    with pytest.raises(BertsmithError, match=message):
        train(start_model, tmp_path / "run", table, embedding=embedding)
    assert not (tmp_path / "run").exists()


def test_model_without_trainable_weights_is_an_error(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """The error names the setting that freezes all layers."""
    table = write_table("train.jsonl", make_rows("pairs", 20))
    num_layers = read_config(start_model, read_info(start_model)).layers
    with pytest.raises(SettingsError, match=r"run\.num_frozen_layers: all layers are frozen"):
        train(start_model, tmp_path / "run", table, run={"num_frozen_layers": num_layers})
    assert not (tmp_path / "run").exists()


def test_all_pairs_of_the_triplet_loss_have_negatives(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """A file of triplets and a file of pairs cannot be combined."""
    tables = [write_table(f"{kind}.jsonl", make_rows(kind, 20)) for kind in ("triplets", "pairs")]
    with pytest.raises(BertsmithError, match=r"triplets.*pairs.*pairs have none; name their col"):
        train(start_model, tmp_path / "run", *tables, embedding={"loss": "triplet"})


def test_validation_table_needs_no_negatives(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """It has the other named columns of the training table, also nested ones."""
    rows = [
        {"query": {"text": row["anchor"]}, "answer": row["positive"], "wrong": row["negative"]}
        for row in make_rows("triplets", 40)
    ]
    table = write_table("train.jsonl", rows[:30])
    dev_rows = [{name: row[name] for name in ("query", "answer")} for row in rows[30:]]
    dev = write_table("dev.jsonl", dev_rows)
    columns = {"text": "query.text", "pair": "answer", "negatives": ["wrong"]}
    embedding = {"columns": columns, "validation_files": {"dev": str(dev)}}
    result = train(start_model, tmp_path / "run", table, embedding=embedding,
                   schedule={"steps": 1, "epochs": None})  # fmt: skip
    assert result.metrics["examples"] == 10


def test_folder_in_the_format_of_beir_is_a_validation_set(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """Training has the metrics of ``evaluate_embeddings``, and notices changed judgments."""
    rows = make_rows("pairs", 60)
    corpus = [{"_id": f"d{i}", "text": row["positive"]} for i, row in enumerate(rows)]
    queries = [{"_id": f"q{i}", "text": row["anchor"]} for i, row in enumerate(rows[:20])]
    judgments = [(f"q{i}", f"d{i}", 1) for i in range(20)]
    folder = write_beir_folder(tmp_path / "data", corpus, queries, judgments, split="dev")
    table = write_table("train.jsonl", rows[20:])
    embedding = {"batch_size": 16, "validation_files": {"dev": str(folder)}}
    result = train(start_model, tmp_path / "run", table, embedding=embedding)
    assert result.model is not None
    assert result.metrics["examples"] == 20
    expected = evaluate_embeddings(result.model, folder, split="dev")
    for name in result.metric_names:
        assert result.metrics[name] == pytest.approx(expected[name])
    write_beir_folder(tmp_path / "data", corpus, queries, judgments[1:], split="dev")
    with pytest.raises(BertsmithError, match="the data files have changed"):
        train(start_model, tmp_path / "run", table, embedding=embedding)


def test_changed_files_stop_a_resumed_run(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """A run is not resumed with other data or other settings."""
    rows = make_rows("pairs", 30)
    table = write_table("train.jsonl", rows)
    train(start_model, tmp_path / "run", table, schedule={"steps": 1, "epochs": None})
    dev = write_table("dev.jsonl", make_rows("pairs", 5, seed=1))
    embedding = {"validation_files": {"dev": str(dev)}}
    train(start_model, tmp_path / "validated", table, schedule={"steps": 1, "epochs": None},
          embedding=embedding)  # fmt: skip
    with pytest.raises(BertsmithError, match=r"validation_files\.dev: '.*' in the run, None now"):
        train(start_model, tmp_path / "validated", table, schedule={"steps": 1, "epochs": None})
    with pytest.raises(BertsmithError, match=r"temperature: 0\.05 in the run, 0\.1 now"):
        train(
            start_model, tmp_path / "run", table, schedule={"steps": 1, "epochs": None},
            embedding={"temperature": 0.1},
        )  # fmt: skip
    write_table("train.jsonl", rows[:-1])
    with pytest.raises(BertsmithError, match="the data files have changed"):
        train(start_model, tmp_path / "run", table, schedule={"steps": 1, "epochs": None})


def test_settings_of_a_run_start_another_run(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """settings.toml of a run is a config for a run with other data; duplicates are reported."""
    rows = make_rows("pairs", 30)
    table = write_table("train.jsonl", rows)
    train(start_model, tmp_path / "run", table, embedding={"temperature": 0.2})
    progress = RecordingProgress()
    other = write_table("other.jsonl", [*rows, rows[0]])
    config = tmp_path / "run" / "settings.toml"
    result = finetune_embedder(
        start_model, tmp_path / "other", data=other, config=config, progress=progress
    )
    assert result.steps == 3 * 2
    provenance = read_info(tmp_path / "other" / "model")["provenance"]
    assert provenance["run"]["micro_batch_tokens"] == 8192
    settings = provenance["embedding"]
    assert settings["temperature"] == 0.2
    assert settings["train_files"] == [other.name]
    assert any("1 skipped: a duplicate of an earlier example" in m for m in progress.messages)
