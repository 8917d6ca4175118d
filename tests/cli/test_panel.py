"""The command ``lab panel``: plan, table, JSON and invalid arguments."""

import json
import sys
from pathlib import Path

import pytest

from bertsmith.lab.panel import cost
from bertsmith.runtime import device
from tests.cli.conftest import RunCli
from tests.lab.panel.conftest import SENTENCES, write_model, write_table


@pytest.fixture(autouse=True)
def skip_speed_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use constant speeds instead of measuring them."""
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)
    monkeypatch.setattr(cost, "measure_forward_seconds", lambda *_: 0.01)


def test_panel_is_planned_run_and_reused(run_cli: RunCli, tmp_path: Path) -> None:
    """--plan prints minutes and computes nothing; a run prints them, the table and the files."""
    write_model(tmp_path / "model-a", 1)
    (tmp_path / "text.txt").write_text("".join(f"{text}.\n" for text in SENTENCES))
    options = (tmp_path / "model-a", "--text", tmp_path / "text.txt", "--out", tmp_path / "out")
    completed = run_cli("lab", "panel", *options, "--plan")
    assert completed.status == 0, completed.err
    lines = completed.out.splitlines()
    assert lines[0].startswith("held-out: 2 results, about ")
    assert lines[1].startswith("2 results to compute: about ")
    plan = json.loads(run_cli("lab", "panel", *options, "--plan", "--json").out)
    assert plan["tasks"][0]["results"] == 2
    assert not (tmp_path / "out" / "results.jsonl").exists()
    completed = run_cli("lab", "panel", *options)
    assert completed.status == 0, completed.err
    assert "held-out: 2 results, about" in completed.err
    assert "| held-out bits per character |" in completed.out
    assert f"wrote {tmp_path / 'out' / 'panel.md'}" in completed.err
    assert "all results exist already" in run_cli("lab", "panel", *options, "--plan").out
    data = json.loads(run_cli("lab", "panel", *options, "--json").out)
    assert data["results"]["model-a"]["held-out"]["mlm_loss"]["mean"] > 0


def test_default_tasks_are_those_with_a_folder(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --tasks, tasks without a folder are left out and named; with it, they are errors."""
    monkeypatch.setattr(cost, "measure_step_seconds", lambda *_, **__: 0.01)
    write_model(tmp_path / "model-a", 1)
    rows = [(str(number), text, text, "entailment") for number, text in enumerate(SENTENCES)]
    write_table(tmp_path / "RTE", ("index", "sentence1", "sentence2", "label"), rows)
    options = (tmp_path / "model-a", "--data", tmp_path, "--out", tmp_path / "out", "--plan")
    completed = run_cli("lab", "panel", *options, "--json")
    assert completed.status == 0, completed.err
    assert [task["name"] for task in json.loads(completed.out)["tasks"]] == ["rte"]
    assert (
        "has no folder for them: sst-2-1k, sst-2-10k, cola, mrpc, sts-b, conll2003, probe\n"
        in completed.err
    )
    completed = run_cli("lab", "panel", *options, "--tasks", "english")
    assert completed.status == 2
    assert "no folder SST-2 or glue/SST-2 for sst-2-1k" in completed.err


def test_probe_is_left_out_without_scikit_learn(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scikit-learn, the probe is left out by default; in --tasks, it is an error."""
    monkeypatch.setattr(cost, "measure_step_seconds", lambda *_, **__: 0.01)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    write_model(tmp_path / "model-a", 1)
    rows = [(text, str(number % 2)) for number, text in enumerate(SENTENCES)]
    write_table(tmp_path / "SST-2", ("sentence", "label"), rows)
    options = (tmp_path / "model-a", "--data", tmp_path, "--out", tmp_path / "out", "--plan")
    completed = run_cli("lab", "panel", *options, "--json")
    assert completed.status == 0, completed.err
    names = [task["name"] for task in json.loads(completed.out)["tasks"]]
    assert names == ["sst-2-1k", "sst-2-10k"]
    assert "left out, because scikit-learn is not installed (the extra lab): probe" in completed.err
    completed = run_cli("lab", "panel", *options, "--tasks", "probe")
    assert completed.status != 0
    assert "bertsmith[lab]" in completed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to compare the models on: add --data FOLDER, --text FILE or"),
        (("--tasks", "sst2"), "--tasks: unknown task 'sst2'; expected: english"),
        (("--tasks", "rte"), "rte needs labeled data, but --data is missing; pass --data FOLDER"),
        (("--tasks", "rte", "--text", "t.txt"), "--text: no effect, because --tasks does not"),
        (("--tasks", "rte", "--lr", "0"), "--lr is 0; give a finite number above 0"),
        (("--tasks", "rte", "--lr", "nan"), "--lr is nan; give a finite number above 0"),
        (("--tasks", "rte", "--lr", "inf"), "--lr is inf; give a finite number above 0"),
        (
            ("--data", "."),
            "--data .: no folder of a task (SST-2, CoLA, MRPC, RTE, STS-B, conll2003)",
        ),
    ],
)
def test_invalid_arguments_are_errors(
    run_cli: RunCli, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    """Invalid arguments exit with 2 and write nothing."""
    write_model(tmp_path / "model-a", 1)
    out = tmp_path / "out"
    completed = run_cli("lab", "panel", tmp_path / "model-a", *options, "--out", out)
    assert completed.status == 2
    assert message in completed.err
    assert not out.exists()
