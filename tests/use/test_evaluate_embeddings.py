"""Evaluation of the vectors of a model."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from bertsmith.errors import InputError
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.use.embed import Embedder
from bertsmith.use.evaluate_embeddings import evaluate_embeddings
from tests.tasks.test_beir import write_beir_folder
from tests.train.embedding.conftest import WriteTable, make_rows, start_model, write_table

__all__ = ["start_model", "write_table"]


def test_scored_pairs_have_correlations(start_model: Path, write_table: WriteTable) -> None:
    """The Spearman correlation equals SciPy's; fewer dimensions give the one of shorter vectors."""
    rows = make_rows("scored_pairs", 40)
    for index, row in enumerate(rows):
        row["score"] = (index * 7) % 11
    table = write_table("sts.jsonl", [{"a": r["sentence1"], "b": r["sentence2"], "s": r["score"]}
                                      for r in rows])  # fmt: skip
    settings = EmbeddingSettings(columns=TextColumns(text="a", pair="b", score="s"))
    embedder = Embedder.load(start_model)
    scores = [row["score"] for row in rows]
    for dimensions in (None, 5):
        vectors = [
            embedder.encode([row[name] for row in rows], normalize=True)[:, :dimensions]
            for name in ("sentence1", "sentence2")
        ]
        norms = [np.linalg.norm(part, axis=1) for part in vectors]
        cosines = (vectors[0] * vectors[1]).sum(1) / norms[0] / norms[1]
        metrics = evaluate_embeddings(embedder, table, settings=settings, dimensions=dimensions)
        assert metrics["spearman"] == pytest.approx(spearmanr(cosines, scores)[0], abs=1e-6)
        assert metrics["counts"]["num_used"] == 40


def test_folders_in_the_format_of_beir_have_retrieval_metrics(
    start_model: Path, tmp_path: Path
) -> None:
    """A query with the text of its document finds it first."""
    rows = make_rows("texts", 12)
    corpus = [{"_id": f"d{i}", "text": row["text"]} for i, row in enumerate(rows)]
    queries = [{"_id": f"q{i}", "text": row["text"]} for i, row in enumerate(rows[:5])]
    judgments = [(f"q{i}", f"d{i}", 1) for i in range(5)]
    folder = write_beir_folder(tmp_path / "data", corpus, queries, judgments, split="dev")
    metrics = evaluate_embeddings(start_model, folder, split="dev")
    assert metrics["ndcg@10"] == metrics["recall@1"] == 1.0


def test_data_without_a_metric_is_an_error(start_model: Path, write_table: WriteTable) -> None:
    """Plain texts cannot be evaluated, and there are not more dimensions than the vectors have."""
    table = write_table("texts.jsonl", make_rows("texts", 5))
    with pytest.raises(InputError, match="texts without a pair, score or label have no metric"):
        evaluate_embeddings(start_model, table)
    with pytest.raises(InputError, match="dimensions is 33, but the vectors have 32"):
        evaluate_embeddings(start_model, table, dimensions=33)
