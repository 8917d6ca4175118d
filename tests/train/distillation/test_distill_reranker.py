"""Distillation of rerankers: the scores of the student in other libraries, and its data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers.cross_encoder import CrossEncoder

from bertsmith.errors import TaskError
from bertsmith.train.distillation.distill import distill
from bertsmith.train.reranking.finetune import finetune_reranker
from bertsmith.use.rerank import rerank
from tests.train.embedding.conftest import save_start_model, write_rows

#: Settings of short runs.
_RUN: dict[str, Any] = {
    "schedule": {"steps": 2, "epochs": None},
    "run": {"threads": 1, "precision": "fp32"},
}
_ROWS: list[dict[str, Any]] = [
    {"query": query, "document": document, "score": score}
    for query in ("ba", "be", "bi", "bo")
    for document, score in (("ku ka", 1), ("ko ke ki", 0), ("ka " * 30, 0))
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker of texts of up to 12 tokens, trained on columns without standard names."""
    folder = tmp_path_factory.mktemp("teacher")
    rows = [{"q": row["query"], "d": row["document"], "s": row["score"]} for row in _ROWS]
    columns = {"text": "q", "pair": "d", "score": "s"}
    finetune_reranker(
        save_start_model(folder / "start"),
        folder / "run",
        data=write_rows(folder / "train.jsonl", rows),
        values={**_RUN, "reranking": {"max_seqlen": 12, "columns": columns}},
    )
    return folder / "run"


@pytest.mark.parametrize("names", [("query", "document", "score"), ("q", "d", "s")])
def test_cross_encoder_computes_the_scores_of_a_student(
    teacher: Path, tmp_path: Path, names: tuple[str, str, str]
) -> None:
    """CrossEncoder truncates long documents to the maximum length of the student.

    Tables have standard columns, or those of the teacher.
    """
    rows = [dict(zip(names, row.values(), strict=True)) for row in _ROWS]
    result = distill(
        teacher,
        tmp_path / "student",
        data=write_rows(tmp_path / "train.jsonl", rows),
        values={**_RUN, "distill": {"layers": 1}},
    )
    assert result.model is not None
    documents = [row["document"] for row in _ROWS[:3]]
    ranking = sorted(rerank(result.model, "ba", documents), key=lambda item: item.index)
    assert [item.is_truncated for item in ranking] == [False, False, True]
    expected = CrossEncoder(str(result.model), device="cpu").predict(
        [("ba", document) for document in documents]
    )
    np.testing.assert_allclose([item.score for item in ranking], expected, rtol=0, atol=1e-5)


def test_other_columns_are_an_error(teacher: Path, tmp_path: Path) -> None:
    """Without known columns, the error names the options of distill."""
    rows = [{"a": row["query"], "b": row["document"]} for row in _ROWS]
    with pytest.raises(TaskError, match=r"no column 'text'.* name the column with --text"):
        distill(
            teacher,
            tmp_path / "student",
            data=write_rows(tmp_path / "train.jsonl", rows),
            values={**_RUN, "distill": {"layers": 1}},
        )
