"""The commands ``finetune`` and ``evaluate``."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import tomli_w

from bertsmith.bundle import INFO_FILE, WEIGHTS_FILE, HeadConfig, save_fine_tuned
from bertsmith.cli.console import print_json
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.finetuning.sweep import SweepResult
from tests.cli.conftest import RunCli, small_config


@pytest.fixture
def finetune_command(model: Path, table: Path) -> list[str | Path]:
    """A command that fine-tunes a classifier for one epoch, without --out."""
    return [
        "finetune", "classify", "--model", model, "--data", table, "--text", "line",
        "--label", "mood", "--epochs", "1", "--set", "run.threads=1",
    ]  # fmt: skip


def test_finetune_prints_metrics_and_counts(
    run_cli: RunCli, finetune_command: list[str | Path], model: Path, tmp_path: Path
) -> None:
    """Validation metrics and row counts are printed; sizes and a next command are logged."""
    out = tmp_path / "run"
    completed = run_cli(*finetune_command, "--batch-size", 8, "--out", out)
    assert completed.status == 0, completed.err
    sizes = f"{out}: {model} on 22 training examples, 2 held-out examples ("
    assert completed.err.startswith(sizes)
    assert "train: 24 read, 24 used, 0 skipped, 0 truncated" in completed.out
    assert "held out (2 examples): accuracy" in completed.out
    assert f"next: bertsmith predict {out / 'model'}" in completed.err


def test_metrics_of_all_validation_files_are_printed(
    run_cli: RunCli, finetune_command: list[str | Path], table: Path, tmp_path: Path
) -> None:
    """Each validation file has a line with the same metrics."""
    lines = table.read_text().splitlines(keepends=True)
    (tmp_path / "short.csv").write_text("".join(lines[:9]))
    files = {"all": str(table), "short": str(tmp_path / "short.csv")}
    config = tmp_path / "settings.toml"
    config.write_text(tomli_w.dumps({"task": {"validation_files": files}}))
    completed = run_cli(*finetune_command, "--config", config, "--out", tmp_path / "run")
    assert completed.status == 0, completed.err
    printed = [line.partition(":")[0] for line in completed.out.splitlines() if "loss" in line]
    assert printed == ["held out (24 examples)", "held out, short (8 examples)"]
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    scores = f"accuracy {metrics['short_accuracy']:.4f}, macro_f1 {metrics['short_macro_f1']:.4f}"
    assert f"(8 examples): {scores}, loss " in completed.out


def test_inspect_shows_a_fine_tuning_run_and_its_model(run_cli: RunCli, classifier: Path) -> None:
    """A run shows its metrics; its model shows the head of the task, but no masked-LM head."""
    completed = run_cli("inspect", classifier)
    assert completed.status == 0, completed.err
    assert "held out" in completed.out
    assert "accuracy" in completed.out
    completed = run_cli("inspect", classifier / "model")
    assert "fine-tuned (single)" in completed.out
    assert "next: bertsmith predict" in completed.err
    assert "masked LM" not in completed.out.splitlines()[1]


def test_choose_uses_a_column_per_ending(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """``choose`` trains on a table with --endings and predicts a prompt with its endings."""
    rows = [f"the anvil {n},rings,sleeps,{n % 2}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["line,a,b,right", *rows]) + "\n")
    completed = run_cli(
        "finetune", "choose", "--model", model, "--data", tmp_path / "t.csv", "--text", "line",
        "--endings", "a,b", "--label", "right", "--epochs", 1, "--batch-size", 8,
        "--set", "run.threads=1", "--out", tmp_path / "run",
    )  # fmt: skip
    assert completed.status == 0, completed.err
    assert "train: 20 read, 20 used, 0 skipped, 0 truncated" in completed.out
    inspected = run_cli("inspect", tmp_path / "run" / "model").err
    assert r"$'PROMPT\tENDING 1\tENDING 2'" in inspected
    prompt = "the anvil\trings\tsleeps"
    prediction = json.loads(run_cli("predict", tmp_path / "run", prompt, "--json").out)
    best, probabilities = prediction["best_index"], prediction["probabilities"]
    assert prediction["endings"] == ["rings", "sleeps"]
    assert sum(probabilities) == pytest.approx(1)
    assert probabilities[best] == max(probabilities)
    assert prediction["best_ending"] == ["rings", "sleeps"][best]
    assert prediction["best_column"] == ["a", "b"][best]
    line = run_cli("predict", tmp_path / "run", prompt).out
    assert line == f"{best}\t{max(probabilities):.4f}\t{prediction['best_ending']}\t{prompt}\n"


def test_evaluate_uses_the_columns_of_the_training_table(
    run_cli: RunCli, classifier: Path, table: Path
) -> None:
    """Metrics, counts, class report and confusion matrix are printed as JSON or as text."""
    metrics = json.loads(run_cli("evaluate", classifier, "--data", table, "--json").out)
    assert 0 <= metrics["accuracy"] <= 1
    counts = {
        "num_read": 24,
        "num_used": 24,
        "num_truncated": 0,
        "skipped": {},
        "unknown_share": 0.0,
    }
    assert metrics["counts"] == counts
    assert sum(scores["support"] for scores in metrics["classes"].values()) == 24
    assert list(metrics["confusion"]) == list(metrics["classes"]) == ["loud", "still"]
    lines = run_cli("evaluate", classifier, "--data", table).out.splitlines()
    assert lines[3].split() == ["label", "precision", "recall", "f1", "support"]
    assert "rows: true labels, columns: predicted labels" in lines


def test_metric_option_may_be_repeated(
    run_cli: RunCli,
    classifier: Path,
    table: Path,
    finetune_command: list[str | Path],
    tmp_path: Path,
) -> None:
    """--metric may be repeated; metrics are printed in this order; unknown ones are errors."""
    options = ("--metric", "roc_auc", "--metric", "f1:loud")
    completed = run_cli("evaluate", classifier, "--data", table, *options)
    assert re.match(r"roc_auc [01]\.\d{4}, f1:loud [01]\.\d{4}\n", completed.out)
    command = [*finetune_command, "--out", tmp_path / "run"]
    completed = run_cli(*command, "--metric", "nope")
    assert completed.status == 2
    assert "'nope'" in completed.err
    completed = run_cli(*command, "--metric", "f1:still", "--metric", "matthews")
    assert "held out (2 examples): f1:still " in completed.out


def test_classifier_without_bertsmith_json_is_evaluated(
    run_cli: RunCli, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A model without stored columns needs them as options; training settings are errors."""
    model = tmp_path / "m"
    table = tmp_path / "t.csv"
    head = HeadConfig("single", ("loud", "still"))
    save_fine_tuned(model, head.build_model(small_config(tokenizer)), tokenizer, head, {})
    (model / INFO_FILE).unlink()
    table.write_text("id,line,other,mood\n1,the anvil,rings,loud\n")
    evaluate = ("evaluate", model, "--data", table, "--json")
    completed = run_cli(*evaluate, "--text", "line", "--pair", "other", "--label", "mood")
    assert completed.status == 0, completed.err
    assert json.loads(completed.out)["counts"]["num_used"] == 1
    error = (
        "t.csv, line 1: there is no column 'text'; the columns are 'id', 'line', 'other', 'mood'"
    )
    assert f"{error}; name the column with --text" in run_cli(*evaluate).err
    error = run_cli(*evaluate, "--text", "line").err
    assert "there is no column 'label'" in error
    assert "name the column with --label" in error
    table.write_text("the anvil,loud\n")
    completed = run_cli(*evaluate, "--text", "0", "--label", "1", "--set", "task.header=false")
    assert json.loads(completed.out)["counts"]["num_used"] == 1
    completed = run_cli(*evaluate, "--set", "optim.lr=1.0")
    assert completed.status == 2
    assert "only settings of the task" in completed.err
    completed = run_cli(*evaluate, "--set", "task.batch_size=3")
    assert completed.status == 2
    assert "task.batch_size: " in completed.err


def test_json_output_has_null_for_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinities are printed as null, because JSON has neither."""
    print_json({"spearman": math.nan, "all": [1.5, -math.inf]})
    assert capsys.readouterr().out == '{"spearman": null, "all": [1.5, null]}\n'


def test_skipped_rows_and_sweeps_are_reported(
    run_cli: RunCli, classifier: Path, model: Path, tmp_path: Path
) -> None:
    """The first skipped row is located; a sweep over seeds reports counts and metric ranges."""
    file = tmp_path / "a.csv"
    out = tmp_path / "runs"
    rows = [row for n in range(12) for row in (f"the river {n},still", f"the anvil {n},loud")]
    # The first row has no label.
    file.write_text("\n".join(["line,mood", "the anvil,", *rows]) + "\n")
    completed = run_cli("evaluate", classifier, "--data", file, "--skip-invalid")
    skipped_row = f"{file}, line 2"
    assert "25 read, 24 used, 1 skipped" in completed.out
    assert skipped_row in completed.err
    completed = run_cli(
        "finetune", "classify", "--model", model, "--data", file, "--text", "line", "--label",
        "mood", "--epochs", 1, "--set", "run.threads=1", "--skip-invalid", "--seeds", 2, "--json",
        "--out", out,
    )  # fmt: skip
    assert skipped_row in completed.err
    report = json.loads(completed.out)
    assert list(report["counts"]["train"]["skipped"].values()) == [1]
    [point] = report["points"]
    assert point["min"] <= point["median"] <= point["max"]
    output = run_cli("inspect", out).out
    assert f"runs {out}: 2, all finished" in output
    assert f"by accuracy: {report['best']}" in output
    assert f"{point['median']:.4f}" in output


def test_inspect_describes_incomplete_sweeps(
    run_cli: RunCli, finetune_command: list[str | Path], tmp_path: Path
) -> None:
    """NaN metrics, unfinished runs and a damaged results.json are reported."""
    out = tmp_path / "runs"
    assert run_cli(*finetune_command, "--seeds", 2, "--out", out).status == 0
    results = (out / "results.json").read_text()
    (out / "results.json").write_text(re.sub('"accuracy": [0-9.]+', '"accuracy": null', results))
    assert "seed-1  nan" in run_cli("inspect", out).out
    shutil.copytree(out / "seed-1", out / "seed-2")
    assert "3 of 3" in run_cli("inspect", out).out
    (out / "results.json").unlink()
    shutil.rmtree(out / "seed-1" / "model")
    assert "2 of 3" in run_cli("inspect", out).out
    for content in ("{}", '{"metric": "f1", "best": "seed-0", "settings": [{"runs": {}}]}'):
        (out / "results.json").write_text(content)
        assert "results.json: " in run_cli("inspect", out).err


def test_interrupted_sweep_reports_the_run_and_step(
    run_cli: RunCli, model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted sweep exits with the signal's status and reports the stopped run."""
    stopped_run = FinetuneResult(
        run=tmp_path / "seed-1",
        model=None,
        signal=signal.SIGTERM,
        step=3,
        steps=9,
        metric_names=["accuracy"],
        metrics={},
        counts={},
        seconds=1.0,
    )
    sweep = SweepResult(tmp_path, points=[], best=None, model=None, stopped_run=stopped_run)
    monkeypatch.setattr("bertsmith.train.finetuning.sweep.run_sweep", lambda *_, **__: sweep)
    completed = run_cli(
        "finetune", "classify", "--model", model, "--data", table, "--seeds", 2, "--json",
        "--out", tmp_path / "runs",
    )  # fmt: skip
    assert completed.status == 128 + signal.SIGTERM
    report = json.loads(completed.out)
    assert (report["run"], report["step"], report["steps"]) == (str(tmp_path / "seed-1"), 3, 9)
    assert "stopped after step 3 of 9" in completed.err


def test_deleted_model_is_restored_from_the_checkpoint(
    run_cli: RunCli, finetune_command: list[str | Path], tmp_path: Path
) -> None:
    """Repeating the command writes a deleted model again with the same bytes."""
    out = tmp_path / "run"
    assert run_cli(*finetune_command, "--out", out).status == 0
    weights = out / "model" / WEIGHTS_FILE
    original_bytes = weights.read_bytes()
    shutil.rmtree(out / "model")
    assert run_cli(*finetune_command, "--out", out).status == 0
    assert weights.read_bytes() == original_bytes


def test_invalid_run_directory_is_an_error(
    run_cli: RunCli, finetune_command: list[str | Path], table: Path
) -> None:
    """A path inside a file, or one that cannot be created, is an error without a traceback."""
    completed = run_cli(*finetune_command, "--out", table / "run")
    assert completed.status == 2
    assert f"{table / 'run'}: {table}: this is a file" in completed.err
    completed = run_cli(*finetune_command, "--out", "/proc/bertsmith")
    assert completed.status == 2
    assert completed.err.splitlines()[-1].startswith("error: /proc/bertsmith")


def test_invalid_columns_and_models_are_errors(
    run_cli: RunCli, model: Path, table: Path, tmp_path: Path
) -> None:
    """A missing column, a column used twice and a model without a task exit with 2."""
    finetune = ("finetune", "classify", "--model", model, "--data", table, "--label", "mood",
                "--out", tmp_path / "run")  # fmt: skip
    completed = run_cli(*finetune, "--text", "words")
    assert completed.status == 2
    assert "no column 'words'; the columns are 'line', 'mood'" in completed.err
    completed = run_cli(*finetune, "--text", "mood")
    assert "the column 'mood' is both text and label" in completed.err
    assert not (tmp_path / "run").exists()
    completed = run_cli("predict", model, "a text")
    assert completed.status == 2
    assert "not fine-tuned on a task" in completed.err
    assert run_cli("predict", model).status == 2


def write_squad_file(path: Path, num_questions: int) -> None:
    """Write a SQuAD 1.1 file with one question per article."""
    articles = []
    for n in range(num_questions):
        answers = [{"text": "Ann", "answer_start": 0}]
        question = {"id": f"q{n}", "question": "who?", "answers": answers}
        paragraph = {"context": f"Ann sang {n}.", "qas": [question]}
        articles.append({"title": f"t{n}", "paragraphs": [paragraph]})
    path.write_text(json.dumps({"version": "1.1", "data": articles}))


def test_squad_data_is_a_folder_or_a_file(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """``finetune squad`` and ``evaluate`` take a folder or a file, and name the expected files."""
    folder = tmp_path / "squad"
    out = tmp_path / "run"
    folder.mkdir()
    finetune = ("finetune", "squad", "--model", model, "--epochs", 1, "--batch-size", 8,
                "--max-seqlen", 16, "--set", "run.threads=1", "--set", "task.max_question_length=4",
                "--out", out)  # fmt: skip
    rejected = run_cli(*finetune, "--data", folder)
    assert rejected.status == 2
    expected = "squad expects a folder with train-v1.1.json and dev-v1.1.json, or its training file"
    assert expected in rejected.err
    write_squad_file(folder / "train-v1.1.json", 12)
    completed = run_cli(*finetune, "--data", folder / "train-v1.1.json")
    assert completed.status == 0, completed.err
    assert r"$'QUESTION\tCONTEXT'" in completed.err
    rejected = run_cli("evaluate", out, "--data", folder)
    assert rejected.status == 2
    assert expected in rejected.err
    write_squad_file(folder / "dev-v1.1.json", 3)
    from_folder = run_cli("evaluate", out, "--data", folder)
    assert from_folder.status == 0, from_folder.err
    from_file = run_cli("evaluate", out, "--data", folder / "dev-v1.1.json")
    assert from_folder.out == from_file.out
