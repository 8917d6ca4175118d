"""Tests that run every experiment at scale "smoke"."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bertsmith.cli.lab import EXPERIMENTS as EXPERIMENT_NAMES
from bertsmith.lab import softmax
from bertsmith.lab.experiment_run import MODEL_EXPERIMENTS, ExperimentRun
from bertsmith.lab.experiments import EXPERIMENTS
from bertsmith.lab.report import make_mean_plot
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import StageFactory
from tests.lab.number_stages import read_records

pytestmark = pytest.mark.usefixtures("skip_slow_parts")

#: Number of rows of each table at scale "smoke", by experiment.
NUM_ROWS = {
    "pretraining-tasks": [6], "model-size": [2, 6], "training-steps": [7], "features": [7],
    "masking": [6], "pooling": [5], "context": [6, 6], "activations": [4],
    "normalization": [4, 16, 4], "positions": [4, 3], "vocabulary": [6, 2], "learning": [5],
}  # fmt: skip
#: A kind of stage that each experiment runs on the user's model.
MODEL_STAGE_KINDS = {
    "features": "finetune", "pooling": "layer-similarity", "context": "word-senses",
    "positions": "position-map",
}  # fmt: skip


def run_at_smoke(name: str, out: Path) -> ExperimentRun:
    """Run an experiment with toy data and return it."""
    run = ExperimentRun(name, scale="smoke", out=out)
    run.run()
    return run


def find_baseline_model(out: Path) -> str:
    """Return the model directory of the baseline run."""
    run = run_at_smoke("activations", out)
    return str(out / "smoke/work" / run.stages["gelu", 0].name / "output" / "model")


def test_help_names_every_experiment() -> None:
    """The command line lists all names itself, because --help does not import the experiments."""
    assert tuple(EXPERIMENTS) == EXPERIMENT_NAMES
    assert set(NUM_ROWS) == set(EXPERIMENT_NAMES)


def test_baseline_has_nsp_only_at_full_scale(tmp_path: Path) -> None:
    """Runs at scale "small" are too short to learn next-sentence prediction reliably."""
    (tmp_path / "text.txt").write_text("one\n")
    sources = Sources(english=tmp_path / "text.txt")
    full, small = (StageFactory(SCALES[name], sources, tmp_path) for name in ("full", "small"))
    assert full.create_baseline_run(1).settings == full.create_pretraining_run(1).settings
    assert small.create_baseline_run(1).settings == small.create_mlm_only_run(1).settings
    assert small.create_baseline_run(1).settings["data"]["nsp"] is False
    assert "nsp" not in small.create_pretraining_run(1).settings["data"]


def test_mean_plot_draws_means_and_all_seeds() -> None:
    """Lines go through the means, dots are single seeds, and missing values are skipped."""
    axes = Figure().subplots()
    curves: dict[str, dict[int, list[float | None]]] = {
        "masked LM": {160: [0.5, 0.7], 320: [None, 0.8], 480: [None, None]},
        "left to right": {160: [float("nan"), 0.4]},
    }
    make_mean_plot(curves, "steps", "score")(axes)
    points = [np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()]
    expected_lines = [[[160, pytest.approx(0.6)], [320, 0.8]], [[160, 0.4]]]
    expected_dots = [[[160, 0.5], [160, 0.7], [320, 0.8]], [[160, 0.4]]]
    assert points == expected_lines + expected_dots
    colors = [line.get_color() for line in axes.get_lines()]
    # The dots of a curve have the color of its line.
    assert colors[:2] == colors[2:]
    assert colors[0] != colors[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENT_NAMES)
def test_experiment_runs_at_smoke(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results exist, tables have the expected rows, and a second run has nothing to do."""
    # Otherwise four processes would measure the softmax, as tests/lab/test_softmax.py does.
    cost = {"seconds": 0.001, "bytes": 1}
    monkeypatch.setattr(softmax, "measure_in_subprocess", lambda *_, **__: cost)
    outcome = ExperimentRun(name, scale="smoke", out=out).run()
    assert outcome.failures == {}
    assert outcome.num_missing == 0
    markdown_file, json_file, figure_file = outcome.files
    assert figure_file.read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads(json_file.read_text(encoding="utf-8"))
    assert [len(table["rows"]) for table in report["tables"]] == NUM_ROWS[name]
    assert report["missing"] == []
    assert set(report["stages"].values()) <= read_records(out / "smoke").keys()
    markdown = markdown_file.read_text(encoding="utf-8").splitlines()
    table_lines = [line for line in markdown if line[:1] == "|"]
    # Each table also has a header and a separator line.
    assert len(table_lines) == sum(NUM_ROWS[name]) + 2 * len(NUM_ROWS[name])
    assert ExperimentRun(name, scale="smoke", out=out).plan() == []


@pytest.mark.slow
def test_experiments_share_the_baseline_run(out: Path) -> None:
    """Four experiments share one MLM-only run, and their other pre-training runs differ."""
    names = ("masking", "activations", "positions", "pretraining-tasks")
    for name in names:
        run_at_smoke(name, out)
    stages = {
        name: json.loads((out / f"smoke/{name}.json").read_text())["stages"] for name in names
    }
    with_nsp = stages["pretraining-tasks"]["MLM + NSP, model, 0"]
    mlm_only = stages["pretraining-tasks"]["MLM, no NSP, model, 0"]
    assert mlm_only != with_nsp
    assert mlm_only == stages["masking"]["(80, 10, 10), model, 0"]
    assert mlm_only == stages["activations"]["gelu, 0"]
    key = "learned, initialized as sinusoids, with neighbor heads, 0"
    assert mlm_only == stages["positions"][key]
    other_stages = {stage for by_key in stages.values() for stage in by_key.values()} - {with_nsp}
    runs = [stage for stage in other_stages if stage.startswith("pretrain-")]
    # pretraining-tasks has 2 runs without NSP, including the shared one. In addition to the shared
    # run, masking, activations and positions have 5, 3 and 3 runs.
    assert len(runs) == 2 + 5 + 3 + 3


@pytest.mark.slow
def test_record_has_settings_curve_and_machine(out: Path) -> None:
    """A pre-training record has settings, a training curve, and the version of PyTorch."""
    run = run_at_smoke("activations", out)
    record = read_records(out / "smoke")[run.stages["gelu", 0].name]
    assert record["settings"]["model"]["layers"] == SCALES["smoke"].layers
    assert record["result"]["training_curve"][-1][0] == record["settings"]["steps"]
    assert record["machine"]["torch"]


@pytest.mark.slow
def test_position_map_has_ones_on_its_diagonal(out: Path) -> None:
    """The similarity map is square, and each position has similarity 1 with itself."""
    run_at_smoke("positions", out)
    maps = (
        record
        for name, record in read_records(out / "smoke").items()
        if name.startswith("position-map-")
    )
    similarities = next(maps)["result"]["similarities"]
    assert len(similarities) == len(similarities[0])
    assert all(row[index] == pytest.approx(1.0) for index, row in enumerate(similarities))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_EXPERIMENTS)
def test_experiment_on_a_users_model(name: str, out: Path, tmp_path: Path) -> None:
    """An experiment on a user's model does not pre-train a model."""
    sources = Sources(model=find_baseline_model(out))
    run = ExperimentRun(name, scale="smoke", out=tmp_path, sources=sources)
    if name == "features":
        # Its fine-tunings are the same as those of the test above.
        assert {stage.kind for stage in run.stages.values()} == {MODEL_STAGE_KINDS[name]}
        assert not any("pretrain-" in stage.name for stage in run.find_missing_stages())
        return
    outcome = run.run()
    assert outcome.failures == {}
    assert outcome.num_missing == 0
    names = read_records(tmp_path / "smoke")
    assert not any(stage.startswith("pretrain-") for stage in names)
    assert any(stage.startswith(MODEL_STAGE_KINDS[name]) for stage in names)


@pytest.mark.slow
def test_language_that_the_model_does_not_know_fails(out: Path, tmp_path: Path) -> None:
    """All Korean words are [UNK] for an English model, so the Korean stage fails."""
    model = find_baseline_model(out)
    english = ExperimentRun("context", scale="smoke", out=tmp_path, sources=Sources(model=model))
    assert [language for language, _ in english.stages] == ["en"]
    korean_text = run_at_smoke("activations", out).factory.sources.korean
    sources = Sources(model=model, korean=korean_text)
    outcome = ExperimentRun("context", scale="smoke", out=tmp_path, sources=sources).run()
    (message,) = outcome.failures.values()
    assert "its vocabulary has none of the Korean words" in message
    assert [table.title.partition(":")[0] for table in outcome.report.tables] == ["English"]
