"""The command ``lab panel``: plan, table, JSON and invalid arguments."""

import json
from pathlib import Path

import pytest

from bertsmith.lab.panel import cost
from bertsmith.runtime import device
from tests.cli.conftest import RunCli
from tests.lab.panel.conftest import SENTENCES, write_model


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
    assert "held-out\t2\t" in completed.out
    assert "2 results to compute: about" in completed.out
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to compare the models on: add --data FOLDER, --text FILE or"),
        (("--tasks", "sst2"), "--tasks: unknown task 'sst2'; expected: english"),
        (("--tasks", "rte"), "rte needs labeled data, but --data is missing; pass --data FOLDER"),
        (("--tasks", "rte", "--lr", "0"), "--lr is 0; give a number above 0"),
        (("--data", "."), "add SST-2/train.tsv and SST-2/dev.tsv, or leave sst-2-1k out with"),
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
