"""Tests that the runner runs stages once, resumes after a signal, and continues after a failure."""

import json
import shutil
import signal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import ModelError, RunError, SettingsError, StoppedError, TaskError
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import EXPERIMENTS
from bertsmith.lab.experiments.normalization import NORMS
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources, subsample_squad
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job, pretrain_model
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.toy_language import fill_missing_sources
from bertsmith.progress import NullProgress
from bertsmith.runtime import device
from bertsmith.settings import parse_assignments
from bertsmith.train.engine import loop
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining import pretrain
from tests.lab.number_stages import make_runner, read_records, remove_record
from tests.train.conftest import make_assignments, make_store


def make_dependent_stages(base: Stage) -> dict[str, Stage]:
    """Return two stages whose values are 11 and 21 plus the value of ``base``."""
    return {
        "a": Stage("number", {"add": 10}, {"base": base}),
        "b": Stage("number", {"add": 20}, {"base": base}),
    }


def test_key_depends_on_content_only(tmp_path: Path) -> None:
    """The key depends on kind, settings, dependencies and file contents, but not on paths."""
    file, copy = tmp_path / "a.txt", tmp_path / "b" / "c.txt"
    copy.parent.mkdir()
    file.write_text("text")
    copy.write_text("text")

    def compute_key(**changes: Any) -> str:
        fields = {"kind": "number", "settings": {"a": 1, "b": {"c": 2}}, "files": {"text": file}}
        return Stage(**{**fields, **changes}).key

    assert (
        compute_key()
        == compute_key(files={"text": copy})
        == compute_key(settings={"b": {"c": 2}, "a": 1})
    )
    dependency = Stage("number", {})
    changed_keys = [
        compute_key(kind="other"),
        compute_key(settings={"a": 1, "b": {"c": 3}}),
        compute_key(files={}),
        compute_key(dependencies={"x": dependency}),
        compute_key(dependencies={"y": dependency}),
        compute_key(dependencies={"x": Stage("number", {"a": 1})}),
    ]
    copy.write_text("other text")
    changed_keys.append(compute_key(files={"text": copy}))
    changed_keys.append(compute_key(files={"text": copy.parent}))
    (copy.parent / "more.txt").write_text("")
    changed_keys.append(compute_key(files={"text": copy.parent}))
    assert len({compute_key(), *changed_keys}) == 1 + len(changed_keys)


def test_stages_run_once_after_their_dependencies(tmp_path: Path) -> None:
    """A common dependency runs once, and a second call does not change any file."""
    base = Stage("number", {})
    stages = make_dependent_stages(base)
    runner = make_runner(tmp_path)
    assert runner.find_missing_stages(stages.values()) == [base, stages["a"], stages["b"]]
    runner.run_stages(stages)
    assert [runner.get_result(stage) for stage in stages.values()] == [{"value": 12}, {"value": 22}]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(read_records(tmp_path / "out")) == 3
    make_runner(tmp_path).run_stages(stages)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    record = read_records(tmp_path / "out")[stages["a"].name]
    assert record["settings"] == {"add": 10}
    assert record["dependencies"] == {"base": base.name}
    assert record["input_provenance"]["base"] == {
        name: record[name] for name in ("date", "machine")
    }
    assert record["machine"]["auto_device"] == device.describe_auto_device()


def test_results_do_not_need_the_work_directory(tmp_path: Path) -> None:
    """If the work directory is deleted, only stages without a result and their dependencies run."""
    base = Stage("number", {})
    stages = make_dependent_stages(base)
    make_runner(tmp_path).run_stages(stages)
    shutil.rmtree(tmp_path / "work")
    assert make_runner(tmp_path).find_missing_stages(stages.values()) == []
    make_runner(tmp_path).run_stages(stages)
    assert not (tmp_path / "work").exists()
    remove_record(tmp_path / "out", stages["b"].name)
    assert make_runner(tmp_path).find_missing_stages(stages.values()) == [base, stages["b"]]
    make_runner(tmp_path).run_stages(stages)
    assert make_runner(tmp_path).get_result(stages["b"]) == {"value": 22}


def test_failed_stage_does_not_stop_others(tmp_path: Path) -> None:
    """Only stages that depend on a failed stage fail, and the next call tries them again."""
    failing, working = Stage("number", {"fails": True}), Stage("number", {"add": 1})
    broken = Stage("number", {"breaks": True})
    stages = {
        "x": Stage("number", {}, {"bad": failing}),
        "y": broken,
        "z": Stage("number", {}, {"g": working}),
    }
    runner = make_runner(tmp_path)
    runner.run_stages(stages)
    assert runner.get_result(stages["z"]) == {"value": 3}
    assert runner.get_result(stages["x"]) is None
    assert runner.failures == {
        failing.name: "expected failure",
        stages["x"].name: f"its bad ({failing.name}) failed",
        broken.name: "ZeroDivisionError: unexpected error",
    }
    trace = (tmp_path / "work" / broken.name / "traceback.txt").read_text()
    assert "unexpected error" in trace
    retried = make_runner(tmp_path).find_missing_stages(stages.values())
    assert retried == [failing, stages["x"], broken]


def test_dependents_of_a_diverged_run_have_diverged(tmp_path: Path) -> None:
    """Dependents do not run, and their result says which dependency diverged."""
    diverged = Stage("number", {"diverges": True})
    stages = {"x": Stage("number", {"add": 1}, {"bad": diverged})}
    expected = {"diverged": f"its bad ({diverged.name}) diverged"}
    runner = make_runner(tmp_path)
    runner.run_stages(stages)
    assert runner.failures == {}
    assert runner.get_result(stages["x"]) == expected
    assert make_runner(tmp_path).find_missing_stages(stages.values()) == []
    other_stages = {"y": Stage("number", {"add": 2}, {"bad": diverged})}
    # The plan omits direct and indirect dependents, which need no computation.
    indirect = Stage("number", {"add": 3}, {"y": other_stages["y"]})
    assert make_runner(tmp_path).find_missing_stages([*other_stages.values(), indirect]) == []
    shutil.rmtree(tmp_path / "work")
    runner.run_stages(other_stages)
    assert runner.get_result(other_stages["y"]) == expected
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_report_with_only_diverged_runs(name: str, tmp_path: Path) -> None:
    """Every experiment can write a report if all of its runs diverged."""
    run = ExperimentRun(name, scale="smoke", out=tmp_path, num_seeds=2)
    for stage in run.stages.values():
        result: dict[str, Any] = {"diverged": "the loss is nan"}
        if stage.kind == "pretrain":
            result |= {"training_curve": [], "gradient_norms": [], "heldout_curve": []}
        run.runner.results.append(stage.name, {"kind": stage.kind, "result": result})
    outcome = run.run()
    assert (outcome.failures, outcome.num_missing) == ({}, 0)


@pytest.mark.parametrize(
    "signal_step", [12, 17], ids=["last step of the first run", "during the second run"]
)
def test_stopped_experiment_resumes(
    signal_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM, a second call runs only the remaining steps."""
    num_steps = 0

    def counting_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == signal_step:
            signal.raise_signal(signal.SIGTERM)
        return take_step(*args, **kwargs)

    monkeypatch.setattr(loop, "take_step", counting_step)
    with pytest.raises(StoppedError) as stopped:
        ExperimentRun("activations", scale="smoke", out=tmp_path).run()
    assert stopped.value.signal == signal.SIGTERM
    kinds = [name.partition("-")[0] for name in read_records(tmp_path / "smoke")]
    assert kinds.count("pretrain") == 1
    assert (tmp_path / "smoke/activations.md").exists()
    outcome = ExperimentRun("activations", scale="smoke", out=tmp_path).run()
    assert (outcome.num_missing, outcome.failures) == (0, {})
    # There are four runs of twelve steps.
    assert num_steps == 4 * 12


def test_slow_run_keeps_the_checkpoints_of_its_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each step takes 11 minutes, checkpoints by time do not replace those of the snapshots."""
    settings = make_assignments(checkpoint__steps=20, checkpoint__keep=30, run__eval_every=20)
    values = parse_assignments(settings)
    stage = Stage("pretrain", {"steps": 60, "recipe": "fast", **values})
    monkeypatch.setattr(
        pretrain, "StepDuration", partial(StepDuration, clock=count(step=660).__next__)
    )
    run = tmp_path / "run"
    pretrain_model(Job(stage, run, {"store": make_store(tmp_path)}, NullProgress()))
    assert [step for step, _ in list_checkpoints(run)] == [20, 40, 60]


def test_diverged_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table shows which runs diverged, and no stage fails."""
    # Without normalization, float32 overflows within a few steps at this learning rate.
    monkeypatch.setattr(StageFactory, "learning_rate", 1e18)
    outcome = ExperimentRun("normalization", scale="smoke", out=tmp_path).run()
    assert outcome.failures == {}
    rows = {row[0]: row[1:] for row in outcome.report.tables[0].rows}
    assert rows.keys() == set(NORMS.values())
    assert any("diverged" in cell for cell in rows["no normalization"]), rows


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    """Unknown names, missing inputs and an unsuitable --model are errors."""
    text = tmp_path / "text.txt"
    text.write_text("text")
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(SettingsError, match="unknown experiment 'tables'; expected: pretr"):
        ExperimentRun("tables", out=tmp_path)
    with pytest.raises(SettingsError, match="unknown scale 'tiny'"):
        ExperimentRun("masking", scale="tiny", out=tmp_path)
    with pytest.raises(TaskError, match="needs text, but --text is missing; pass --text FILE"):
        ExperimentRun("masking", out=tmp_path)
    with pytest.raises(TaskError, match="no such file or folder"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(tmp_path / "none.txt"))
    with pytest.raises(TaskError, match="on sst-2, but --tasks is missing; pass --tasks FOLDER"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(text))
    with pytest.raises(TaskError, match=r"--text .*empty.txt: this file is empty"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(empty))
    with pytest.raises(TaskError, match="no folder SST-2 or glue/SST-2 for sst-2"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(text, tasks_dir=tmp_path))
    with pytest.raises(SettingsError, match="--model does not apply to masking, which trains"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(text, model="x"))
    with pytest.raises(ModelError, match="nowhere"):
        ExperimentRun("positions", out=tmp_path, sources=Sources(model=str(tmp_path / "nowhere")))
    with pytest.raises(RunError, match="this is a file"):
        ExperimentRun("masking", scale="smoke", out=text)


def test_toy_files_are_deterministic(tmp_path: Path) -> None:
    """Two folders get the same files, and toy text does not replace the user's text."""
    first, second = (fill_missing_sources(Sources(), tmp_path / name) for name in ("a", "b"))

    def read_all(sources: Sources) -> list[bytes]:
        assert sources.english is not None
        folder = sources.english.parent
        return [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]

    assert read_all(first) == read_all(second)
    sources = fill_missing_sources(Sources(english=tmp_path), tmp_path / "a")
    assert sources.english == tmp_path


def test_squad_subset_is_found_and_subsampled(tmp_path: Path) -> None:
    """A training file may have a longer name, and only every n-th article is used."""
    folder = tmp_path / "squad"
    folder.mkdir()
    articles = [{"title": number, "paragraphs": []} for number in range(1, 6)]
    for name in ("train-v1.1-some.json", "dev-v1.1.json"):
        (folder / name).write_text(json.dumps({"version": "1", "data": articles}))
    train, dev = Sources(tasks_dir=tmp_path).find_task_files("squad")
    assert (train.name, dev.name) == ("train-v1.1-some.json", "dev-v1.1.json")
    subsampled = json.loads(subsample_squad(dev, 2, tmp_path / "subsampled.json").read_text())
    assert subsampled["version"] == "1"
    assert [article["title"] for article in subsampled["data"]] == [1, 3, 5]
    sources = Sources(tasks_dir=tmp_path)
    factory = StageFactory(SCALES["small"], sources, tmp_path / "work")
    assert {path.parent for path in factory._find_task_files("squad")} == {
        tmp_path / "work" / "tasks"
    }
    dev.write_text(json.dumps({"version": "2", "data": articles[:1]}))
    assert json.loads(factory._find_task_files("squad")[1].read_text())["version"] == "2"
