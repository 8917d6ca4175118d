"""What an experiment tells: cells, tables and figures, and which of them may replace which."""

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
from bertsmith.lab.experiments import vocabulary
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.report import Panel, Table, _rows, format_mean_std, line_plot
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import StageFactory
from tests.lab.helpers import TWO_DOCUMENTS, RecordingProgress


def test_a_whole_table_is_not_replaced_by_one_with_gaps(tmp_path: Path) -> None:
    """A mistake in an option leaves what was found; what has all of that and more is written."""
    heard = RecordingProgress()
    laboratory = ExperimentRun(
        "activations", scale="smoke", out=tmp_path, num_seeds=1, progress=heard
    )
    assert laboratory.write_report().num_missing == 4
    curves: dict[str, Any] = {"heldout_curve": [], "training": [], "gradients": []}
    lost = {"kind": "pretrain", "result": {"diverged": "the loss is nan", **curves}}
    for stage in laboratory.stages.values():
        laboratory.runner.results.append(stage.name, lost)
    assert laboratory.write_report().num_missing == 0
    files = {path: path.read_bytes() for path in (tmp_path / "smoke").glob("activations.*")}
    assert len(files) == 3
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    other = ExperimentRun("activations", scale="smoke", out=tmp_path, num_seeds=1, progress=heard,
                       sources=Sources(english=tmp_path / "a.jsonl"))  # fmt: skip
    done = other.write_report()
    assert (done.num_missing, done.files) == (4, [])
    assert files == {path: path.read_bytes() for path in files}
    assert any("stays as it was: it is whole" in own for own in heard.messages)
    more = ExperimentRun(
        "activations", scale="smoke", out=tmp_path, num_seeds=2, progress=heard
    ).write_report()
    assert (more.num_missing, len(more.files)) == (4, 3)
    (tmp_path / "smoke/activations.json").write_text("[]")
    assert len(other.write_report().files) == 3


def test_a_table_of_another_model_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two RUNs have their models under the same name."""
    monkeypatch.setattr("bertsmith.lab.experiment_run.locate", Path)
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text(name)

    def asked(name: str) -> ExperimentRun:
        given = Sources(model=str(tmp_path / name / "model"))
        return ExperimentRun("positions", scale="smoke", out=tmp_path / "lab", sources=given)

    asked("a").write_report()
    told = json.loads((tmp_path / "lab/smoke/given-positions.json").read_text())
    assert told["model"] == "model"
    (tmp_path / "a" / "model" / "README.md").write_text("a card")
    asked("a").write_report()
    with pytest.raises(RunError, match=r"given-positions.md is of another model; give another"):
        asked("b")


def test_a_constant_layer_of_one_seed_takes_no_other_with_it(tmp_path: Path) -> None:
    """The picture and the figures have the mean of the seeds that have one, as the table has."""
    one, other = [[0.5] * 5, [0.7] * 5], [[0.3] * 5, [None] * 5]
    kit = StageFactory(SCALES["smoke"], Sources(), tmp_path)
    found: Results = {("similarity", 0): {"layers": one}, ("similarity", 1): {"layers": other},
                      ("map", 0): None}  # fmt: skip
    report = EXPERIMENTS["pooling"].build_report(kit, found)
    (values,) = report.data.values()
    np.testing.assert_allclose(values, [[0.4] * 5, [0.7] * 5])
    assert report.tables[0].rows[0][1] == "0.700 (1 of 2; 1 constant)"


def test_a_cell_has_mean_and_deviation() -> None:
    """Over seeds: mean ± standard deviation; a single one alone; nothing for nothing."""
    assert format_mean_std([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert (
        format_mean_std([1.0, None, float("nan")], ".1f") == "1.0 (1 of 3; 1 diverged or constant)"
    )
    assert format_mean_std([None]) == "-"
    assert format_mean_std([float("nan")]) == "1 diverged or constant"
    table = Table("T", ["a", "b"], [["1", "2"]])
    assert table.to_markdown().splitlines()[2:] == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


def test_a_list_of_numbers_takes_a_line(tmp_path: Path) -> None:
    """What is read is what was written, whatever else it has."""
    value = {"map": [[1.0, -0.5e-7, None], [3]], "names": ["[\n 1,\n 2\n]", "b"], "none": [],
             "mixed": [1, "a"], "table": [{"row": [1, 2]}]}  # fmt: skip
    write_json(tmp_path / "a.json", value, inline_numbers=True)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == value
    assert "[1.0, -5e-08, null],\n" in text
    assert '"row": [1, 2]' in text


def test_a_wide_panel_has_a_row_of_its_own() -> None:
    """Others stand two beside each other, in their order."""

    def drawn(_: Any) -> None:
        pass

    panels = [Panel(name, drawn, full_width=name.isupper()) for name in "abcDefG"]
    rows = ["".join(panel.title for panel in row) for row in _rows(panels)]
    assert rows == ["ab", "c", "D", "ef", "G"]


@pytest.mark.parametrize(("name", "told"), [("learning", 1), ("activations", 3)])
def test_seeds_are_told_where_there_are_some(name: str, told: int, tmp_path: Path) -> None:
    """One model's course is of one run, however many seeds are asked for."""
    laboratory = ExperimentRun(name, scale="smoke", out=tmp_path, num_seeds=3)
    laboratory.write_report()
    assert json.loads((tmp_path / f"smoke/{name}.json").read_text())["seeds"] == told


def test_characters_are_counted_of_both_phases(tmp_path: Path) -> None:
    """A tenth of the paper's steps have sequences of 512 tokens."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    text = Sources(english=tmp_path / "a.jsonl")
    small, full = (StageFactory(SCALES[name], text, tmp_path) for name in ("small", "full"))
    assert vocabulary._tokens_read(small) == 400 * 32 * 128
    assert vocabulary._tokens_read(full) == 500_000 * 256 * (0.9 * 128 + 0.1 * 512)


def test_no_two_of_many_lines_look_alike() -> None:
    """A model of the paper's size has more layers than there are colours."""
    axes = Figure().subplots()
    line_plot({f"layer {number}": [(0, 1.0), (1, 2.0)] for number in range(14)}, "x", "y")(axes)
    looks = {(own.get_color(), own.get_linestyle()) for own in axes.get_lines()}
    assert len(looks) == 14
