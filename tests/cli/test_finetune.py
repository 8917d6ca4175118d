"""The verbs of fine-tuning on the command line."""

import io
import json
import math
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.bundle import INFO_FILE, WEIGHTS_FILE, HeadConfig, save_fine_tuned
from bertsmith.cli.console import print_json
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.finetuning.finetune import FinetuneResult, finetune
from bertsmith.train.finetuning.sweep import SweepResult

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small table of two classes."""
    file = tmp_path_factory.mktemp("table") / "train.csv"
    kinds = (("the anvil rings", "loud"), ("the river sleeps", "still"))
    rows = [f"{kinds[n % 2][0]} {n},{kinds[n % 2][1]}" for n in range(24)]
    file.write_text("\n".join(["line,mood", *rows]) + "\n")
    return file


@pytest.fixture(scope="module")
def tuned(model: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on that table."""
    run = tmp_path_factory.mktemp("tuned") / "run"
    task = {"text": "line", "label": "mood", "batch": 8}
    finetune("classify", model, run, data=table, values={"task": task, "run": {"threads": 1}})
    return run


def test_finetune_tells_what_it_did(run: Run, model: Path, table: Path, tmp_path: Path) -> None:
    """Held-out scores and the counts of rows on stdout, the next command on stderr."""
    out = tmp_path / "run"
    done = run(
        "finetune", "classify", "--model", model, "--data", table, "--text", "line",
        "--label", "mood", "--epochs", 1, "--batch", 8, "--set", "run.threads=1", "--out", out,
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "train: 24 read, 24 used, 0 skipped, 0 cut off" in done.out
    assert "held out (2 examples): accuracy" in done.out
    assert f"next: bertsmith predict {out / 'model'}" in done.err


def test_inspect_shows_a_run_and_its_model(run: Run, tuned: Path) -> None:
    """The loss of a fine-tuning, and the head that it made; a masked LM is not there any more."""
    done = run("inspect", tuned)
    assert done.status == 0, done.err
    assert "held out" in done.out
    assert "accuracy" in done.out
    shown = run("inspect", tuned / "model")
    assert "on top: fine-tuned (single)" in shown.out
    assert "next: bertsmith predict" in shown.err
    assert "masked LM" not in shown.out.splitlines()[1]


def test_endings_are_columns(run: Run, model: Path, tmp_path: Path) -> None:
    """Multiple choice from a table of one's own, and then a prompt with its endings."""
    rows = [f"the anvil {n},rings,sleeps,{n % 2}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["line,a,b,right", *rows]) + "\n")
    done = run(
        "finetune", "choose", "--model", model, "--data", tmp_path / "t.csv", "--text", "line",
        "--endings", "a,b", "--label", "right", "--epochs", 1, "--batch", 8,
        "--set", "run.threads=1", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "train: 20 read, 20 used, 0 skipped, 0 cut off" in done.out
    done = run("predict", tmp_path / "run", "the anvil\trings\tsleeps", "--json")
    told = json.loads(done.out)
    assert told["endings"] == ["rings", "sleeps"]
    assert sum(told["probabilities"]) == pytest.approx(1)
    assert told["probabilities"][told["best"]] == max(told["probabilities"])
    assert told["ending"] == ["rings", "sleeps"][told["best"]]
    assert told["column"] == ["a", "b"][told["best"]]
    line = run("predict", tmp_path / "run", "the anvil\trings\tsleeps").out
    best, share = told["best"], max(told["probabilities"])
    assert line == f"{best}\t{share:.4f}\t{told['ending']}\tthe anvil\trings\tsleeps\n"


def test_predict_tells_labels(run: Run, tuned: Path) -> None:
    """A line a text: label, probability, text; as JSON all labels. A tab is part of the text."""
    done = run("predict", tuned, "the anvil rings", "the river\tsleeps")
    label, share, text = done.out.splitlines()[0].split("\t")
    assert label in {"loud", "still"}
    assert 0.5 <= float(share) <= 1.0
    assert text == "the anvil rings"
    lines = run("predict", tuned, "--json", "a\tb").out.splitlines()
    told = json.loads(lines[0])
    assert (told["text"], told.get("pair")) == ("a\tb", None)
    assert sum(told["labels"].values()) == pytest.approx(1)


def test_predict_reads_a_file(run: Run, tuned: Path, tmp_path: Path) -> None:
    """A text a line; an empty one is an error after the answers before it, or a counted skip."""
    texts = tmp_path / "texts"
    texts.write_text("the anvil\nthe river\n")
    whole = run("predict", tuned, "--input", texts).out.splitlines()
    assert len(whole) == 2
    texts.write_text("the anvil\n\nthe river\n \n")
    done = run("predict", tuned, "--input", texts)
    assert (done.status, done.out.splitlines()) == (2, whole[:1])
    assert f"{texts}, line 2 is empty" in done.err
    assert "--skip-bad" in done.err
    done = run("predict", tuned, "--input", texts, "--skip-bad")
    assert (done.status, done.out.splitlines()) == (0, whole)
    assert f"left out 2 lines; the first: {texts}, line 2 is empty" in done.err


def test_predict_reads_a_table_by_its_column(run: Run, tuned: Path, tmp_path: Path) -> None:
    """The column of the training table, or another; the table goes to a file or to stdout."""
    table, out = tmp_path / "t.csv", tmp_path / "out.csv"
    table.write_text('id,line\n1,"the anvil, rings"\n2,the river\n')
    done = run("predict", tuned, "--input", table, "--out", out)
    assert (done.status, done.out) == (0, ""), done.err
    assert f"wrote {out}: 2 rows, with label, probability" in done.err
    shown = run("predict", tuned, "--input", table)
    assert shown.out == out.read_text()
    assert shown.out.splitlines()[0] == "id,line,label,probability"
    assert shown.out.splitlines()[1].startswith('1,"the anvil, rings",')
    done = run("predict", tuned, "--input", "-", "--format", "csv", "--json",
               stdin=table.read_bytes())  # fmt: skip
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [row["id"] for row in found] == ["1", "2"]
    told = json.loads(
        run("predict", tuned, "--input", table, "--out", tmp_path / "o.jsonl", "--json").out
    )
    assert told["rows"] == 2
    assert told["columns"] == ["label", "probability"]
    table.write_text("id,review\n1,the anvil\n")
    done = run("predict", tuned, "--input", table)
    assert (done.status, "name it with --text" in done.err) == (2, True)
    assert run("predict", tuned, "--input", table, "--text", "review").status == 0


def test_a_table_is_never_read_as_lines(run: Run, tuned: Path, tmp_path: Path) -> None:
    """Where the suffix does not tell: its first line, or JSON; --format insists on lines."""
    for name, content in (
        ("a.txt", "id\tline\n1\tthe anvil\n"),
        ("b.txt", '{"line": "the anvil"}\n'),
    ):
        (tmp_path / name).write_text(content)
        done = run("predict", tuned, "--input", tmp_path / name)
        assert (done.status, done.out, "looks like" in done.err) == (2, "", True)
        done = run("predict", tuned, "--input", "-", stdin=content.encode())
        assert (done.status, done.out, "looks like" in done.err) == (2, "", True)
        done = run("predict", tuned, "--input", tmp_path / name, "--format", "lines")
        assert len(done.out.splitlines()) == len(content.splitlines())
    # A .txt with a column named is the table that fine-tuning reads.
    done = run("predict", tuned, "--input", tmp_path / "a.txt", "--text", "line")
    assert done.out.splitlines()[0] == "id\tline\tlabel\tprobability"


def test_options_of_tables_need_one(run: Run, tuned: Path, tmp_path: Path) -> None:
    """Nothing that is said is passed over in silence."""
    (tmp_path / "a.txt").write_text("the anvil\n")
    for given in (["--out", tmp_path / "o.csv"], ["--text", "a"], ["--delimiter", ";"]):
        done = run("predict", tuned, "the anvil", *given)
        assert (done.status, "it is for --input FILE" in done.err) == (2, True)
    for given in (["--out", tmp_path / "o.csv"], ["--pair", "a"], ["--no-header"]):
        done = run("predict", tuned, "--input", tmp_path / "a.txt", *given)
        assert (done.status, "read as a text on each line" in done.err) == (2, True)
    done = run("predict", tuned, "--input", tmp_path / "a.txt", "--format", "conll")
    assert (done.status, "the model tags no words" in done.err) == (2, True)


def test_a_tagger_reads_what_it_learnt_from(run: Run, model: Path, tmp_path: Path) -> None:
    """CoNLL by its look, or by --format; JSON lines of tokens; a column of texts; plain lines."""
    conll = tmp_path / "c.txt"
    conll.write_text("the DT O\nferry NN B-X\n\nriver NN O\n" * 12)
    values = {"task": {"label": "2"}, "schedule": {"steps": 1}, "run": {"threads": 1}}
    finetune("tag", model, tmp_path / "run", data=conll, values=values)
    done = run("predict", tmp_path / "run", "--input", conll)
    assert done.status == 0, done.err
    assert [len(line.split()) for line in done.out.splitlines()[:4]] == [4, 4, 0, 4]
    assert "read as CoNLL" in done.err
    same = run("predict", tmp_path / "run", "--input", "-", "--format", "conll",
               stdin=conll.read_bytes())  # fmt: skip
    assert same.out == done.out
    as_json = run("predict", tmp_path / "run", "--input", conll, "--json").out.splitlines()
    assert json.loads(as_json[0])["tokens"] == ["the", "ferry"]
    (tmp_path / "t.jsonl").write_text('{"tokens": ["the", "ferry"]}\n')
    tokens = json.loads(run("predict", tmp_path / "run", "--input", tmp_path / "t.jsonl").out)
    assert tokens["tags"] == json.loads(as_json[0])["tags"]
    (tmp_path / "t.csv").write_text("n,text\n1,the ferry\n")
    done = run("predict", tmp_path / "run", "--input", tmp_path / "t.csv", "--text", "text")
    assert done.out.splitlines()[0] == "n,text,entities"
    (tmp_path / "p.txt").write_text("the ferry crossed\nnobody\n")
    assert (
        len(run("predict", tmp_path / "run", "--input", tmp_path / "p.txt").out.splitlines()) == 2
    )


def test_a_terminal_is_answered_at_once(
    run: Run, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line's answer is there before the second line is read."""
    done: list[str] = []
    written = io.StringIO()

    def typed(*_: str) -> Iterator[str]:
        yield "the anvil"
        done.append(written.getvalue())
        yield "the river"

    monkeypatch.setattr("bertsmith.cli.model_options.read_lines", typed)
    monkeypatch.setattr(sys, "stdout", written)
    assert run("predict", tuned, "--input", "-", terminal=True).status == 0
    assert done[0].endswith("\tthe anvil\n")


def test_a_model_for_pairs_refuses_a_line_without_a_tab(
    run: Run, model: Path, tmp_path: Path
) -> None:
    """One text of a pair is no question to it; two are."""
    rows = [f"the anvil {n},rings,{n % 2}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    task = {"text": "a", "pair": "b", "batch": 8}
    values = {"task": task, "schedule": {"steps": 1}, "run": {"threads": 1}}
    finetune("classify", model, tmp_path / "run", data=tmp_path / "t.csv", values=values)
    done = run("predict", tmp_path / "run", "the anvil\trings", "the anvil", "--json")
    assert done.status == 2
    assert "text 2: there is no tab" in done.err
    told = json.loads(done.out)
    assert (told["text"], told["pair"]) == ("the anvil", "rings")


def test_evaluate_knows_the_columns(run: Run, tuned: Path, table: Path) -> None:
    """Those of the training table; metrics and counts as JSON."""
    told = json.loads(run("evaluate", tuned, "--data", table, "--json").out)
    assert 0 <= told["accuracy"] <= 1
    counts = {"read": 24, "used": 24, "cut_off": 0, "skipped": {}, "unknown_share": 0.0}
    assert told["counts"] == counts
    assert sum(scores["support"] for scores in told["classes"].values()) == 24
    assert list(told["confusion"]) == list(told["classes"]) == ["loud", "still"]
    lines = run("evaluate", tuned, "--data", table).out.splitlines()
    assert lines[3].split() == ["label", "precision", "recall", "f1", "support"]
    assert "rows: right labels, columns: predicted labels" in lines


def test_metrics_are_chosen_on_the_command_line(
    run: Run, model: Path, tuned: Path, table: Path, tmp_path: Path
) -> None:
    """--metric may be repeated; they are told in their order, and an unknown one is refused."""
    done = run("evaluate", tuned, "--data", table, "--metric", "roc_auc", "--metric", "f1:loud")
    assert re.match(r"roc_auc [01]\.\d{4}, f1:loud [01]\.\d{4}\n", done.out)
    own = ["finetune", "classify", "--model", model, "--data", table, "--text", "line", "--label",
           "mood", "--epochs", 1, "--set", "run.threads=1", "--out", tmp_path / "run"]  # fmt: skip
    done = run(*own, "--metric", "nope")
    assert (done.status, "'nope' is not a metric of the kind 'single'" in done.err) == (2, True)
    done = run(*own, "--metric", "f1:still", "--metric", "matthews")
    assert "held out (2 examples): f1:still " in done.out


def test_several_labels_come_with_their_probabilities(
    run: Run, words: Tokenizer, tmp_path: Path
) -> None:
    """Those above one half, in the order of their probabilities, which the JSON has too."""
    config = ModelConfig(vocab_size=words.vocab_size, layers=1, width=22, heads=2, feed_forward=31,
                         max_positions=43)  # fmt: skip
    head = HeadConfig("multi", ("a", "b", "c"))
    model = head.build_model(config)
    with torch.no_grad():
        model.get_parameter("output.weight").zero_()
        model.get_parameter("output.bias").copy_(torch.tensor([1.0, -1.0, 2.0]))
    save_fine_tuned(tmp_path / "m", model, words, head, {})
    assert run("predict", tmp_path / "m", "an anvil").out == "c|a\t0.8808|0.7311\tan anvil\n"


def test_a_classifier_of_others_is_evaluated(run: Run, words: Tokenizer, tmp_path: Path) -> None:
    """It says nothing of columns: they are named, and so is that there is no header."""
    config = ModelConfig(vocab_size=words.vocab_size, layers=1, width=22, heads=2, feed_forward=31,
                         max_positions=43)  # fmt: skip
    head = HeadConfig("single", ("loud", "still"))
    save_fine_tuned(tmp_path / "m", head.build_model(config), words, head, {})
    (tmp_path / "m" / INFO_FILE).unlink()
    (tmp_path / "t.csv").write_text("id,line,other,mood\n1,the anvil,rings,loud\n")
    given = ("evaluate", tmp_path / "m", "--data", tmp_path / "t.csv", "--json")
    done = run(*given, "--text", "line", "--pair", "other", "--label", "mood")
    assert done.status == 0, done.err
    assert json.loads(done.out)["counts"]["used"] == 1
    assert "no column 'text'" in run(*given).err
    (tmp_path / "t.csv").write_text("the anvil,loud\n")
    done = run(*given, "--text", "0", "--label", "1", "--set", "task.header=false")
    assert json.loads(done.out)["counts"]["used"] == 1
    done = run(*given, "--set", "optim.lr=1.0")
    assert (done.status, "takes settings of the task" in done.err) == (2, True)
    done = run(*given, "--set", "task.batch=3")
    assert (done.status, "task.batch: evaluating does not read it" in done.err) == (2, True)


def test_json_on_stdout_knows_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """A correlation with a constant is null there, so that any reader takes the line."""
    print_json({"spearman": math.nan, "all": [1.5, -math.inf]})
    assert capsys.readouterr().out == '{"spearman": null, "all": [1.5, null]}\n'


def test_what_is_cut_off_is_told(run: Run, tuned: Path, tmp_path: Path) -> None:
    """On stderr, beside the answers."""
    (tmp_path / "long.txt").write_text("the anvil rings\n" + "the river sleeps " * 200 + "\n")
    done = run("predict", tuned, "--input", tmp_path / "long.txt")
    assert len(done.out.splitlines()) == 2
    assert "cut off 1 that are longer than the model reads" in done.err
    assert "cut off" not in run("predict", tuned, "the anvil rings").err


def test_what_is_skipped_has_a_place(run: Run, tuned: Path, model: Path, tmp_path: Path) -> None:
    """The first of each kind, by evaluate and by finetune; several runs tell their counts."""
    file, out = tmp_path / "a.csv", tmp_path / "runs"
    rows = [f"the {'anvil' if n % 2 else 'river'} {n},{'loud' if n % 2 else 'still'}"
            for n in range(24)]  # fmt: skip
    file.write_text("\n".join(["line,mood", "the anvil,", *rows]) + "\n")
    done = run("evaluate", tuned, "--data", file, "--skip-bad")
    place = f"an empty label (the first: {file}, line 2)"
    assert "25 read, 24 used, 1 skipped" in done.out
    assert place in done.err
    done = run(
        "finetune", "classify", "--model", model, "--data", file, "--text", "line", "--label",
        "mood", "--epochs", 1, "--set", "run.threads=1", "--skip-bad", "--seeds", 2, "--json",
        "--out", out,
    )  # fmt: skip
    assert place in done.err
    told = json.loads(done.out)
    assert told["counts"]["train"]["skipped"] == {"an empty label": 1}
    [only] = told["settings"]
    assert only["least"] <= only["median"] <= only["greatest"]
    shown = run("inspect", out).out
    assert f"runs {out}: 2, all finished\n\nthe best one by accuracy: {told['best']}" in shown
    assert f"median and range: {only['median']:.4f}" in shown
    results = (out / "results.json").read_text()
    (out / "results.json").write_text(re.sub('"accuracy": [0-9.]+', '"accuracy": null', results))
    assert "seed-1  nan" in run("inspect", out).out
    shutil.copytree(out / "seed-1", out / "seed-2")
    assert "3 of 3 begun are finished: the same command goes on" in run("inspect", out).out
    (out / "results.json").unlink()
    shutil.rmtree(out / "seed-1" / "model")
    assert "2 of 3 begun are finished" in run("inspect", out).out
    for broken in ("{}", '{"metric": "f1", "best": "seed-0", "settings": [{"runs": {}}]}'):
        (out / "results.json").write_text(broken)
        assert "results.json: it is broken" in run("inspect", out).err


def test_several_that_are_stopped_say_where(
    run: Run, model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON too: which run, after how many of its steps; and the status of the signal."""
    at = FinetuneResult(tmp_path / "seed-1", None, signal.SIGTERM, 3, 9, ["accuracy"], {}, {}, 1.0)
    whole = SweepResult(tmp_path, [], None, None, at)
    monkeypatch.setattr("bertsmith.train.finetuning.sweep.run_sweep", lambda *_, **__: whole)
    done = run("finetune", "classify", "--model", model, "--data", table, "--seeds", 2, "--json",
               "--out", tmp_path / "runs")  # fmt: skip
    assert done.status == 128 + signal.SIGTERM
    told = json.loads(done.out)
    assert (told["run"], told["step"], told["steps"]) == (str(tmp_path / "seed-1"), 3, 9)
    assert "stopped after step 3 of 9" in done.err


def test_a_model_that_is_gone_is_written_again(run: Run, model: Path, table: Path,
                                               tmp_path: Path) -> None:  # fmt: skip
    """The same command makes it anew from the last checkpoint, to the byte."""
    own = ["finetune", "classify", "--model", model, "--data", table, "--text", "line", "--label",
           "mood", "--epochs", 1, "--set", "run.threads=1", "--out", tmp_path / "run"]  # fmt: skip
    assert run(*own).status == 0
    weights = tmp_path / "run" / "model" / WEIGHTS_FILE
    before = weights.read_bytes()
    shutil.rmtree(tmp_path / "run" / "model")
    assert run(*own).status == 0
    assert weights.read_bytes() == before


def test_a_place_where_nothing_can_stand(run: Run, model: Path, table: Path) -> None:
    """Known before anything is read; what only the system knows is no traceback either."""
    own = ["finetune", "classify", "--model", model, "--data", table, "--text", "line", "--label",
           "mood", "--out"]  # fmt: skip
    done = run(*own, table / "run")
    assert done.status == 2
    assert f"{table / 'run'}: {table}: this is a file; give --out another place" in done.err
    done = run(*own, "/proc/bertsmith")
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("error: /proc/bertsmith")


def test_mistakes_are_told(run: Run, model: Path, table: Path, tmp_path: Path) -> None:
    """A missing column, a model that is not fine-tuned, no text: status 2, nothing written."""
    done = run(
        "finetune", "classify", "--model", model, "--data", table, "--text", "words",
        "--label", "mood", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.status == 2
    assert "line 2: there is no column 'words'; the columns are 'line', 'mood'" in done.err
    done = run(
        "finetune", "classify", "--model", model, "--data", table, "--text", "mood",
        "--label", "mood", "--out", tmp_path / "run",
    )  # fmt: skip
    assert "task: the column 'mood' is both text and label" in done.err
    assert not (tmp_path / "run").exists()
    done = run("predict", model, "a text")
    assert done.status == 2
    assert "not fine-tuned on a task" in done.err
    assert run("predict", model).status == 2


def test_a_file_without_a_line_is_told(run: Run, tuned: Path) -> None:
    """No answer is no error, but a word is said of it."""
    done = run("predict", tuned / "model", "--input", "-", stdin=b"")
    assert (done.status, done.out) == (0, "")
    assert done.err == "standard input: there is no line in it, so there is nothing to do\n"


def _squad(path: Path, count: int) -> None:
    questions = [
        {"id": f"q{n}", "question": "who?", "answers": [{"text": "Ann", "answer_start": 0}]}
        for n in range(count)
    ]
    articles = [
        {"title": f"t{n}", "paragraphs": [{"context": f"Ann sang {n}.", "qas": [question]}]}
        for n, question in enumerate(questions)
    ]
    path.write_text(json.dumps({"version": "1.1", "data": articles}))


def test_squad_takes_a_folder_or_a_file(run: Run, model: Path, tmp_path: Path) -> None:
    """``finetune squad`` and ``evaluate`` take the folder or a file, and name what they expect."""
    common = ("--model", model, "--epochs", 1, "--batch", 8, "--length", 16,
              "--set", "run.threads=1", "--set", "task.max_question_length=4")  # fmt: skip
    folder = tmp_path / "squad"
    folder.mkdir()
    missing = run("finetune", "squad", *common, "--data", folder, "--out", tmp_path / "run")
    assert missing.status == 2
    expected = "squad expects a folder with train-v1.1.json and dev-v1.1.json, or its training file"
    assert expected in missing.err
    _squad(folder / "train-v1.1.json", 12)
    done = run("finetune", "squad", *common, "--data", folder / "train-v1.1.json",
               "--out", tmp_path / "run")  # fmt: skip
    assert done.status == 0, done.err
    assert r"$'QUESTION\tCONTEXT'" in done.err
    missing = run("evaluate", tmp_path / "run", "--data", folder)
    assert missing.status == 2
    assert expected in missing.err
    _squad(folder / "dev-v1.1.json", 3)
    of_folder = run("evaluate", tmp_path / "run", "--data", folder)
    assert of_folder.status == 0, of_folder.err
    of_file = run("evaluate", tmp_path / "run", "--data", folder / "dev-v1.1.json")
    assert of_folder.out == of_file.out
