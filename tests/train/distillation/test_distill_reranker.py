"""Distillation of rerankers: the scores of the student in other libraries, and its data."""

from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers.cross_encoder import CrossEncoder

from bertsmith.train.distillation.distill import distill
from bertsmith.train.reranking.finetune import finetune_reranker
from bertsmith.use.rerank import rerank
from tests.train.embedding.conftest import save_start_model, write_rows

_RUN: dict[str, Any] = {
    "schedule": {"steps": 2, "epochs": None},
    "run": {"threads": 1, "precision": "fp32"},
}
_ROWS: list[dict[str, Any]] = [
    {"query": query, "document": document, "score": score}
    for query in ("ba", "be", "bi", "bo")
    for document, score in (("ku ka", 1), ("ko ke ki", 0), ("ka " * 30, 0))
]


def test_cross_encoder_computes_the_scores_of_a_student(tmp_path: Path) -> None:
    """CrossEncoder truncates long documents to the maximum length of the student."""
    table = write_rows(tmp_path / "train.jsonl", _ROWS)
    start = save_start_model(tmp_path / "start")
    finetune_reranker(
        start, tmp_path / "teacher", data=table, values={**_RUN, "reranking": {"max_seqlen": 12}}
    )
    result = distill(
        tmp_path / "teacher",
        tmp_path / "student",
        data=table,
        values={**_RUN, "distill": {"layers": 1}},
        assignments=[
            'distill.text_column="query"',
            'distill.pair_column="document"',
            'distill.label_column="score"',
        ],
    )
    assert result.model is not None
    documents = [row["document"] for row in _ROWS[:3]]
    ranking = sorted(rerank(result.model, "ba", documents), key=lambda item: item.index)
    assert [item.is_truncated for item in ranking] == [False, False, True]
    expected = CrossEncoder(str(result.model), device="cpu").predict(
        [("ba", document) for document in documents]
    )
    np.testing.assert_allclose([item.score for item in ranking], expected, rtol=0, atol=1e-5)
