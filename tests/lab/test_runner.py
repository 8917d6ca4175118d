"""Stages are made once, go on after a stop, fail alone, and are told apart by what decides them."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import ModelError, RunError, SettingsError, TaskError
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments.normalization import NORMS
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources, subsample_squad
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StoppedError
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.toy_language import fill_missing_sources
from bertsmith.runtime import device
from bertsmith.train.engine import loop
from bertsmith.train.engine.step import take_step
from tests.lab.number_stages import make_runner, read_records, remove_record


def test_a_stage_is_its_settings_needs_and_files(tmp_path: Path) -> None:
    """Equal content is the same stage wherever it lies; any difference is another one."""
    one, other = tmp_path / "a.txt", tmp_path / "b" / "c.txt"
    other.parent.mkdir()
    one.write_text("text")
    other.write_text("text")

    def key(**changes: Any) -> str:
        own = {"kind": "number", "settings": {"a": 1, "b": {"c": 2}}, "files": {"text": one}}
        return Stage(**{**own, **changes}).key

    assert key() == key(files={"text": other}) == key(settings={"b": {"c": 2}, "a": 1})
    need = Stage("number", {})
    others = [
        key(kind="other"), key(settings={"a": 1, "b": {"c": 3}}), key(files={}),
        key(needs={"x": need}), key(needs={"y": need}), key(needs={"x": Stage("number", {"a": 1})}),
    ]  # fmt: skip
    other.write_text("other text")
    others.append(key(files={"text": other}))
    others.append(key(files={"text": other.parent}))
    (other.parent / "more.txt").write_text("")
    others.append(key(files={"text": other.parent}))
    assert len({key(), *others}) == 1 + len(others)


def test_stages_are_made_once_and_in_order(tmp_path: Path) -> None:
    """What is needed comes first; a stage that two others need is made a single time."""
    base = Stage("number", {})
    wanted = {name: Stage("number", {"add": add}, {"base": base})
              for name, add in (("a", 10), ("b", 20))}  # fmt: skip
    made = make_runner(tmp_path)
    assert [stage.name for stage in made.missing_stages(wanted.values())] == [
        base.name, wanted["a"].name, wanted["b"].name,
    ]  # fmt: skip
    made.run_stages(wanted)
    assert [made.get_result(stage) for stage in wanted.values()] == [{"value": 12}, {"value": 22}]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(read_records(tmp_path / "out")) == 3
    make_runner(tmp_path).run_stages(wanted)
    assert files == {path: path.stat().st_mtime_ns for path in files}
    record = read_records(tmp_path / "out")[wanted["a"].name]
    assert record["settings"] == {"add": 10}
    assert record["needs"] == {"base": base.name}
    assert record["made_of"]["base"] == {name: record[name] for name in ("date", "machine")}
    assert record["machine"]["auto"] == device.describe_auto_device()


def test_results_outlive_the_work(tmp_path: Path) -> None:
    """Without the work folder nothing is made again, but what a missing result needs."""
    base = Stage("number", {})
    wanted = {name: Stage("number", {"add": add}, {"base": base})
              for name, add in (("a", 10), ("b", 20))}  # fmt: skip
    make_runner(tmp_path).run_stages(wanted)
    shutil.rmtree(tmp_path / "work")
    assert make_runner(tmp_path).missing_stages(wanted.values()) == []
    make_runner(tmp_path).run_stages(wanted)
    assert not (tmp_path / "work").exists()
    remove_record(tmp_path / "out", wanted["b"].name)
    assert make_runner(tmp_path).missing_stages(wanted.values()) == [base, wanted["b"]]
    make_runner(tmp_path).run_stages(wanted)
    assert make_runner(tmp_path).get_result(wanted["b"]) == {"value": 22}


def test_a_failure_stays_alone(tmp_path: Path) -> None:
    """What needs a failed stage fails with it, by name; the rest is made; another try may do it."""
    bad, good = Stage("number", {"fails": True}), Stage("number", {"add": 1})
    broken = Stage("number", {"breaks": True})
    wanted = {
        "x": Stage("number", {}, {"bad": bad}),
        "y": broken,
        "z": Stage("number", {}, {"g": good}),
    }
    made = make_runner(tmp_path)
    made.run_stages(wanted)
    assert made.get_result(wanted["z"]) == {"value": 3}
    assert made.get_result(wanted["x"]) is None
    assert made.failures == {
        bad.name: "it was to fail",
        wanted["x"].name: f"its bad ({bad.name}) failed",
        broken.name: "ZeroDivisionError: a fault of ours",
    }
    trace = (tmp_path / "work" / broken.name / "traceback.txt").read_text()
    assert "a fault of ours" in trace
    assert make_runner(tmp_path).missing_stages(wanted.values()) == [bad, wanted["x"], broken]


def test_nothing_is_made_of_what_diverged(tmp_path: Path) -> None:
    """What needs a run that diverged has that as its result: to try it again would be in vain."""
    bad = Stage("number", {"diverges": True})
    wanted = {"x": Stage("number", {"add": 1}, {"bad": bad})}
    made = make_runner(tmp_path)
    made.run_stages(wanted)
    assert made.failures == {}
    assert made.get_result(wanted["x"]) == {"diverged": f"its bad ({bad.name}) did"}
    assert make_runner(tmp_path).missing_stages(wanted.values()) == []
    later = {"y": Stage("number", {"add": 2}, {"bad": bad})}
    # A plan has nothing that costs nothing, nor what that would be for.
    beyond = Stage("number", {"add": 3}, {"y": later["y"]})
    assert make_runner(tmp_path).missing_stages([*later.values(), beyond]) == []
    shutil.rmtree(tmp_path / "work")
    made.run_stages(later)
    assert made.get_result(later["y"]) == {"diverged": f"its bad ({bad.name}) did"}
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_an_experiment_tells_of_runs_that_diverged(name: str, tmp_path: Path) -> None:
    """Nothing was measured on them: nothing is looked for in what is not there."""
    laboratory = ExperimentRun(name, scale="smoke", out=tmp_path, num_seeds=2)
    for stage in laboratory.stages.values():
        result: dict[str, Any] = {"diverged": "the loss is nan"}
        if stage.kind == "pretrain":
            result |= {"training": [], "gradients": [], "heldout_curve": []}
        laboratory.runner.results.append(stage.name, {"kind": stage.kind, "result": result})
    done = laboratory.run()
    assert (done.failures, done.num_missing) == ({}, 0)


@pytest.mark.parametrize("at", [12, 17], ids=["last step of a run", "amid a run"])
def test_a_stopped_experiment_goes_on(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends it between two steps, or after a run's last; the same call does the rest."""
    taken = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == at:
            signal.raise_signal(signal.SIGTERM)
        return take_step(*arguments, **named)

    monkeypatch.setattr(loop, "take_step", counted)
    with pytest.raises(StoppedError) as stopped:
        ExperimentRun("activations", scale="smoke", out=tmp_path).run()
    assert stopped.value.signal == signal.SIGTERM
    assert [name.partition("-")[0] for name in read_records(tmp_path / "smoke")].count(
        "pretrain"
    ) == 1
    assert (tmp_path / "smoke/activations.md").exists()
    done = ExperimentRun("activations", scale="smoke", out=tmp_path).run()
    assert (done.num_missing, done.failures) == (0, {})
    # Four runs of twelve steps, and none of them twice.
    assert taken == 4 * 12


def test_a_run_that_diverges_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite any more is told in the table, and takes no other run with it."""
    # Without any norm, at a rate beyond all reason, float32 ends within some steps.
    monkeypatch.setattr(StageFactory, "rate", 1e18)
    done = ExperimentRun("normalization", scale="smoke", out=tmp_path).run()
    assert done.failures == {}
    rows = {row[0]: row[1:] for row in done.report.tables[0].rows}
    assert rows.keys() == set(NORMS.values())
    assert any("diverged" in cell for cell in rows["none"]), rows


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """Unknown names, missing text or tasks, a model where none is asked: told with a way out."""
    text = tmp_path / "text.txt"
    text.write_text("text")
    with pytest.raises(SettingsError, match="unknown experiment 'tables'; known: pretr"):
        ExperimentRun("tables", out=tmp_path)
    with pytest.raises(SettingsError, match="unknown scale 'tiny'"):
        ExperimentRun("masking", scale="tiny", out=tmp_path)
    with pytest.raises(TaskError, match="give it with --text FILE_OR_FOLDER"):
        ExperimentRun("masking", out=tmp_path)
    with pytest.raises(TaskError, match="there is nothing there"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(tmp_path / "none.txt"))
    with pytest.raises(TaskError, match="give the folder of the labelled tasks with --tasks"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(text))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(TaskError, match=r"--text .*empty.txt: this file is empty"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(tmp_path / "empty.txt"))
    with pytest.raises(TaskError, match="no folder SST-2 or glue/SST-2 there for sst-2"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(text, tasks_dir=tmp_path))
    with pytest.raises(SettingsError, match="only features, pooling, context, positions take"):
        ExperimentRun("masking", out=tmp_path, sources=Sources(text, model="x"))
    with pytest.raises(ModelError, match="nowhere"):
        ExperimentRun("positions", out=tmp_path, sources=Sources(model=str(tmp_path / "nowhere")))
    with pytest.raises(RunError, match="this is a file"):
        ExperimentRun("masking", scale="smoke", out=text)


def test_the_toy_is_the_same_every_time(tmp_path: Path) -> None:
    """Two folders have the same bytes; what is given is kept."""
    first, second = (fill_missing_sources(Sources(), tmp_path / name) for name in ("a", "b"))

    def content(own: Sources) -> list[bytes]:
        assert own.english is not None
        assert own.tasks_dir is not None
        files = sorted(path for path in own.english.parent.rglob("*") if path.is_file())
        return [path.read_bytes() for path in files]

    assert content(first) == content(second)
    assert fill_missing_sources(Sources(english=tmp_path), tmp_path / "a").english == tmp_path


def test_files_of_a_task_are_found(tmp_path: Path) -> None:
    """A part of a training file under a name that begins like its own stands in for it."""
    folder = tmp_path / "squad"
    folder.mkdir()
    for name in ("train-v1.1-some.json", "dev-v1.1.json"):
        articles = [{"title": number, "paragraphs": []} for number in range(1, 6)]
        (folder / name).write_text(json.dumps({"version": "1", "data": articles}))
    train, dev = Sources(tasks_dir=tmp_path).task_files("squad")
    assert (train.name, dev.name) == ("train-v1.1-some.json", "dev-v1.1.json")
    cut = subsample_squad(dev, 2, tmp_path / "cut.json")
    told = json.loads(cut.read_text())
    assert told["version"] == "1"
    assert [own["title"] for own in told["data"]] == [1, 3, 5]
    kit = StageFactory(SCALES["small"], Sources(tasks_dir=tmp_path), tmp_path / "work")
    found = kit._files("squad")
    assert [path.parent for path in found] == [tmp_path / "work" / "tasks"] * 2
    dev.write_text(json.dumps({"version": "2", "data": articles[:1]}))
    assert json.loads(kit._files("squad")[1].read_text())["version"] == "2"
