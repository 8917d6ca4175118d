"""Fine-tuning, evaluation and prediction for multiple choice."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith import bundle
from bertsmith.errors import RunError
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.use.choose import choose
from bertsmith.use.evaluate import evaluate
from tests.train.conftest import WORDS
from tests.train.finetuning.test_finetune import NO_DROPOUT


def write_choices(path: Path, count: int, seed: int, answers: Path | None = None) -> Path:
    """Write a table of prompts with three endings. The correct ending contains the first of WORDS.

    The index of the correct ending is a column of the table, or its letter is written to the file
    ``answers``.
    """
    rng = np.random.default_rng(seed)
    rows, letters = ["id,text,x,y,z" + ("" if answers else ",label")], []
    for index in range(count):
        texts = [" ".join(rng.choice(WORDS[4:], rng.integers(1, 5))) for _ in range(4)]
        correct = int(rng.integers(3))
        texts[correct + 1] += f" {WORDS[0]}"
        rows.append(",".join([str(index), *texts, *([] if answers else [str(correct)])]))
        letters.append(f"{index},{'ABC'[correct]}")
    path.write_text("\n".join(rows) + "\n")
    if answers is not None:
        answers.write_text("\n".join(reversed(letters)) + "\n")
    return path


def finetune_choices(start_model: Path, out: Path, data: Path, **task: object) -> FinetuneResult:
    """Fine-tune on ``data`` for a few fast epochs."""
    values = {
        "task": {"ending_columns": ["x", "y", "z"], "batch_size": 8, **task},
        "model": NO_DROPOUT,
        "optim": {"lr": 3e-3},
        "schedule": {"epochs": 4.0},
        "run": {"threads": 1},
    }
    return finetune("choose", start_model, out, data=data, values=values)


def test_multiple_choice_is_learned(start_model: Path, tmp_path: Path) -> None:
    """The held-out accuracy is at least 0.9; ``evaluate`` and ``choose`` agree on a new file."""
    data = write_choices(tmp_path / "train.csv", 160, 0)
    result = finetune_choices(start_model, tmp_path / "run", data)
    assert result.metric_names == ["accuracy"]
    assert result.metrics["accuracy"] >= 0.9
    assert result.metrics["examples"] == 160 // 10, "a tenth of the prompts is held out"
    assert result.model is not None
    new_file = write_choices(tmp_path / "new.csv", 60, 9)
    metrics = evaluate(result.model, new_file)
    assert metrics["accuracy"] >= 0.9
    rows = [line.split(",") for line in new_file.read_text().splitlines()[1:]]
    answers = choose(tmp_path / "run", [(row[1], row[2:5]) for row in rows])
    is_correct = [
        answer.best_index == int(row[5]) for answer, row in zip(answers, rows, strict=True)
    ]
    assert metrics["accuracy"] == pytest.approx(np.mean(is_correct))
    assert metrics["counts"]["num_used"] == 60


def test_answer_files_are_part_of_a_run(start_model: Path, tmp_path: Path) -> None:
    """Answers can be in separate files; a run cannot be resumed if these files have changed."""
    data = write_choices(tmp_path / "t.csv", 40, 0, tmp_path / "t-right.csv")
    dev = write_choices(tmp_path / "d.csv", 20, 1, tmp_path / "d-right.csv")
    task = {"label_file_suffix": "-right", "validation_files": {"dev": str(dev)}}
    result = finetune_choices(start_model, tmp_path / "run", data, **task)
    assert (result.counts["train"]["num_used"], result.counts["dev"]["num_used"]) == (40, 20)
    assert result.model is not None
    metrics = evaluate(result.model, dev)
    assert metrics["accuracy"] == pytest.approx(result.metrics["accuracy"])
    info = json.loads((result.model / bundle.INFO_FILE).read_text())
    assert info["provenance"]["task"]["label_file_suffix"] == "-right"
    answers = (tmp_path / "d-right.csv").read_text()
    (tmp_path / "d-right.csv").write_text(answers.replace("A", "B"))
    with pytest.raises(RunError, match=r"the data files have changed .*d-right\.csv"):
        finetune_choices(start_model, tmp_path / "run", data, **task)


def test_micro_batches_equal_one_batch(start_model: Path, tmp_path: Path) -> None:
    """Batches split into micro-batches of 64 tokens give the same loss as unsplit batches."""
    data = write_choices(tmp_path / "t.csv", 40, 0)
    losses = []
    for micro_batch_tokens in (64, 4096):
        values = {
            "task": {"ending_columns": ["x", "y", "z"], "batch_size": 16},
            "schedule": {"steps": 3},
            "model": NO_DROPOUT,
            "optim": {"lr": 1e-3},
            "run": {"threads": 1, "micro_batch_tokens": micro_batch_tokens, "precision": "fp32"},
        }
        out = tmp_path / str(micro_batch_tokens)
        result = finetune("choose", start_model, out, data=data, values=values)
        losses.append(result.metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
