"""Questions are learnt: the span is found, and no answer is given where there is none."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import load_fine_tuned
from bertsmith.errors import SettingsError, TaskError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.engine import metrics_log
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.use.answer import answer
from bertsmith.use.evaluate import evaluate
from tests.model.examples import prime_config
from tests.train.conftest import WORDS, make_tokenizer
from tests.train.finetuning.test_finetune import NO_DROPOUT
from tests.train.finetuning.test_task_data import RecordingProgress

#: The answer is the word after the first one; without the first one there is no answer.
MARK = WORDS[0]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the vocabulary of sixty words, lowered."""
    words = make_tokenizer()
    torch.manual_seed(0)
    config = prime_config(
        vocab_size=words.vocab_size, width=32, heads=2, feed_forward=61, init_range=0.1
    )
    directory = tmp_path_factory.mktemp("answering") / "model"
    bundle.save(directory, BertForPreTraining(config), words, {})
    return directory


def questions(path: Path, count: int, unanswerable: float, seed: int = 0) -> Path:
    """Write questions whose contexts take one window or two of 24 tokens."""
    chance = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        words = [str(word) for word in chance.choice(WORDS[4:], chance.integers(3, 28))]
        answers: dict[str, list[object]] = {"text": [], "answer_start": []}
        if chance.random() >= unanswerable:
            place = int(chance.integers(0, len(words) - 1))
            words[place] = MARK
            before = " ".join(words[: place + 1]) + " "
            answers = {"text": [words[place + 1]], "answer_start": [len(before)]}
        lines.append({"id": str(number), "question": f"{MARK} {WORDS[1]}",
                      "context": " ".join(words), "answers": answers})  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("unanswerable", [0.0, 0.4])
def test_a_span_is_learnt(start: Path, tmp_path: Path, unanswerable: float) -> None:
    """F1 near 1 on held-out questions; evaluate and answer say the same of the same file."""
    data = questions(tmp_path / "train.jsonl", 500, unanswerable)
    dev = questions(tmp_path / "dev.jsonl", 80, unanswerable, seed=1)
    result = finetune(
        "answer", start, tmp_path / "run", data=data,
        values={"optim": {"lr": 4e-3}, "run": {"threads": 1}, "schedule": {"epochs": 18.0},
                "model": NO_DROPOUT,
                "task": {"batch": 16, "length": 24, "stride": 8, "heldout": {"dev": str(dev)}}},
    )  # fmt: skip
    assert result.metrics == ["f1", "exact"]
    assert result.figures["f1"] >= 0.9
    assert ("null_threshold" in result.figures) == (unanswerable > 0)
    assert result.model is not None
    again = evaluate(result.model, dev)
    assert again["counts"]["used"] == 80
    # The best thresholds are scores of a model, and training has them in another precision.
    for name in set(again) - {"counts", "best_f1_thresh", "best_exact_thresh"}:
        assert again[name] == pytest.approx(result.figures[name], abs=1e-4), name
    rows = [json.loads(line) for line in dev.read_text().splitlines()]
    said = answer(result.model, [(row["question"], row["context"]) for row in rows])
    right = ["".join(row["answers"]["text"]) for row in rows]
    hits = [one.text == text for one, text in zip(said, right, strict=True)]
    assert np.mean(hits) == pytest.approx(again["exact"])
    silent = [one.text == "" for one in said]
    assert any(silent) == (unanswerable > 0)
    assert all(row["context"][one.start : one.end] == one.text
               for one, row in zip(said, rows, strict=True) if one.text)  # fmt: skip


def test_the_threshold_can_be_said(start: Path, tmp_path: Path) -> None:
    """A threshold of one's own stays, whatever the held-out file would choose."""
    data = questions(tmp_path / "train.jsonl", 40, 0.4)
    result = finetune(
        "answer", start, tmp_path / "run", data=data, assignments=["task.null_threshold=-99.0"],
        values={"schedule": {"steps": 1}, "run": {"threads": 1}, "task": {"length": 24}},
    )  # fmt: skip
    assert result.model is not None
    assert result.figures["null_threshold"] == -99.0
    assert {one.text for one in answer(load_fine_tuned(result.model), [("la", "le li lo")])} == {""}


def test_an_answer_of_no_token_is_left_out_of_training(start: Path, tmp_path: Path) -> None:
    """It is counted and told; in the held-out file such a question is scored like any other."""
    data = questions(tmp_path / "train.jsonl", 20, 0.0)
    gone = {"question": WORDS[0], "context": f"{WORDS[1]} \u200b",
            "answers": {"text": ["\u200b"], "answer_start": [3]}}  # fmt: skip
    lines = "".join(json.dumps({"id": f"gone {number}", **gone}) + "\n" for number in range(20))
    data.write_text(data.read_text() + lines)
    dev = tmp_path / "dev.jsonl"
    dev.write_text(lines)
    notes = RecordingProgress()
    result = finetune(
        "answer", start, tmp_path / "run", data=data, progress=notes,
        values={"schedule": {"steps": 12}, "run": {"threads": 1},
                "task": {"length": 40, "batch": 2, "heldout": {"dev": str(dev)}}},
    )  # fmt: skip
    assert result.counts["train"]["untaught"] == 20
    assert (
        "train: of 40 examples 20 inputs without a target, left out of training" in notes.messages
    )
    assert result.figures["examples"] == 20
    assert math.isnan(result.figures["loss"])
    seen = [
        line["loss"]
        for line in metrics_log.read_metrics(tmp_path / "run")
        if line["kind"] == "train"
    ]
    assert all(math.isfinite(loss) for loss in seen)


def test_what_cannot_be_learnt_is_refused(start: Path, tmp_path: Path) -> None:
    """No answer anywhere, and class weights for what has no classes; no run is begun."""
    data = questions(tmp_path / "train.jsonl", 20, 1.0)
    with pytest.raises(TaskError, match=r"train\.jsonl: no question has an answer"):
        finetune("answer", start, tmp_path / "run", data=data)
    with pytest.raises(SettingsError, match="squad is of the kind 'span'"):
        finetune("squad", start, tmp_path / "run", data=tmp_path,
                 values={"task": {"kind": "single"}})  # fmt: skip
    with pytest.raises(TaskError, match=r"train-v1\.1\.json: no such file"):
        finetune("squad", start, tmp_path / "run", data=tmp_path)
    assert not (tmp_path / "run").exists()
