"""Embedding models and rerankers in several processes: loss, gradient, and runs with torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.engine.metrics_log import TIMING_KEYS, read_metrics
from bertsmith.train.reranking.finetune import finetune_reranker
from tests.train.embedding.conftest import make_rows, save_start_model, write_rows

#: Trains all runs of a JSON file in one of two processes.
PROGRAM = """
import json, sys
from pathlib import Path
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.reranking.finetune import finetune_reranker

for run in json.loads(Path(sys.argv[1]).read_text()):
    train = finetune_reranker if "reranking" in run["values"] else finetune_embedder
    result = train(run["model"], run["out"], data=run["data"], values=run["values"])
"""
#: Without dropout, because a single process has other micro-batches. A small learning rate, because
#: Adam enlarges rounding errors of gradients near 0.
VALUES: dict[str, Any] = {
    "model": {"dropout": 0.0, "attention_dropout": 0.0},
    "optim": {"lr": 1e-4},
    "run": {"threads": 1, "precision": "fp32", "device": "cpu"},
    "schedule": {"steps": 6},
    "checkpoint": {"steps": 3, "keep_optimizer": True},
}
#: For each run, the kind of examples, the settings of the task, and the maximum tokens of a
#: micro-batch: one or many micro-batches in a single process.
RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "pairs": ("pairs", {"embedding": {"batch_size": 16}}, 16384),
    "cached": ("pairs", {"embedding": {"batch_size": 16}}, 64),
    "tsdae": ("texts", {"embedding": {"batch_size": 16, "loss": "tsdae"}}, 64),
    "single": ("pairs", {"embedding": {"batch_size": 2, "loss": "mnrl"}}, 16384),
    "rerank": ("pairs", {"reranking": {"batch_size": 8, "loss": "mnrl"}}, 64),
}


def build_runs(folder: Path, model: Path) -> list[dict[str, Any]]:
    """Return the arguments of all runs, with their directories in ``folder``."""
    folder.mkdir()
    runs = []
    for name, (kind, task, micro_batch_tokens) in RUNS.items():
        table = write_rows(model.parent / f"{name}.jsonl", make_rows(kind, 60))
        options = VALUES["run"] | {"micro_batch_tokens": micro_batch_tokens}
        runs.append(
            {"model": str(model), "out": str(folder / name), "data": str(table),
             "values": VALUES | task | {"run": options}}
        )  # fmt: skip
    return runs


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """Losses, gradients and metrics of 2 processes equal those of one within 1e-6.

    Negatives are shared: the texts of each process are negatives for the anchors of the other.
    """
    model = save_start_model(tmp_path / "start")
    (tmp_path / "program.py").write_text(PROGRAM)
    runs = build_runs(tmp_path / "parallel", model)
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(tmp_path / "program.py"), str(tmp_path / "runs.json")]
    launched = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    for run in build_runs(tmp_path / "single", model):
        train: Any = finetune_reranker if "reranking" in run["values"] else finetune_embedder
        train(run["model"], run["out"], data=run["data"], values=run["values"])
        name = Path(run["out"]).name
        parallel = tmp_path / "parallel" / name
        numbers, expected = (
            [
                {key: value for key, value in line.items() if key not in (*TIMING_KEYS, "kind")}
                for line in read_metrics(path)
            ]
            for path in (parallel, Path(run["out"]))
        )
        assert len(numbers) == len(expected) > 2
        for line, expected_line in zip(numbers, expected, strict=True):
            assert line == pytest.approx(expected_line, rel=1e-5, abs=1e-6), name
        assert numbers[0]["loss"] == pytest.approx(expected[0]["loss"], rel=0, abs=1e-6)
        assert numbers[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-6)
        # The moments are averages of the gradients and of their squares.
        for file in ("checkpoints/step-6/moments.safetensors", "model/model.safetensors"):
            tensors = load_file(Path(run["out"]) / file)
            for key, tensor in load_file(parallel / file).items():
                torch.testing.assert_close(tensor, tensors[key], rtol=1e-4, atol=1e-6)
