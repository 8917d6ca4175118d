"""The command ``predict``: texts, lines, tables, and invalid options."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bertsmith.bundle import HeadConfig, save_fine_tuned
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.finetuning.finetune import finetune
from tests.cli.conftest import RunCli, small_config


def test_fast_predictions_are_similar(run_cli: RunCli, classifier: Path, table: Path) -> None:
    """With --fast, probabilities and metrics differ only a little from those in float32."""
    for command in (["predict", classifier, "the anvil rings"],
                    ["evaluate", classifier, "--data", table]):  # fmt: skip
        exact, fast = (
            json.loads(run_cli(*command, "--json", *options).out) for options in ([], ["--fast"])
        )
        if command[0] == "evaluate":
            assert fast["accuracy"] == pytest.approx(exact["accuracy"], abs=0.05)
        else:
            exact_probabilities, fast_probabilities = (dict(row["labels"]) for row in (exact, fast))
            for label, probability in exact_probabilities.items():
                assert 0 < abs(fast_probabilities[label] - probability) < 0.02


def test_predict_prints_labels(run_cli: RunCli, classifier: Path) -> None:
    """Label, probability and text are printed; --json has all labels; a tab is part of a text."""
    completed = run_cli("predict", classifier, "the anvil rings", "the river\tsleeps")
    label, probability, text = completed.out.splitlines()[0].split("\t")
    assert label in {"loud", "still"}
    assert 0.5 <= float(probability) <= 1.0
    assert text == "the anvil rings"
    lines = run_cli("predict", classifier, "--json", "a\tb").out.splitlines()
    prediction = json.loads(lines[0])
    assert (prediction["text"], prediction.get("pair")) == ("a\tb", None)
    assert sum(prediction["labels"].values()) == pytest.approx(1)


def test_predict_reads_lines_of_a_file(run_cli: RunCli, classifier: Path, tmp_path: Path) -> None:
    """An empty line is an error after the predictions before it, or skipped and counted."""
    file = tmp_path / "texts"
    file.write_text("the anvil\nthe river\n")
    predictions = run_cli("predict", classifier, "--input", file).out.splitlines()
    assert len(predictions) == 2
    file.write_text("the anvil\n\nthe river\n \n")
    completed = run_cli("predict", classifier, "--input", file)
    assert (completed.status, completed.out.splitlines()) == (2, predictions[:1])
    assert f"{file}, line 2 is empty" in completed.err
    assert "--skip-invalid" in completed.err
    completed = run_cli("predict", classifier, "--input", file, "--skip-invalid")
    assert (completed.status, completed.out.splitlines()) == (0, predictions)
    assert f"skipped 2 lines; the first: {file}, line 2 is empty" in completed.err


def test_predict_writes_lines_as_a_table(run_cli: RunCli, classifier: Path, tmp_path: Path) -> None:
    """With --out, lines become a table with the printed labels; an empty line leaves no file."""
    file = tmp_path / "lines.txt"
    out = tmp_path / "o.csv"
    file.write_text("the anvil, cold\n\nthe river\n")
    completed = run_cli("predict", classifier, "--input", file, "--out", out)
    assert completed.status == 2
    assert f"{file}, line 2 is empty" in completed.err
    assert not out.exists()
    command = ("predict", classifier, "--input", file, "--skip-invalid")
    completed = run_cli(*command, "--out", out)
    assert (completed.status, completed.out) == (0, ""), completed.err
    assert f"wrote {out}: 2 lines, with label, probability" in completed.err
    assert f"skipped 1 line; the first: {file}, line 2 is empty" in completed.err
    with out.open(newline="") as table:
        rows = list(csv.DictReader(table))
    printed = [line.split("\t") for line in run_cli(*command).out.splitlines()]
    assert [[row["label"], row["text"]] for row in rows] == [[line[0], line[2]] for line in printed]
    assert list(rows[0]) == ["text", "label", "probability"]
    for row, line in zip(rows, printed, strict=True):
        assert float(row["probability"]) == pytest.approx(float(line[1]), abs=1e-4)
    summary = run_cli(*command, "--out", tmp_path / "o.jsonl", "--json").out
    assert json.loads(summary)["num_rows"] == 2


def test_predict_reads_a_table(run_cli: RunCli, classifier: Path, tmp_path: Path) -> None:
    """The training table's column or another is read; the table goes to a file or to stdout."""
    table = tmp_path / "t.csv"
    out = tmp_path / "out.csv"
    table.write_text('id,line\n1,"the anvil, rings"\n2,the river\n')
    completed = run_cli("predict", classifier, "--input", table, "--out", out)
    assert (completed.status, completed.out) == (0, ""), completed.err
    assert f"wrote {out}: 2 rows, with label, probability" in completed.err
    printed = run_cli("predict", classifier, "--input", table)
    assert printed.out == out.read_text()
    assert printed.out.splitlines()[0] == "id,line,label,probability"
    assert printed.out.splitlines()[1].startswith('1,"the anvil, rings",')
    completed = run_cli(
        "predict",
        classifier,
        "--input",
        "-",
        "--format",
        "csv",
        "--json",
        stdin=table.read_bytes(),
    )
    rows = [json.loads(line) for line in completed.out.splitlines()]
    assert [row["id"] for row in rows] == ["1", "2"]
    out = tmp_path / "o.jsonl"
    summary = json.loads(
        run_cli("predict", classifier, "--input", table, "--out", out, "--json").out
    )
    assert summary["num_rows"] == 2
    assert summary["columns"] == ["label", "probability"]
    table.write_text("id,review\n1,the anvil\n")
    completed = run_cli("predict", classifier, "--input", table)
    assert completed.status == 2
    assert "--text" in completed.err
    assert "'line' (as in its training table)" in completed.err
    assert run_cli("predict", classifier, "--input", table, "--text", "review").status == 0
    completed = run_cli("predict", classifier, "--input", table, "--text", "nope")
    assert "reads the column 'nope', but the columns are 'id', 'review'" in completed.err
    for option in ("--null-threshold=1", f"--squad={table}"):
        inputs = () if option.startswith("--squad") else ("--input", table)
        completed = run_cli("predict", classifier, option, *inputs)
        assert completed.status == 2
        assert "only for question answering" in completed.err


def test_predict_reads_a_table_as_lines_only_if_requested(
    run_cli: RunCli, classifier: Path, tmp_path: Path
) -> None:
    """A .txt file that looks like a table is rejected unless --format lines is given."""
    for name, content in (
        ("a.txt", "id\tline\n1\tthe anvil\n"),
        ("b.txt", '{"line": "the anvil"}\n'),
    ):
        file = tmp_path / name
        file.write_text(content)
        from_file = run_cli("predict", classifier, "--input", file)
        from_stdin = run_cli("predict", classifier, "--input", "-", stdin=content.encode())
        for completed in (from_file, from_stdin):
            assert (completed.status, completed.out) == (2, "")
            assert "looks like" in completed.err
        completed = run_cli("predict", classifier, "--input", file, "--format", "lines")
        assert len(completed.out.splitlines()) == len(content.splitlines())
    # With a column name, a .txt file is a table, as in fine-tuning.
    completed = run_cli("predict", classifier, "--input", tmp_path / "a.txt", "--text", "line")
    assert completed.out.splitlines()[0] == "id\tline\tlabel\tprobability"


def test_options_without_effect_are_errors(
    run_cli: RunCli, classifier: Path, tmp_path: Path
) -> None:
    """Table options for texts or lines, and CoNLL for a classifier, are rejected."""
    file = tmp_path / "a.txt"
    file.write_text("the anvil\n")
    for options in (["--out", tmp_path / "o.csv"], ["--text", "a"], ["--delimiter", ";"]):
        completed = run_cli("predict", classifier, "the anvil", *options)
        assert completed.status == 2
        assert "only valid with --input FILE" in completed.err
    for options in (["--pair", "a"], ["--no-header"]):
        completed = run_cli("predict", classifier, "--input", file, *options)
        assert completed.status == 2
        assert "read as one text per line" in completed.err
    completed = run_cli("predict", classifier, "--input", file, "--format", "conll")
    assert completed.status == 2
    assert "this model is not a tagger" in completed.err
    (tmp_path / "t.jsonl").write_text('{"line": "the anvil"}\n')
    pq.write_table(pa.table({"line": ["the anvil"]}), tmp_path / "t.parquet")
    for name, option in (
        ("t.jsonl", "--delimiter=;"), ("t.jsonl", "--header"), ("t.parquet", "--encoding=cp949"),
    ):  # fmt: skip
        completed = run_cli("predict", classifier, "--input", tmp_path / name, "--json", option)
        assert completed.status == 2
        assert f"{option.partition('=')[0]}: no effect on {tmp_path / name}" in completed.err


def test_tagger_reads_its_training_format(
    run_cli: RunCli, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Token lists are read from the column of the training data, also from standard input.

    Options that do not apply to tagged sentences are errors.
    """
    head = HeadConfig("entities", ("O", "B-X", "I-X"))
    task = {"text_column": "words", "label_column": "tags"}
    tagger = tmp_path / "m"
    save_fine_tuned(
        tagger,
        head.build_model(small_config(tokenizer)),
        tokenizer,
        head,
        {"provenance": {"task": task}},
    )
    rows = tmp_path / "t.jsonl"
    rows.write_text('{"words": ["the", "ferry"]}\n')
    completed = run_cli("predict", tagger, "--input", rows)
    assert completed.status == 0, completed.err
    assert len(json.loads(completed.out)["tags"]) == 2
    from_stdin = run_cli(
        "predict", tagger, "--input", "-", "--format", "jsonl", stdin=rows.read_bytes()
    )
    assert from_stdin.out == completed.out
    rows.write_text('{"line": "the ferry"}\n')
    completed = run_cli("predict", tagger, "--input", rows, "--text", "line")
    assert "entities" in json.loads(completed.out)
    (tmp_path / "c.conll").write_text("the\nferry\n")
    for option in ("--pair=a", "--endings=a,b", "--delimiter=;", "--no-header"):
        completed = run_cli("predict", tagger, "--input", tmp_path / "c.conll", option)
        assert completed.status == 2
        assert "no effect on" in completed.err
        assert "read as conll" in completed.err


def test_tagger_reads_all_formats(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """CoNLL is recognized or requested; token lists, a text column and plain lines work too."""
    conll = tmp_path / "c.txt"
    tagger = tmp_path / "run"
    conll.write_text("the DT O\nferry NN B-X\n\nriver NN O\n" * 12)
    values = {"task": {"label_column": "2"}, "schedule": {"steps": 1}, "run": {"threads": 1}}
    finetune("tag", model, tagger, data=conll, values=values)
    completed = run_cli("predict", tagger, "--input", conll)
    assert completed.status == 0, completed.err
    # Three columns and the predicted tag; an empty line ends the first sentence.
    assert [len(line.split()) for line in completed.out.splitlines()[:4]] == [4, 4, 0, 4]
    assert "read as CoNLL" in completed.err
    from_stdin = run_cli(
        "predict", tagger, "--input", "-", "--format", "conll", stdin=conll.read_bytes()
    )
    assert from_stdin.out == completed.out
    first_line = run_cli("predict", tagger, "--input", conll, "--json").out.splitlines()[0]
    sentence = json.loads(first_line)
    assert sentence["tokens"] == ["the", "ferry"]
    (tmp_path / "t.jsonl").write_text('{"tokens": ["the", "ferry"]}\n')
    row = json.loads(run_cli("predict", tagger, "--input", tmp_path / "t.jsonl").out)
    assert row["tags"] == sentence["tags"]
    (tmp_path / "t.csv").write_text("n,text\n1,the ferry\n")
    completed = run_cli("predict", tagger, "--input", tmp_path / "t.csv", "--text", "text")
    assert completed.out.splitlines()[0] == "n,text,entities"
    (tmp_path / "p.txt").write_text("the ferry crossed\nnobody\n")
    completed = run_cli("predict", tagger, "--input", tmp_path / "p.txt")
    assert len(completed.out.splitlines()) == 2


def test_typed_line_is_predicted_at_once(
    run_cli: RunCli, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, the first prediction is printed before the second line is read."""
    stdout_after_first_line: list[str] = []
    stdout = io.StringIO()

    def read_typed_lines(*_: str) -> Iterator[str]:
        yield "the anvil"
        stdout_after_first_line.append(stdout.getvalue())
        yield "the river"

    monkeypatch.setattr("bertsmith.cli.model_options.read_lines", read_typed_lines)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run_cli("predict", classifier, "--input", "-", stdin_is_terminal=True).status == 0
    assert stdout_after_first_line[0].endswith("\tthe anvil\n")


def test_pair_classifier_needs_a_tab(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """A model for text pairs rejects a line without a tab."""
    rows = [f"the anvil {n},rings,{n % 2}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    task = {"text_column": "a", "pair_column": "b", "batch_size": 8}
    values = {"task": task, "schedule": {"steps": 1}, "run": {"threads": 1}}
    finetune("classify", model, tmp_path / "run", data=tmp_path / "t.csv", values=values)
    completed = run_cli("predict", tmp_path / "run", "the anvil\trings", "the anvil", "--json")
    assert completed.status == 2
    assert "text 2: " in completed.err
    assert "no tab" in completed.err
    prediction = json.loads(completed.out)
    assert (prediction["text"], prediction["pair"]) == ("the anvil", "rings")


def test_multi_label_predictions_are_sorted_by_probability(
    run_cli: RunCli, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Labels with a probability above one half are printed, the most probable first."""
    head = HeadConfig("multi", ("a", "b", "c"))
    model = head.build_model(small_config(tokenizer))
    with torch.no_grad():
        model.get_parameter("output.weight").zero_()
        model.get_parameter("output.bias").copy_(torch.tensor([1.0, -1.0, 2.0]))
    save_fine_tuned(tmp_path / "m", model, tokenizer, head, {})
    # The sigmoid of 2.0 is 0.8808, and that of 1.0 is 0.7311.
    assert run_cli("predict", tmp_path / "m", "an anvil").out == "c|a\t0.8808|0.7311\tan anvil\n"
    strict = run_cli("predict", tmp_path / "m", "an anvil", "--threshold", "0.8")
    assert strict.out == "c\t0.8808\tan anvil\n"
    (tmp_path / "t.csv").write_text("text\nan anvil\n")
    table = run_cli("predict", tmp_path / "m", "--input", tmp_path / "t.csv", "--threshold", "0.2")
    assert table.out.splitlines()[1] == "an anvil,c|a|b,0.880797|0.731059|0.268941"
    invalid = run_cli("predict", tmp_path / "m", "an anvil", "--threshold", "1")
    assert (invalid.status, invalid.out) == (2, "")
    assert "'--threshold': 1 is not between 0 and 1" in invalid.err


def test_threshold_needs_a_model_with_several_labels(run_cli: RunCli, classifier: Path) -> None:
    """A model with one label per text has no threshold."""
    completed = run_cli("predict", classifier, "the anvil", "--threshold", "0.3")
    assert completed.status == 2
    assert "--threshold): only for several labels per text" in completed.err


def test_truncated_texts_are_counted(run_cli: RunCli, classifier: Path, tmp_path: Path) -> None:
    """Truncated texts are predicted, and counted on stderr."""
    (tmp_path / "long.txt").write_text("the anvil rings\n" + "the river sleeps " * 200 + "\n")
    completed = run_cli("predict", classifier, "--input", tmp_path / "long.txt")
    assert len(completed.out.splitlines()) == 2
    assert "truncated to the model's maximum length: 1" in completed.err
    assert "truncated" not in run_cli("predict", classifier, "the anvil rings").err


def test_empty_standard_input_is_reported(run_cli: RunCli, classifier: Path) -> None:
    """Empty input is not an error, but a message says that there is nothing to do."""
    completed = run_cli("predict", classifier / "model", "--input", "-", stdin=b"")
    assert (completed.status, completed.out) == (0, "")
    assert completed.err == "standard input: empty input; nothing to do\n"
