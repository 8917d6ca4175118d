"""The commands ``finetune``, ``predict`` and ``evaluate`` for question answering."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.train.finetuning.finetune import finetune
from tests.cli.conftest import RunCli

CONTEXT = "The old pilot knew every stone of the river."


@pytest.fixture(scope="module")
def squad_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SQuAD v2.0 files; every second question is unanswerable."""
    folder = tmp_path_factory.mktemp("squad")
    questions: list[dict[str, Any]] = [
        {
            "id": f"q{n}",
            "question": "Who knew?",
            "is_impossible": n % 2 == 1,
            "answers": [] if n % 2 else [{"text": "The old pilot", "answer_start": 0}],
        }
        for n in range(8)
    ]
    paragraphs = [{"context": CONTEXT, "qas": questions}]
    dataset = {"version": "v2.0", "data": [{"paragraphs": paragraphs}]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (folder / name).write_text(json.dumps(dataset))
    return folder


@pytest.fixture(scope="module")
def squad_run(model: Path, squad_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a model fine-tuned on ``squad_folder``."""
    out = tmp_path_factory.mktemp("squad_run") / "run"
    finetune("squad2", model, out, data=squad_folder, values={"run": {"threads": 1}})
    return out


def test_finetune_finds_the_files_of_a_public_task(
    run_cli: RunCli, model: Path, squad_folder: Path, tmp_path: Path
) -> None:
    """``squad2`` finds train and dev files by name; other files can be given."""
    options = ("--model", model, "--set", "run.threads=1", "--epochs", 1, "--json")
    completed = run_cli(
        "finetune", "squad2", "--data", squad_folder, "--out", tmp_path / "a", *options
    )
    assert completed.status == 0, completed.err
    summary = json.loads(completed.out)
    assert {"f1", "exact", "best_f1", "null_threshold"} <= set(summary["metrics"])
    assert summary["counts"]["dev"]["num_used"] == 8
    train, dev = squad_folder / "train-v2.0.json", squad_folder / "dev-v2.0.json"
    completed = run_cli(
        "finetune", "squad", "--data", squad_folder, "--out", tmp_path / "b", *options,
        "--set", f"task.train_file={train}", "--dev", dev,
    )  # fmt: skip
    assert completed.status == 0, completed.err


def test_predict_and_evaluate_questions(
    run_cli: RunCli, squad_run: Path, squad_folder: Path
) -> None:
    """Predict takes a question, a tab and a context, or a SQuAD file; evaluate takes the file."""
    answer = json.loads(run_cli("predict", squad_run, "--json", f"Who knew?\t{CONTEXT}").out)
    assert answer["text"] in ("", CONTEXT[answer["start"] or 0 : answer["end"] or 0])
    candidates = {candidate["text"] for candidate in answer["candidates"]}
    assert answer["text"] in candidates
    assert len(candidates) > 1
    file = squad_folder / "dev-v2.0.json"
    answers = json.loads(run_cli("predict", squad_run, "--squad", file).out)
    assert answers == {f"q{n}": answer["text"] for n in range(8)}
    metrics = json.loads(run_cli("evaluate", squad_run, "--data", file, "--json").out)
    assert metrics["f1"] == metrics["exact"] == 0.5
    assert metrics["counts"]["num_read"] == 8


def test_predict_accepts_a_null_threshold(
    run_cli: RunCli, squad_run: Path, squad_folder: Path
) -> None:
    """--null-threshold has the same effect in predict and evaluate; NaN is rejected."""
    file = squad_folder / "dev-v2.0.json"
    predict = ("predict", squad_run, f"Who knew?\t{CONTEXT}", "--json", "--null-threshold")
    assert json.loads(run_cli(*predict, "-100").out)["text"] == ""
    assert json.loads(run_cli(*predict, "inf").out)["text"]
    options = ("--null-threshold", "-100")
    answers = json.loads(run_cli("predict", squad_run, "--squad", file, *options).out)
    assert set(answers.values()) == {""}
    metrics = json.loads(run_cli("evaluate", squad_run, "--data", file, "--json", *options).out)
    assert (metrics["null_threshold"], metrics["NoAns_exact"]) == (-100.0, 1.0)
    completed = run_cli(*predict, "nan")
    assert completed.status == 2
    assert "null_threshold is NaN" in completed.err


def test_invalid_input_is_an_error(
    run_cli: RunCli, squad_run: Path, squad_folder: Path, tmp_path: Path
) -> None:
    """Two inputs, a missing tab, an invalid SQuAD file or --glue exit with 2."""
    completed = run_cli("predict", squad_run, "a\tb", "--squad", squad_folder / "dev-v2.0.json")
    assert completed.status == 2
    assert "or --squad FILE" in completed.err
    completed = run_cli("predict", squad_run, "who knew")
    assert completed.status == 2
    assert "no tab" in completed.err
    (tmp_path / "x.json").write_text("{}")
    completed = run_cli("predict", squad_run, "--squad", tmp_path / "x.json")
    assert completed.status == 2
    assert "no list 'data'" in completed.err
    completed = run_cli("predict", squad_run, "--glue", tmp_path / "x.json")
    assert completed.status == 2
    assert "no test file for the GLUE server" in completed.err
    completed = run_cli("predict", squad_run, "--glue", tmp_path / "x.json", "--json")
    assert completed.status == 2
    assert "--json: not valid with --glue" in completed.err
