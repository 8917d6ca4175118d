"""Every experiment of the paper runs at scale "smoke", by the code that runs at every scale."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bertsmith.cli.lab import EXPERIMENTS as NAMES
from bertsmith.lab.experiment_run import MODEL_EXPERIMENTS, ExperimentRun
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.report import mean_plot
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import StageFactory
from tests.lab.number_stages import read_records

#: Rows of each table of an experiment at smoke.
ROWS = {
    "pretraining-tasks": [6], "model-size": [2, 6], "training-steps": [7], "features": [7],
    "masking": [6], "pooling": [5], "context": [6, 6], "activations": [4],
    "normalization": [4, 16, 4], "positions": [4, 3], "vocabulary": [6, 2], "learning": [5],
}  # fmt: skip


#: What an experiment measures of a given model.
KINDS_OF = {
    "features": "finetune", "pooling": "layer-similarity", "context": "senses",
    "positions": "position-map",
}  # fmt: skip


def test_the_help_names_every_experiment() -> None:
    """The names that --help gives, unloaded, are those that there are."""
    assert tuple(EXPERIMENTS) == NAMES
    assert set(ROWS) == set(NAMES)


def test_next_sentence_is_left_out_where_it_may_not_be_learnt(tmp_path: Path) -> None:
    """The run that most experiments start from has it at the paper's size, and not in 800 steps."""
    (tmp_path / "text.txt").write_text("one\n")
    text = Sources(english=tmp_path / "text.txt")
    full, small = (StageFactory(SCALES[name], text, tmp_path) for name in ("full", "small"))
    assert full.baseline_run(1).settings == full.pretraining_run(1).settings
    assert small.baseline_run(1).settings == small.mlm_only_run(1).settings
    assert small.baseline_run(1).settings["data"]["nsp"] is False
    assert "nsp" not in small.pretraining_run(1).settings["data"]


def test_a_course_is_drawn_through_its_means_with_a_dot_for_each_seed() -> None:
    """What failed or diverged leaves a gap; it is no zero."""
    axes = Figure().subplots()
    courses: dict[str, dict[int, list[float | None]]] = {
        "masked LM": {160: [0.5, 0.7], 320: [None, 0.8], 480: [None, None]},
        "left to right": {160: [float("nan"), 0.4]},
    }
    mean_plot(courses, "steps", "score")(axes)
    drawn = [np.asarray(own.get_xydata()).tolist() for own in axes.get_lines()]
    assert drawn == [
        [[160, pytest.approx(0.6)], [320, 0.8]], [[160, 0.4]],
        [[160, 0.5], [160, 0.7], [320, 0.8]], [[160, 0.4]],
    ]  # fmt: skip
    colours = [own.get_color() for own in axes.get_lines()]
    assert colours[:2] == colours[2:]
    assert colours[0] != colours[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_at_smoke(name: str, out: Path) -> None:
    """It leaves nothing out: tables of the right rows, all figures, a picture; and then is done."""
    done = ExperimentRun(name, scale="smoke", out=out).run()
    assert done.failures == {}
    assert done.num_missing == 0
    table, facts, picture = done.files
    assert picture.read_bytes().startswith(b"\x89PNG")
    told: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
    assert [len(own["rows"]) for own in told["tables"]] == ROWS[name]
    assert told["missing"] == []
    assert set(told["stages"].values()) <= read_records(out / "smoke").keys()
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert len(lines) == sum(ROWS[name]) + 2 * len(ROWS[name])
    assert ExperimentRun(name, scale="smoke", out=out).plan() == []


@pytest.mark.slow
def test_what_can_be_checked_by_hand(out: Path) -> None:
    """Figures that must be so, whatever was learnt: shapes of tables, sums, one run for many."""
    for name in ("masking", "activations", "positions", "pooling", "pretraining-tasks"):
        ExperimentRun(name, scale="smoke", out=out).run()
    steps = {name: json.loads((out / f"smoke/{name}.json").read_text())["stages"]
             for name in ("masking", "activations", "positions", "pretraining-tasks")}  # fmt: skip
    usual = steps["pretraining-tasks"]["MLM + NSP, model, 0"]
    alone = steps["pretraining-tasks"]["MLM, no NSP, model, 0"]
    assert alone != usual
    assert alone == steps["masking"]["(80, 10, 10), model, 0"]
    assert alone == steps["activations"]["gelu, 0"]
    assert alone == steps["positions"]["learned, from sinusoids, with first heads, 0"]
    others = {value for own in steps.values() for value in own.values() if value != usual}
    assert len([own for own in others if own.startswith("pretrain-")]) == 2 + 5 + 3 + 3
    record = read_records(out / "smoke")[usual]
    assert record["settings"]["model"]["layers"] == 4
    assert record["result"]["training"][-1][0] == record["settings"]["steps"]
    assert record["machine"]["torch"]
    maps = (record for name, record in read_records(out / "smoke").items()
            if name.startswith("position-map-"))  # fmt: skip
    values = next(maps)["result"]["map"]
    assert len(values) == len(values[0])
    assert all(row[place] == pytest.approx(1.0) for place, row in enumerate(values))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_EXPERIMENTS)
def test_on_a_model_that_was_given(name: str, out: Path, tmp_path: Path) -> None:
    """Asked of a model directory, an experiment trains no model of its own."""
    plain = ExperimentRun("activations", scale="smoke", out=out)
    plain.run()
    usual = next(stage for key, stage in plain.stages.items() if key == ("gelu", 0))
    model = out / "smoke/work" / usual.name / "outcome" / "model"
    done = ExperimentRun(name, scale="smoke", out=tmp_path, sources=Sources(model=str(model))).run()
    assert done.failures == {}
    names = read_records(tmp_path / "smoke")
    assert not any(stage.startswith("pretrain-") for stage in names)
    assert done.num_missing == 0
    assert any(stage.startswith(KINDS_OF[name]) for stage in names)


@pytest.mark.slow
def test_a_language_that_a_given_model_does_not_know(out: Path, tmp_path: Path) -> None:
    """Distances of [UNK] from itself are no finding: nothing is told of that language."""
    plain = ExperimentRun("activations", scale="smoke", out=out)
    plain.run()
    model = out / "smoke/work" / plain.stages["gelu", 0].name / "outcome" / "model"
    alone = ExperimentRun("context", scale="smoke", out=tmp_path, sources=Sources(model=str(model)))
    assert [key for key, _ in alone.stages] == ["en"]
    korean = Sources(model=str(model), korean=plain.factory.sources.korean)
    done = ExperimentRun("context", scale="smoke", out=tmp_path, sources=korean).run()
    assert len(done.failures) == 1
    assert "its vocabulary has none of the Korean words" in next(iter(done.failures.values()))
    assert [table.title.partition(":")[0] for table in done.report.tables] == ["English"]
