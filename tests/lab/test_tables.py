"""Tests of the cells, tables and figures of reports, and of replacing existing reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bertsmith.errors import RunError
from bertsmith.files import write_json
from bertsmith.lab.experiment import Results
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import EXPERIMENTS, vocabulary
from bertsmith.lab.report import Panel, Table, _arrange_panels, format_mean_std, make_line_plot
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import StageFactory
from tests.lab.helpers import TWO_DOCUMENTS, RecordingProgress


def test_complete_report_is_not_replaced_by_an_incomplete_one(tmp_path: Path) -> None:
    """A complete report is replaced only if its results still exist or its JSON is damaged."""
    progress = RecordingProgress()

    def make_run(**options: Any) -> ExperimentRun:
        return ExperimentRun(
            "activations", scale="smoke", out=tmp_path, progress=progress, **options
        )

    run = make_run(num_seeds=1)
    # One run for each of the four activation functions is missing.
    assert run.write_report().num_missing == 4
    curves: dict[str, Any] = {"heldout_curve": [], "training_curve": [], "gradient_norms": []}
    diverged = {"kind": "pretrain", "result": {"diverged": "the loss is nan", **curves}}
    for stage in run.stages.values():
        run.runner.results.append(stage.name, diverged)
    assert run.write_report().num_missing == 0
    contents = {path: path.read_bytes() for path in (tmp_path / "smoke").glob("activations.*")}
    assert len(contents) == 3
    # With another text, all results are missing.
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    other_text = make_run(num_seeds=1, sources=Sources(english=tmp_path / "a.jsonl"))
    outcome = other_text.write_report()
    assert (outcome.num_missing, outcome.files) == (4, [])
    assert contents == {path: path.read_bytes() for path in contents}
    assert any("is not replaced: it is complete" in line for line in progress.messages)
    # The results of the first seed exist, those of the second are missing.
    two_seeds = make_run(num_seeds=2).write_report()
    assert (two_seeds.num_missing, len(two_seeds.files)) == (4, 3)
    (tmp_path / "smoke/activations.json").write_text("[]")
    assert len(other_text.write_report().files) == 3


def test_report_of_another_model_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are identified by a hash of their files, because all runs name them "model"."""
    monkeypatch.setattr("bertsmith.lab.experiment_run.locate_model", Path)
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text(name)

    def make_run(name: str) -> ExperimentRun:
        sources = Sources(model=str(tmp_path / name / "model"))
        return ExperimentRun("positions", scale="smoke", out=tmp_path / "lab", sources=sources)

    make_run("a").write_report()
    report = json.loads((tmp_path / "lab/smoke/external-positions.json").read_text())
    assert report["model"] == "model"
    (tmp_path / "a" / "model" / "README.md").write_text("a card")
    make_run("a").write_report()
    with pytest.raises(RunError, match=r"external-positions.md is the report of another model;"):
        make_run("b")


def test_constant_layer_of_one_seed_does_not_affect_the_mean(tmp_path: Path) -> None:
    """Means are over the seeds with a value; the correlation of a constant layer is None."""
    # Two layers and five poolings each.
    layers = [[0.5] * 5, [0.7] * 5]
    constant_layers = [[0.3] * 5, [None] * 5]
    factory = StageFactory(SCALES["smoke"], Sources(), tmp_path)
    results: Results = {
        ("similarity", 0): {"spearman": layers, "num_pairs": 9},
        ("similarity", 1): {"spearman": constant_layers, "num_pairs": 9},
        ("map", 0): None,
    }
    report = EXPERIMENTS["pooling"].build_report(factory, results)
    (means,) = report.data.values()
    np.testing.assert_allclose(means, [[0.4] * 5, [0.7] * 5])
    assert report.tables[0].rows[0][1] == "0.700 (1 of 2; 1 undefined: equal vectors)"


def test_cell_has_mean_and_standard_deviation() -> None:
    """A single value has no deviation. Missing and NaN values are counted."""
    assert format_mean_std([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    cell = format_mean_std([1.0, None, float("nan")], ".1f")
    assert cell == "1.0 (1 of 3; 1 diverged or constant)"
    assert format_mean_std([None]) == "-"
    assert format_mean_std([float("nan")]) == "diverged or constant"


def test_table_has_a_markdown_header() -> None:
    """The header line is followed by a separator line and the rows."""
    table = Table("T", ["a", "b"], [["1", "2"]])
    lines = table.to_markdown().splitlines()
    assert lines[2:] == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


def test_lists_of_numbers_are_written_on_one_line(tmp_path: Path) -> None:
    """The JSON file contains the same value, even if strings look like lists."""
    value = {
        "map": [[1.0, -0.5e-7, None], [3]],
        "names": ["[\n 1,\n 2\n]", "b"],
        "none": [],
        "mixed": [1, "a"],
        "table": [{"row": [1, 2]}],
    }
    write_json(tmp_path / "a.json", value, inline_numbers=True)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == value
    assert "[1.0, -5e-08, null],\n" in text
    assert '"row": [1, 2]' in text


def test_each_full_width_panel_has_a_row() -> None:
    """The other panels are arranged in rows of two, in their order."""

    def draw_nothing(_: Any) -> None:
        pass

    # Panels with upper-case names have full width.
    panels = [Panel(name, draw_nothing, is_full_width=name.isupper()) for name in "abcDefG"]
    rows = ["".join(panel.title for panel in row) for row in _arrange_panels(panels)]
    assert rows == ["ab", "c", "D", "ef", "G"]


@pytest.mark.parametrize(("name", "expected"), [("learning", 1), ("activations", 3)])
def test_number_of_seeds_is_reported(name: str, expected: int, tmp_path: Path) -> None:
    """An experiment with a single run reports one seed even if more were requested."""
    run = ExperimentRun(name, scale="smoke", out=tmp_path, num_seeds=3)
    run.write_report()
    assert json.loads((tmp_path / f"smoke/{name}.json").read_text())["seeds"] == expected


def test_training_tokens_include_both_phases(tmp_path: Path) -> None:
    """In the paper's recipe, a tenth of the steps has sequences of 512 instead of 128 tokens."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    sources = Sources(english=tmp_path / "a.jsonl")
    small, full = (StageFactory(SCALES[name], sources, tmp_path) for name in ("small", "full"))
    # Half of the scale's steps, times batch size and length.
    assert vocabulary._count_max_training_tokens(small) == 400 * 32 * 128
    expected = 500_000 * 256 * (0.9 * 128 + 0.1 * 512)
    assert vocabulary._count_max_training_tokens(full) == expected


def test_lines_differ_in_color_or_style() -> None:
    """With more lines than colors, no two lines have the same color and style."""
    axes = Figure().subplots()
    series = {f"layer {number}": [(0, 1.0), (1, 2.0)] for number in range(14)}
    make_line_plot(series, "x", "y")(axes)
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 14


def test_vertical_bars_of_cells_are_escaped() -> None:
    """A predicted "|" does not add a column."""
    assert Table("t", ["a|b"], [["|"]]).to_markdown().splitlines()[2:] == [
        r"| a\|b |", "| --- |", r"| \| |"
    ]  # fmt: skip
