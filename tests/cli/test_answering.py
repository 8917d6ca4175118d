"""The verbs of fine-tuning on questions about a context."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
CONTEXT = "The old pilot knew every stone of the river."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SQuAD v2.0 as its folder has it, with a question that the context does not answer."""
    place = tmp_path_factory.mktemp("squad")
    asked: list[dict[str, Any]] = [
        {"id": f"q{n}", "question": "Who knew?", "is_impossible": n % 2 == 1,
         "answers": [] if n % 2 else [{"text": "The old pilot", "answer_start": 0}]}
        for n in range(8)
    ]  # fmt: skip
    raw = {"version": "v2.0", "data": [{"paragraphs": [{"context": CONTEXT, "qas": asked}]}]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (place / name).write_text(json.dumps(raw))
    return place


@pytest.fixture(scope="module")
def tuned(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on that folder."""
    from bertsmith.train.finetuning.finetune import finetune

    run = tmp_path_factory.mktemp("tuned") / "run"
    finetune("squad2", model, run, data=folder, values={"run": {"threads": 1}})
    return run


def test_a_public_task_knows_its_files(run: Run, model: Path, folder: Path, tmp_path: Path) -> None:
    """squad2 finds train and dev by name and tells F1 and exact match; other files can be given."""
    given = ("--model", model, "--set", "run.threads=1", "--epochs", 1, "--json")
    done = run("finetune", "squad2", "--data", folder, "--out", tmp_path / "a", *given)
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert {"f1", "exact", "best_f1", "null_threshold"} <= set(told["heldout"])
    assert told["counts"]["dev"]["used"] == 8
    done = run(
        "finetune", "squad", "--data", folder, "--out", tmp_path / "b", *given,
        "--set", f"task.train={folder / 'train-v2.0.json'}", "--dev", folder / "dev-v2.0.json",
    )  # fmt: skip
    assert done.status == 0, done.err


def test_predict_answers(run: Run, tuned: Path, folder: Path) -> None:
    """A question, a tab and its context; SQuAD's file by id; evaluate reads such a file too."""
    done = run("predict", tuned, "--json", f"Who knew?\t{CONTEXT}")
    told = json.loads(done.out)
    assert told["text"] in ("", CONTEXT[told["start"] or 0 : told["end"] or 0])
    assert {one["text"] for one in told["candidates"]} > {told["text"]}
    file = folder / "dev-v2.0.json"
    answers = json.loads(run("predict", tuned, "--squad", file).out)
    assert answers == {f"q{n}": told["text"] for n in range(8)}
    scored = json.loads(run("evaluate", tuned, "--data", file, "--json").out)
    assert scored["f1"] == scored["exact"] == 0.5
    assert scored["counts"]["read"] == 8


def test_predict_takes_a_null_threshold(run: Run, tuned: Path, folder: Path) -> None:
    """The same threshold as evaluate's: what it scores is what predict gives."""
    file = folder / "dev-v2.0.json"
    asked = ("predict", tuned, f"Who knew?\t{CONTEXT}", "--json", "--null-threshold")
    assert json.loads(run(*asked, "-100").out)["text"] == ""
    assert json.loads(run(*asked, "inf").out)["text"]
    silent = json.loads(run("predict", tuned, "--squad", file, "--null-threshold", "-100").out)
    assert set(silent.values()) == {""}
    scored = json.loads(
        run("evaluate", tuned, "--data", file, "--json", "--null-threshold", "-100").out
    )
    assert (scored["null_threshold"], scored["NoAns_exact"]) == (-100.0, 1.0)
    done = run(*asked, "nan")
    assert (done.status, "null_threshold is NaN" in done.err) == (2, True)


def test_mistakes_are_told(run: Run, tuned: Path, folder: Path, tmp_path: Path) -> None:
    """Two sources, no tab, no SQuAD's file, a model of another kind for GLUE: status 2."""
    done = run("predict", tuned, "a\tb", "--squad", folder / "dev-v2.0.json")
    assert (done.status, "or --squad FILE" in done.err) == (2, True)
    done = run("predict", tuned, "who knew")
    assert (done.status, "there is no tab" in done.err) == (2, True)
    (tmp_path / "x.json").write_text("{}")
    done = run("predict", tuned, "--squad", tmp_path / "x.json")
    assert (done.status, "no list 'data'" in done.err) == (2, True)
    done = run("predict", tuned, "--glue", tmp_path / "x.json")
    assert (done.status, "no test file without labels" in done.err) == (2, True)
