"""Fine-tuning for multiple choice learns, and tells and evaluates what it learnt."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.errors import RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.finetuning.finetune import FinetuneResult, finetune
from bertsmith.use.choose import choose
from bertsmith.use.evaluate import evaluate
from tests.model.examples import prime_config
from tests.train.conftest import WORDS, make_tokenizer
from tests.train.finetuning.test_finetune import NO_DROPOUT


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the vocabulary of sixty words."""
    words = make_tokenizer()
    torch.manual_seed(0)
    config = prime_config(
        vocab_size=words.vocab_size, width=32, heads=2, feed_forward=61, init_range=0.1
    )
    directory = tmp_path_factory.mktemp("start") / "model"
    bundle.save(directory, BertForPreTraining(config), words, {})
    return directory


def table(path: Path, count: int, seed: int, answers: Path | None = None) -> Path:
    """Write prompts with three endings, of which the right one holds the first word of WORDS.

    ``answers``: a file for the letters of the right ones, which else are a column.
    """
    chance = np.random.default_rng(seed)
    rows, letters = ["id,text,x,y,z" + ("" if answers else ",label")], []
    for number in range(count):
        texts = [" ".join(chance.choice(WORDS[4:], chance.integers(1, 5))) for _ in range(4)]
        right = int(chance.integers(3))
        texts[right + 1] += f" {WORDS[0]}"
        rows.append(",".join([str(number), *texts, *([] if answers else [str(right)])]))
        letters.append(f"{number},{'ABC'[right]}")
    path.write_text("\n".join(rows) + "\n")
    if answers is not None:
        answers.write_text("\n".join(reversed(letters)) + "\n")
    return path


def tune(start: Path, out: Path, data: Path, **task: object) -> FinetuneResult:
    """Fine-tune on ``data`` for some quick steps."""
    values = {
        "task": {"endings": ["x", "y", "z"], "batch": 8, **task},
        "model": NO_DROPOUT, "optim": {"lr": 3e-3}, "schedule": {"epochs": 4.0}, "run": {"threads": 1},
    }  # fmt: skip
    return finetune("choose", start, out, data=data, values=values)


def test_choosing_is_learnt(start: Path, tmp_path: Path) -> None:
    """Held-out accuracy is near 1, and evaluate and choose say the same of a fresh file."""
    data = table(tmp_path / "train.csv", 160, 0)
    result = tune(start, tmp_path / "run", data)
    assert result.metrics == ["accuracy"]
    assert result.figures["accuracy"] >= 0.9
    assert result.figures["examples"] == 16
    assert result.model is not None
    fresh = table(tmp_path / "fresh.csv", 60, 9)
    found = evaluate(result.model, fresh)
    assert found["accuracy"] >= 0.9
    rows = [line.split(",") for line in fresh.read_text().splitlines()[1:]]
    said = choose(tmp_path / "run", [(row[1], row[2:5]) for row in rows])
    hits = [answer.best == int(row[5]) for answer, row in zip(said, rows, strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(hits))
    assert found["counts"]["used"] == 60


def test_answers_of_another_file_are_part_of_a_run(start: Path, tmp_path: Path) -> None:
    """Training and held-out tables have their own; a run whose answers changed is not taken up."""
    data = table(tmp_path / "t.csv", 40, 0, tmp_path / "t-right.csv")
    dev = table(tmp_path / "d.csv", 20, 1, tmp_path / "d-right.csv")
    task = {"answers": "-right", "heldout": {"dev": str(dev)}}
    result = tune(start, tmp_path / "run", data, **task)
    assert (result.counts["train"]["used"], result.counts["dev"]["used"]) == (40, 20)
    assert result.model is not None
    found = evaluate(result.model, dev)
    assert found["accuracy"] == pytest.approx(result.figures["accuracy"])
    stored = json.loads((result.model / bundle.INFO_FILE).read_text())
    assert stored["provenance"]["task"]["answers"] == "-right"
    answers = (tmp_path / "d-right.csv").read_text()
    (tmp_path / "d-right.csv").write_text(answers.replace("A", "B"))
    with pytest.raises(RunError, match=r"the data files have changed .*d-right\.csv"):
        tune(start, tmp_path / "run", data, **task)


def test_pieces_of_a_batch_equal_the_whole(start: Path, tmp_path: Path) -> None:
    """The endings of a prompt stay in one piece, however small pieces are; the loss is the same."""
    data = table(tmp_path / "t.csv", 40, 0)
    ends = []
    for tokens in (64, 4096):
        values = {
            "task": {"endings": ["x", "y", "z"], "batch": 16}, "schedule": {"steps": 3},
            "model": {"dropout": 0.0, "attention_dropout": 0.0}, "optim": {"lr": 1e-3},
            "run": {"threads": 1, "micro_batch_tokens": tokens, "precision": "fp32"},
        }  # fmt: skip
        out = tmp_path / str(tokens)
        ends.append(finetune("choose", start, out, data=data, values=values).figures["loss"])
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
