"""Tests that results stay consistent if stages run again or in several processes."""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bertsmith.files import write_json
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.results import RESULTS_FILE
from bertsmith.lab.runner import Runner
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import OUTPUT, Job, StageFunction
from bertsmith.progress import NullProgress
from tests.lab.helpers import RecordingProgress
from tests.lab.number_stages import make_runner, read_records, run_number_stage


def make_runner_with(folder: Path, **stage_functions: StageFunction) -> Runner:
    """Return a runner with further kinds of stages in addition to "number"."""
    functions = {"number": run_number_stage, **stage_functions}
    return Runner(folder / "out", folder / "work", NullProgress(), functions)


def test_incomplete_output_is_not_used(tmp_path: Path) -> None:
    """An output without a record may be incomplete, so its stage runs again."""
    base = Stage("number", {})
    make_runner(tmp_path).run_stages({"base": base})
    shutil.rmtree(tmp_path / "work")
    output = tmp_path / "work" / base.name / OUTPUT
    output.parent.mkdir(parents=True)
    output.write_text("no number")
    runner = make_runner(tmp_path)
    stages = {"a": Stage("number", {"add": 10}, {"base": base})}
    assert runner.find_missing_stages(stages.values()) == [base, stages["a"]]
    runner.run_stages(stages)
    assert runner.failures == {}
    # The value is 1 + the value of base + "add".
    assert runner.get_result(stages["a"]) == {"value": 1 + 1 + 10}


def test_changed_data_is_not_mixed_with_stored_results(tmp_path: Path) -> None:
    """If a store differs from that of the stored results, its stage and its dependents fail."""
    num_tokens = 100

    def build_store(job: Job) -> dict[str, Any]:
        job.output.write_text(str(num_tokens))
        return {"splits": {"train": {"tokens": num_tokens}}, "characters": 500}

    store = Stage("my-store", {})
    for add in range(2):
        runner = make_runner_with(tmp_path, **{"my-store": build_store})
        dependent = Stage("number", {"add": add}, {"store": store})
        runner.run_stages({"a": dependent})
        if add == 0:
            assert runner.get_result(dependent) == {"value": 101}
            shutil.rmtree(tmp_path / "work")
            num_tokens = 99
    assert "99}} instead of {'train': {'tokens': 100}}" in runner.failures[store.name]
    assert "give other folders for --results and --work" in runner.failures[store.name]
    assert runner.get_result(dependent) is None
    # The changed store is not used by the next call either.
    assert not runner._has_result_and_output(store)


def test_results_of_reruns_are_added_to_the_first(tmp_path: Path) -> None:
    """The first result is kept, and the metrics of later runs are added and compared."""
    loss = 5.0

    def run_score_stage(job: Job) -> dict[str, Any]:
        job.output.write_text("1")
        return {"heldout_metrics": {"mlm_loss": loss, "perplexity": float("nan")}, "curve": [1]}

    base = Stage("score", {})
    progress = RecordingProgress()

    def run_base(add: int) -> dict[str, Any]:
        """Run a stage that depends on ``base``, delete all outputs, and return base's record."""
        functions = {"score": run_score_stage, "number": run_number_stage}
        runner = Runner(tmp_path / "out", tmp_path / "work", progress, functions)
        runner.run_stages({"a": Stage("number", {"add": add}, {"base": base})})
        shutil.rmtree(tmp_path / "work")
        return read_records(runner.results_dir)[base.name]

    assert "reruns" not in run_base(1)
    assert [rerun["heldout_metrics"]["mlm_loss"] for rerun in run_base(2)["reruns"]] == [5.0]
    assert not [line for line in progress.messages if "differ" in line]
    loss = 5.1
    record = run_base(3)
    assert record["result"]["heldout_metrics"]["mlm_loss"] == 5.0
    assert [rerun["heldout_metrics"]["mlm_loss"] for rerun in record["reruns"]] == [5.0, 5.1]
    messages = [line for line in progress.messages if "differ from the first run" in line]
    assert len(messages) == 1


@pytest.mark.parametrize("has_work", [True, False], ids=["output exists", "output deleted"])
@pytest.mark.parametrize("line", ["", '{"na', "[]", '{"name": "NAME", "result": 3}'])
def test_damaged_result_counts_as_missing(line: str, has_work: bool, tmp_path: Path) -> None:
    """A stage with a damaged result is computed again only if its output was deleted."""
    num_calls = 0

    def count_call(job: Job) -> dict[str, Any]:
        nonlocal num_calls
        num_calls += 1
        return run_number_stage(job)

    stage = Stage("number", {"add": 1})
    make_runner_with(tmp_path, number=count_call).run_stages({"a": stage})
    (tmp_path / "out" / RESULTS_FILE).write_text(line.replace("NAME", stage.name))
    if not has_work:
        shutil.rmtree(tmp_path / "work")
    runner = make_runner_with(tmp_path, number=count_call)
    assert runner.get_result(stage) is None
    assert runner.find_missing_stages([stage]) == ([] if has_work else [stage])
    runner.run_stages({"a": stage})
    assert runner.get_result(stage) == {"value": 2}
    assert make_runner(tmp_path).get_result(stage) == {"value": 2}
    assert num_calls == (1 if has_work else 2)


def test_truncated_last_line_loses_only_itself(tmp_path: Path) -> None:
    """If a process is killed while it writes, other results remain and new ones are appended."""
    stages = {str(add): Stage("number", {"add": add}) for add in range(3)}
    make_runner(tmp_path).run_stages(stages)
    path = tmp_path / "out" / RESULTS_FILE
    content = path.read_bytes()
    # Remove the end of the last record.
    path.write_bytes(content[:-20])
    progress = RecordingProgress()
    functions = {"number": run_number_stage}
    runner = Runner(tmp_path / "out", tmp_path / "work", progress, functions)
    results = [runner.get_result(stage) for stage in stages.values()]
    assert results == [{"value": 1}, {"value": 2}, None]
    assert [line for line in progress.messages if "the last line is incomplete" in line]
    runner.run_stages(stages)
    assert [make_runner(tmp_path).get_result(stage) for stage in stages.values()] == [
        {"value": 1},
        {"value": 2},
        {"value": 3},
    ]
    assert path.read_bytes().startswith(content[:-20] + b"\n")


def test_single_file_results_of_version_0_1_are_read(tmp_path: Path) -> None:
    """Version 0.1 wrote one file per result. These are read; new results go to the results file."""
    old, new = Stage("number", {"add": 1}), Stage("number", {"add": 2})
    make_runner(tmp_path).run_stages({"old": old})
    record = read_records(tmp_path / "out")[old.name]
    (tmp_path / "out" / RESULTS_FILE).unlink()
    shutil.rmtree(tmp_path / "work")
    write_json(tmp_path / "out" / "results" / f"{old.name}.json", record)
    progress = RecordingProgress()
    functions = {"number": run_number_stage}
    runner = Runner(tmp_path / "out", tmp_path / "work", progress, functions)
    runner.run_stages({"old": old, "new": new})
    assert (runner.get_result(old), runner.get_result(new)) == ({"value": 2}, {"value": 3})
    assert list(read_records(tmp_path / "out")) == [new.name]
    assert [line for line in progress.messages if "reading results of version 0.1" in line]


def test_deleted_output_is_computed_again(tmp_path: Path) -> None:
    """If only the output was deleted, the stage runs again when another stage reads the output."""
    base = Stage("number", {})
    make_runner(tmp_path).run_stages({"base": base})
    (tmp_path / "work" / base.name / OUTPUT).unlink()
    runner = make_runner(tmp_path)
    runner.run_stages({"a": Stage("number", {"add": 10}, {"base": base})})
    assert runner.failures == {}


def test_run_that_diverges_only_the_second_time_fails(tmp_path: Path) -> None:
    """Stages that depend on the run fail too, and the next call tries all of them again."""
    diverges = False

    def run_training(job: Job) -> dict[str, Any]:
        return {"diverged": "the loss is nan"} if diverges else run_number_stage(job)

    def run_dependent(add: int) -> Runner:
        runner = make_runner_with(tmp_path, run=run_training)
        runner.run_stages({"a": Stage("number", {"add": add}, {"base": base})})
        return runner

    base = Stage("run", {})
    run_dependent(1)
    shutil.rmtree(tmp_path / "work")
    diverges = True
    assert "ran again and diverged" in run_dependent(2).failures[base.name]
    diverges = False
    assert run_dependent(2).failures == {}


def test_unwritable_stage_directory_fails_only_its_stage(tmp_path: Path) -> None:
    """If there is a file in place of a stage's directory, only that stage fails."""
    stages = {name: Stage("number", {"add": add}) for add, name in enumerate("ab")}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / stages["a"].name).write_text("not a directory")
    runner = make_runner(tmp_path)
    runner.run_stages(stages)
    assert "File exists" in runner.failures[stages["a"].name]
    assert runner.get_result(stages["b"]) == {"value": 2}


def test_unwritable_results_file_fails_all_stages(tmp_path: Path) -> None:
    """If there is a directory in place of the results file, every stage fails."""
    stages = {name: Stage("number", {"add": add}) for add, name in enumerate("ab")}
    (tmp_path / "out" / RESULTS_FILE).mkdir(parents=True)
    runner = make_runner(tmp_path)
    runner.run_stages(stages)
    assert runner.failures.keys() == {stage.name for stage in stages.values()}


def run_in_parallel(runners: list[Runner], stages: list[dict[str, Stage]]) -> None:
    """Run the stages of each runner in a separate thread."""
    threads = [
        threading.Thread(target=runner.run_stages, args=(runner_stages,))
        for runner, runner_stages in zip(runners, stages, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_runners_share_their_results(tmp_path: Path) -> None:
    """A stage without an output runs once if two runners need its result at the same time."""
    started: list[str] = []

    def run_slowly(job: Job) -> dict[str, Any]:
        started.append(job.stage.name)
        time.sleep(0.3)
        return {"metric_names": [], "metrics": {}}

    stages = {str(add): Stage("finetune", {"add": add}) for add in range(3)}
    runners = [make_runner_with(tmp_path, finetune=run_slowly) for _ in range(2)]
    run_in_parallel(runners, [stages, stages])
    assert sorted(started) == sorted(stage.name for stage in stages.values())


def test_two_runners_share_their_outputs(tmp_path: Path) -> None:
    """While the first runner runs a stage, the second one waits, and then reads the output."""
    started: list[str] = []

    def run_slowly(job: Job) -> dict[str, Any]:
        started.append(job.stage.name)
        time.sleep(0.5)
        return run_number_stage(job)

    base = Stage("slow", {})
    dependents = [Stage("number", {"add": add}, {"base": base}) for add in (1, 2)]
    functions = {"slow": run_slowly, "number": run_number_stage}
    runners = [
        Runner(tmp_path / name, tmp_path / "work", NullProgress(), functions)
        for name in ("one", "two")
    ]
    run_in_parallel(runners, [{"x": stage} for stage in dependents])
    assert started == [base.name]
    assert [runner.failures for runner in runners] == [{}, {}]
    assert [runner.get_result(base) for runner in runners] == [{"value": 1}] * 2
    results = [runner.get_result(stage) for runner, stage in zip(runners, dependents, strict=True)]
    assert results == [{"value": 3}, {"value": 4}]


def test_incomplete_result_counts_as_missing(tmp_path: Path) -> None:
    """A record without the required fields of its kind counts as missing in reports."""
    run = ExperimentRun("activations", scale="smoke", out=tmp_path)
    stage = next(iter(run.stages.values()))
    incomplete: list[dict[str, Any]] = [
        {"result": {}},
        {"kind": "pretrain", "result": {"heldout_metrics": {"mlm_loss": 4.1}}},
    ]
    for record in incomplete:
        run.runner.results.append(stage.name, record)
        assert run.runner.get_result(stage) is None
    # All four activation functions are missing.
    assert run.write_report().num_missing == 4
