"""Opening of fine-tuning runs, of every kind."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith import bundle
from bertsmith.errors import RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.distillation.distill import distill
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.embedding.settings import EmbeddingRunSettings
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.run_directory import SETTINGS_FILE, load_run_settings
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.reranking.finetune import finetune_reranker
from tests.train.embedding.conftest import make_rows, save_start_model, write_rows

SHORT_RUN: dict[str, Any] = {
    "schedule": {"steps": 1}, "run": {"threads": 1, "precision": "fp32", "device": "cpu"},
}  # fmt: skip


def _distill(start: Path, run: Path, data: Path) -> FinetuneResult:
    teacher = start.with_name("teacher")
    values = SHORT_RUN | {"distill": {"objective": "embedding"}}
    return distill(teacher, run, data=data, start_from=start, values=values)


@pytest.mark.parametrize(
    ("data_kind", "train"),
    [
        ("labeled_texts", lambda start, run, data: finetune(
            "classify", start, run, data=data, values=SHORT_RUN)),
        ("pairs", lambda start, run, data: finetune_embedder(
            start, run, data=data, values=SHORT_RUN)),
        ("pairs", lambda start, run, data: finetune_reranker(
            start, run, data=data, values=SHORT_RUN)),
        ("texts", _distill),
    ],
    ids=["classify", "embed", "rerank", "distill"],
)  # fmt: skip
def test_replaced_start_model_is_rejected(
    tmp_path: Path, data_kind: str, train: Callable[[Path, Path, Path], FinetuneResult]
) -> None:
    """A run needs the same start model at any path; runs without its hash accept other files."""
    start, run = tmp_path / "start", tmp_path / "run"
    model = bundle.load(save_start_model(start))
    shutil.copytree(start, tmp_path / "teacher")
    data = write_rows(tmp_path / "train.jsonl", make_rows(data_kind, 30))
    result = train(start, run, data)
    moved = start.rename(tmp_path / "moved")
    assert train(moved, run, data) == result
    torch.manual_seed(1)
    bundle.save(start, BertForPreTraining(model.config), model.tokenizer, {})
    with pytest.raises(RunError, match=r"run\.start_id: '\w{16}' in the run, '\w{16}' now"):
        train(start, run, data)
    settings = run / SETTINGS_FILE
    settings.write_text(re.sub("start_id = .*\n", "", settings.read_text()))
    shutil.rmtree(moved)
    start.rename(moved)
    assert train(moved, run, data) == result


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("aaaaaa", "7 items in the run, 6 now; the items differ from item 7 on"),
        ("aaaaaaaa", "7 items in the run, 8 now; the items differ from item 8 on"),
        ("abaaaaaa", "7 items in the run, 8 now; only now: 'b'"),
        ("b", "['a', 'a', 'a', 'a', 'a', 'a', 'a'] in the run, ['b'] now"),
    ],
)
def test_changed_lists_are_described(tmp_path: Path, files: str, message: str) -> None:
    """The error about a changed list says how it differs, also if only its length differs."""

    def build_settings(train_files: str) -> EmbeddingRunSettings:
        values = {"model": {"vocab_size": 1}, "embedding": {"train_files": list(train_files)}}
        return EmbeddingRunSettings.parse(values, "test")

    (tmp_path / SETTINGS_FILE).write_text(build_settings(7 * "a").to_toml())
    with pytest.raises(RunError, match=re.escape(f"embedding.train_files: {message}")):
        load_run_settings(tmp_path, build_settings(files))
