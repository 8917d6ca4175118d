"""The command ``distill``."""

import itertools
import json
from pathlib import Path

import pytest

from bertsmith.lab.distillation_comparison import compare_distilled
from bertsmith.progress import NullProgress
from tests.cli.conftest import MODEL_WIDTH, SENTENCES, RunCli


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A text file of 24 lines."""
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{SENTENCES[n % 3]} {n}\n" for n in range(24)))
    return file


def test_distill_embeddings(run_cli: RunCli, model: Path, lines: Path, tmp_path: Path) -> None:
    """A student is trained, inspected and embeds lines; a finished run is not trained again."""
    run = tmp_path / "run"
    command = ["distill", "--teacher", model, "--data", lines, "--layers", "1", "--out", run,
               "--objective", "embedding", "--epochs", "1", "--batch-size", "8",
               "--set", "run.threads=1"]  # fmt: skip
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert completed.out.startswith("held out (2 examples): teacher_cosine ")
    assert f"outputs of the teacher: 24 x {MODEL_WIDTH} in 16 bits" in completed.err
    assert "student: 1 layer of width" in completed.err
    assert f"next: bertsmith compare {model} {run}" in completed.err
    assert json.loads(run_cli(*command, "--json").out)["metrics"]["examples"] == 2
    assert "finished" in run_cli("inspect", run).out
    vectors = run_cli("embed", run, lines, "--out", tmp_path / "vectors.npy")
    assert vectors.status == 0, vectors.err


def test_invalid_options_are_errors_without_torch(
    run_cli: RunCli, model: Path, lines: Path, tmp_path: Path
) -> None:
    """The message names the options of the student, and what a teacher lacks."""
    command = ["distill", "--teacher", model, "--data", lines, "--out", tmp_path / "run"]
    cases: list[tuple[list[object], str]] = [
        (["--objective", "embedding"], "no student: give one of --layers"),
        (["--layers", "1", "--from", model, "--objective", "embedding"], "--from and another"),
        (["--layers", "1", "--objective", "task"], "needs a fine-tuned teacher"),
        (["--student-layers", "1,x"], "--student-layers 1,x: expected integers"),
    ]
    for options, message in cases:
        completed = run_cli(*command, *options)
        assert (completed.status, message in completed.err) == (2, True), completed.err


@pytest.mark.parametrize("objective", ["embedding", "task"])
def test_compare_prints_a_table(
    run_cli: RunCli, model: Path, tmp_path: Path, objective: str
) -> None:
    """Teacher, student and baseline have a row for each precision, with their own scores."""
    rows = [
        {"sentence1": f"{SENTENCES[n % 3]} {n}", "sentence2": f"{SENTENCES[(n // 2) % 3]} {n}",
         "score": n % 3, "text": f"{SENTENCES[n % 3]} {n}", "label": f"river {n % 3}"}
        for n in range(24)
    ]  # fmt: skip
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = model
    columns = ["--text", "sentence1", "--pair", "sentence2", "--score", "score"]
    if objective == "task":
        teacher, columns = tmp_path / "teacher", []
        completed = run_cli("finetune", "classify", "--model", model, "--data", table, "--dev",
                            table, "--out", teacher, "--set", "run.threads=1")  # fmt: skip
        assert completed.status == 0, completed.err
    run = tmp_path / "run"
    # A folder of the user next to the run is not replaced.
    (tmp_path / "run-start").mkdir()
    (tmp_path / "run-start" / "notes.txt").touch()
    command = ["distill", "--teacher", teacher, "--data", table, "--dev", table, "--layers", "1",
               "--out", run, "--objective", objective, "--epochs", "1", "--batch-size", "8",
               "--set", "run.threads=1", *columns, "--compare"]  # fmt: skip
    completed = run_cli(*command, "--json")
    assert completed.status == 0, completed.err
    comparison = json.loads(completed.out)["comparison"]
    names = ["teacher", "student", "student without teacher"]
    assert [row["model"] for row in comparison] == [name for name in names for _ in range(2)]
    full = {row["model"]: row for row in comparison if row["precision"] == "fp32"}
    paths = dict(zip(names, (teacher, run, tmp_path / "run-without-teacher"), strict=True))
    for name, path in paths.items():
        options = ["--embeddings", table, *columns]
        if objective == "task":
            options = ["--data", table]
        metrics = json.loads(run_cli("evaluate", path, *options, "--json").out)
        assert full[name]["score"] == pytest.approx(metrics[full[name]["metric"]], abs=1e-6)
    assert full["student"]["num_parameters"] < full["teacher"]["num_parameters"]
    assert full["student"]["num_bytes"] == (run / "model" / "model.safetensors").stat().st_size
    weights = [(paths[name] / "model" / "model.safetensors").read_bytes() for name in names[1:]]
    assert weights[0] != weights[1]
    completed = run_cli(*command)
    assert "student without teacher\tfp32\t" in completed.out
    assert [path.name for path in (tmp_path / "run-start").iterdir()] == ["notes.txt"]
    ticks = itertools.count()
    timed = compare_distilled(run, NullProgress(), clock=lambda: float(next(ticks)))
    texts = {row[name] for row in rows for name in ("sentence1", "sentence2")}
    num_texts = len(rows) if objective == "task" else len(texts)
    assert {row.texts_per_second for row in timed} == {num_texts}


def test_public_task_has_the_same_metric_for_all_models(
    run_cli: RunCli, model: Path, tmp_path: Path
) -> None:
    """--compare uses the metric of the task, also if the teacher was trained with another one.

    Rows without text are skipped, also by ``evaluate``.
    """
    data = tmp_path / "nsmc"
    data.mkdir()
    rows = [f"{n}\t{SENTENCES[n % 3]} {n}\t{n % 2}\n" for n in range(24)]
    for name in ("ratings_train.txt", "ratings_test.txt"):
        (data / name).write_text("".join(["id\tdocument\tlabel\n", *rows, "24\t\t1\n"]))
    options = ["--data", data, "--epochs", "1", "--set", "run.threads=1"]
    completed = run_cli("finetune", "nsmc", "--model", model, *options, "--metric", "macro_f1",
                        "--out", tmp_path / "teacher")  # fmt: skip
    assert completed.status == 0, completed.err
    completed = run_cli("evaluate", tmp_path / "teacher", "--data", data, "--json")
    assert completed.status == 0, completed.err
    assert json.loads(completed.out)["counts"]["num_used"] == 24
    completed = run_cli("distill", "--teacher", tmp_path / "teacher", *options, "--layers", "1",
                        "--compare", "--json", "--out", tmp_path / "run")  # fmt: skip
    assert completed.status == 0, completed.err
    comparison = json.loads(completed.out)["comparison"]
    assert {row["metric"] for row in comparison} == {"accuracy"}


def test_comparison_without_a_metric_stops_before_training(
    run_cli: RunCli, model: Path, lines: Path, tmp_path: Path
) -> None:
    """Unlabeled validation texts and a batch size of 1 are errors before anything is trained."""
    scores = tmp_path / "scores.jsonl"
    scores.write_text(json.dumps({"sentence1": "a", "sentence2": "b", "score": 1}) + "\n")
    for dev, batch_size, message in (
        (lines, 8, f"{lines} has texts without a pair, score or label, which have no metric"),
        (scores, 1, "distill.batch_size is 1, but the student without a teacher"),
    ):
        completed = run_cli(
            "distill", "--teacher", model, "--data", lines, "--dev", dev, "--layers", "1", "--out",
            tmp_path / "run", "--objective", "embedding", "--batch-size", batch_size, "--compare",
        )  # fmt: skip
        assert (completed.status, message in completed.err) == (2, True), completed.err
        assert not (tmp_path / "run").exists()


def test_student_without_teacher_trains_on_lines(
    run_cli: RunCli, model: Path, lines: Path, tmp_path: Path
) -> None:
    """Columns of the validation table are not those of a text file of lines."""
    table = tmp_path / "scores.jsonl"
    rows = [{"a": line, "b": line[:20], "s": len(line)} for line in lines.read_text().splitlines()]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    completed = run_cli(
        "distill", "--teacher", model, "--data", lines, "--dev", table, "--text", "a", "--pair",
        "b", "--score", "s", "--layers", "1", "--out", run, "--objective", "embedding", "--epochs",
        "1", "--batch-size", "8", "--set", "run.threads=1", "--compare", "--json",
    )  # fmt: skip
    assert completed.status == 0, completed.err
    comparison = json.loads(completed.out)["comparison"]
    assert {row["metric"] for row in comparison} == {"spearman"}
    settings = json.loads((tmp_path / "run-without-teacher/model/bertsmith.json").read_text())
    assert settings["provenance"]["embedding"]["columns"]["text"] is None
