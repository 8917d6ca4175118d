"""Fine-tuning, evaluation and prediction for question answering."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bertsmith.bundle import load_fine_tuned
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.families import get_task_settings
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.use.answer import answer
from bertsmith.use.evaluate import evaluate
from tests.train.conftest import WORDS, RecordingProgress
from tests.train.finetuning.test_finetune import NO_DROPOUT

#: The word before the answer; a context without this word has no answer.
MARKER_WORD = WORDS[0]


def write_questions(path: Path, count: int, unanswerable_fraction: float, seed: int = 0) -> Path:
    """Write questions whose answer is the word after MARKER_WORD.

    The contexts fit into one or two windows of 24 tokens.

    Args:
        path: File to write.
        count: Number of questions.
        unanswerable_fraction: Fraction of questions without an answer.
        seed: Seed of the random generator.
    """
    rng = np.random.default_rng(seed)
    lines = []
    for index in range(count):
        words = [str(word) for word in rng.choice(WORDS[4:], rng.integers(3, 28))]
        answers: dict[str, list[object]] = {"text": [], "answer_start": []}
        if rng.random() >= unanswerable_fraction:
            position = int(rng.integers(0, len(words) - 1))
            words[position] = MARKER_WORD
            answer_start = len(" ".join(words[: position + 1]) + " ")
            answers = {"text": [words[position + 1]], "answer_start": [answer_start]}
        lines.append(
            {
                "id": str(index),
                "question": f"{MARKER_WORD} {WORDS[1]}",
                "context": " ".join(words),
                "answers": answers,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("unanswerable_fraction", [0.0, 0.4])
def test_spans_are_learned(start_model: Path, tmp_path: Path, unanswerable_fraction: float) -> None:
    """The held-out F1 is at least 0.9, and ``evaluate`` and ``answer`` give the same scores."""
    data = write_questions(tmp_path / "train.jsonl", 500, unanswerable_fraction)
    dev = write_questions(tmp_path / "dev.jsonl", 80, unanswerable_fraction, seed=1)
    result = finetune(
        "answer",
        start_model,
        tmp_path / "run",
        data=data,
        values={
            "optim": {"lr": 4e-3},
            "run": {"threads": 1},
            "schedule": {"epochs": 18.0},
            "model": NO_DROPOUT,
            "task": {
                "batch_size": 16,
                "max_seqlen": 24,
                "window_stride": 8,
                "validation_files": {"dev": str(dev)},
            },
        },
    )
    assert result.metric_names == ["f1", "exact"]
    assert result.metrics["f1"] >= 0.9
    assert ("null_threshold" in result.metrics) == (unanswerable_fraction > 0)
    assert result.model is not None
    metrics = evaluate(result.model, dev)
    assert metrics["counts"]["num_used"] == 80
    # The best thresholds depend on the precision, which differs between training and evaluate.
    for name in set(metrics) - {"counts", "best_f1_thresh", "best_exact_thresh"}:
        assert metrics[name] == pytest.approx(result.metrics[name], abs=1e-4), name
    rows = [json.loads(line) for line in dev.read_text().splitlines()]
    answers = answer(result.model, [(row["question"], row["context"]) for row in rows])
    expected = ["".join(row["answers"]["text"]) for row in rows]
    is_exact = [prediction.text == text for prediction, text in zip(answers, expected, strict=True)]
    assert np.mean(is_exact) == pytest.approx(metrics["exact"])
    assert any(prediction.text == "" for prediction in answers) == (unanswerable_fraction > 0)
    for prediction, row in zip(answers, rows, strict=True):
        if prediction.text:
            assert row["context"][prediction.start : prediction.end] == prediction.text


def test_null_threshold_can_be_set(start_model: Path, tmp_path: Path) -> None:
    """A null threshold that the user sets replaces the one computed on the held-out data."""
    data = write_questions(tmp_path / "train.jsonl", 40, 0.4)
    result = finetune(
        "answer",
        start_model,
        tmp_path / "run",
        data=data,
        assignments=["task.null_threshold=-99.0"],
        values={"schedule": {"steps": 1}, "run": {"threads": 1}, "task": {"max_seqlen": 24}},
    )
    assert result.model is not None
    assert result.metrics["null_threshold"] == -99.0
    answers = answer(load_fine_tuned(result.model), [("la", "le li lo")])
    assert {prediction.text for prediction in answers} == {""}


def test_snapshot_of_a_run_predicts_no_answer(start_model: Path, tmp_path: Path) -> None:
    """A model from a checkpoint has the threshold of the last evaluation up to its step."""
    run = tmp_path / "run"
    data = write_questions(tmp_path / "train.jsonl", 40, 0.9)
    values = {"schedule": {"steps": 2}, "run": {"threads": 1}, "task": {"max_seqlen": 24}}
    result = finetune("answer", start_model, run, data=data, values=values)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "kind": "heldout", "null_threshold": 99.0}\n')
    step, _ = write_latest_snapshot(run, tmp_path / "snapshot")
    assert step == 2
    model = load_fine_tuned(tmp_path / "snapshot")
    assert model.info["heldout_metrics"] == result.metrics
    assert get_task_settings(model).null_threshold == result.metrics["null_threshold"]
    (run / "metrics.jsonl").unlink()
    write_latest_snapshot(run, tmp_path / "without-metrics")
    assert "heldout_metrics" not in load_fine_tuned(tmp_path / "without-metrics").info


def test_answers_without_a_token_are_not_trained_on(start_model: Path, tmp_path: Path) -> None:
    """Questions whose answer has no token are not trained on, but are scored if held out."""
    data = write_questions(tmp_path / "train.jsonl", 20, 0.0)
    # A zero-width space is not a token.
    row = {
        "question": WORDS[0],
        "context": f"{WORDS[1]} \u200b",
        "answers": {"text": ["\u200b"], "answer_start": [len(f"{WORDS[1]} ")]},
    }
    lines = "".join(json.dumps({"id": f"empty {i}", **row}) + "\n" for i in range(20))
    data.write_text(data.read_text() + lines)
    dev = tmp_path / "dev.jsonl"
    dev.write_text(lines)
    progress = RecordingProgress()
    result = finetune(
        "answer",
        start_model,
        tmp_path / "run",
        data=data,
        progress=progress,
        values={
            "schedule": {"steps": 12},
            "run": {"threads": 1},
            "task": {"max_seqlen": 40, "batch_size": 2, "validation_files": {"dev": str(dev)}},
        },
    )
    assert result.counts["train"]["num_without_target"] == 20
    message = "train: 40 examples read; 20 inputs without a target, not trained on"
    assert message in progress.messages
    assert result.metrics["examples"] == 20
    assert math.isnan(result.metrics["loss"])
    train_lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert all(math.isfinite(line["loss"]) for line in train_lines)


def test_data_that_cannot_be_learned_is_rejected(start_model: Path, tmp_path: Path) -> None:
    """A file without answers, a wrong task kind and a missing file are errors before the run."""
    data = write_questions(tmp_path / "train.jsonl", 20, 1.0)
    with pytest.raises(TaskError, match=r"train\.jsonl: no question has an answer"):
        finetune("answer", start_model, tmp_path / "run", data=data)
    with pytest.raises(SettingsError, match="squad has the kind 'span'"):
        finetune(
            "squad",
            start_model,
            tmp_path / "run",
            data=tmp_path,
            values={"task": {"kind": "single"}},
        )
    with pytest.raises(TaskError, match=r"train-v1\.1\.json: no such file"):
        finetune("squad", start_model, tmp_path / "run", data=tmp_path)
    assert not (tmp_path / "run").exists()
