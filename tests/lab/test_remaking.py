"""Made again, or by two at once: nothing half made stands, nothing that stood is lost."""

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
from bertsmith.lab.stage_runners import OUTPUT, Job
from bertsmith.progress import NullProgress
from tests.lab.helpers import RecordingProgress
from tests.lab.number_stages import make_runner, read_records, run_number_stage


def test_half_of_what_is_made_again_does_not_stand(tmp_path: Path) -> None:
    """A result without its work: whoever kills the work's remaking finds half of an outcome."""
    base = Stage("number", {})
    make_runner(tmp_path).run_stages({"base": base})
    shutil.rmtree(tmp_path / "work")
    # As a run has its folder from its first step on.
    half = tmp_path / "work" / base.name / OUTPUT
    half.parent.mkdir(parents=True)
    half.write_text("no number")
    made = make_runner(tmp_path)
    wanted = {"a": Stage("number", {"add": 10}, {"base": base})}
    assert made.missing_stages(wanted.values()) == [base, wanted["a"]]
    made.run_stages(wanted)
    assert made.failures == {}
    assert made.get_result(wanted["a"]) == {"value": 12}


def test_what_is_made_again_is_told_beside_what_stood(tmp_path: Path) -> None:
    """The first result stays, for others were made of it; that it came out otherwise is told."""
    loss = 5.0

    def score(job: Job) -> dict[str, Any]:
        (job.folder / OUTPUT).write_text("1")
        return {"heldout": {"masked_lm": loss, "other": float("nan")}, "more": [1]}

    base = Stage("score", {})
    heard = RecordingProgress()

    def once(add: int) -> dict[str, Any]:
        makers = {"score": score, "number": run_number_stage}
        made = Runner(tmp_path / "out", tmp_path / "work", heard, makers)
        made.run_stages({"a": Stage("number", {"add": add}, {"base": base})})
        shutil.rmtree(tmp_path / "work")
        return read_records(made.results_dir)[base.name]

    assert "again" not in once(1)
    assert [own["heldout"]["masked_lm"] for own in once(2)["again"]] == [5.0]
    assert not [line for line in heard.messages if "not the same" in line]
    loss = 5.1
    record = once(3)
    assert record["result"]["heldout"]["masked_lm"] == 5.0
    assert [own["heldout"]["masked_lm"] for own in record["again"]] == [5.0, 5.1]
    assert len([line for line in heard.messages if "made again, not the same" in line]) == 1


@pytest.mark.parametrize("has_work", [True, False], ids=["with its work", "alone"])
@pytest.mark.parametrize("line", ["", '{"na', "[]", '{"name": "NAME", "result": 3}'])
def test_a_damaged_result_is_made_again(line: str, has_work: bool, tmp_path: Path) -> None:
    """A damaged line counts as missing; if its work is still there, nothing is computed again."""
    num_calls = 0

    def counting_maker(job: Job) -> dict[str, Any]:
        nonlocal num_calls
        num_calls += 1
        return run_number_stage(job)

    def new_bench() -> Runner:
        return Runner(
            tmp_path / "out", tmp_path / "work", NullProgress(), {"number": counting_maker}
        )

    stage = Stage("number", {"add": 1})
    new_bench().run_stages({"a": stage})
    (tmp_path / "out" / RESULTS_FILE).write_text(line.replace("NAME", stage.name))
    if not has_work:
        shutil.rmtree(tmp_path / "work")
    made = new_bench()
    assert made.get_result(stage) is None
    assert made.missing_stages([stage]) == ([] if has_work else [stage])
    made.run_stages({"a": stage})
    assert made.get_result(stage) == {"value": 2}
    assert new_bench().get_result(stage) == {"value": 2}
    assert num_calls == (1 if has_work else 2)


def test_a_truncated_last_line_loses_only_itself(tmp_path: Path) -> None:
    """After a kill in the middle of a write, other results stay and new ones can be appended."""
    stages = {str(add): Stage("number", {"add": add}) for add in range(3)}
    make_runner(tmp_path).run_stages(stages)
    path = tmp_path / "out" / RESULTS_FILE
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    log = RecordingProgress()
    made = Runner(tmp_path / "out", tmp_path / "work", log, {"number": run_number_stage})
    assert [made.get_result(stage) for stage in stages.values()] == [
        {"value": 1},
        {"value": 2},
        None,
    ]
    assert [line for line in log.messages if "the last line is incomplete" in line]
    made.run_stages(stages)
    assert [make_runner(tmp_path).get_result(stage) for stage in stages.values()] == [
        {"value": 1}, {"value": 2}, {"value": 3},
    ]  # fmt: skip
    assert path.read_bytes().startswith(content[:-20] + b"\n")


def test_results_of_version_0_1_are_read(tmp_path: Path) -> None:
    """The single files of version 0.1 count as results, with a message; new ones go to the log."""
    old, new = Stage("number", {"add": 1}), Stage("number", {"add": 2})
    make_runner(tmp_path).run_stages({"old": old})
    record = read_records(tmp_path / "out")[old.name]
    (tmp_path / "out" / RESULTS_FILE).unlink()
    shutil.rmtree(tmp_path / "work")
    write_json(tmp_path / "out" / "results" / f"{old.name}.json", record)
    log = RecordingProgress()
    made = Runner(tmp_path / "out", tmp_path / "work", log, {"number": run_number_stage})
    made.run_stages({"old": old, "new": new})
    assert (made.get_result(old), made.get_result(new)) == ({"value": 2}, {"value": 3})
    assert list(read_records(tmp_path / "out")) == [new.name]
    assert [line for line in log.messages if "reading results of version 0.1" in line]


def test_what_was_left_and_is_gone_is_made_again(tmp_path: Path) -> None:
    """Whoever removes an outcome for its room, and leaves the rest, has it made again."""
    base = Stage("number", {})
    make_runner(tmp_path).run_stages({"base": base})
    (tmp_path / "work" / base.name / OUTPUT).unlink()
    made = make_runner(tmp_path)
    made.run_stages({"a": Stage("number", {"add": 10}, {"base": base})})
    assert made.failures == {}


def test_a_run_that_diverges_when_made_again_is_a_failure(tmp_path: Path) -> None:
    """What others were made of is no finding of theirs; it is tried anew each time."""
    diverges = False

    def run(job: Job) -> dict[str, Any]:
        if diverges:
            return {"diverged": "the loss is nan"}
        return run_number_stage(job)

    def made(add: int) -> Runner:
        own = Runner(
            tmp_path / "out",
            tmp_path / "work",
            NullProgress(),
            {"run": run, "number": run_number_stage},
        )
        own.run_stages({"a": Stage("number", {"add": add}, {"base": base})})
        return own

    base = Stage("run", {})
    made(1)
    shutil.rmtree(tmp_path / "work")
    diverges = True
    assert "made again it diverged" in made(2).failures[base.name]
    diverges = False
    assert made(2).failures == {}


def test_a_place_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    """A file where a stage's folder should be is that stage's failure and no other's."""
    stages = {name: Stage("number", {"add": add}) for add, name in enumerate("ab")}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / stages["a"].name).write_text("in the way")
    made = make_runner(tmp_path)
    made.run_stages(stages)
    assert "File exists" in made.failures[stages["a"].name]
    assert made.get_result(stages["b"]) == {"value": 2}
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RESULTS_FILE).mkdir()
    other = make_runner(tmp_path)
    other.run_stages(stages)
    assert other.failures.keys() == {own.name for own in stages.values()}


def test_two_processes_share_their_results(tmp_path: Path) -> None:
    """What is made and not kept is not made a second time either."""
    made: list[str] = []

    def slow(job: Job) -> dict[str, Any]:
        made.append(job.stage.name)
        time.sleep(0.3)
        return {"figures": {}}

    stages = {str(add): Stage("finetune", {"add": add}) for add in range(3)}
    threads = [
        threading.Thread(
            target=Runner(
                tmp_path / "out", tmp_path / "work", NullProgress(), {"finetune": slow}
            ).run_stages,
            args=(stages,),
        )
        for _ in range(2)
    ]
    for own in threads:
        own.start()
    for own in threads:
        own.join()
    assert sorted(made) == sorted(own.name for own in stages.values())


def test_two_processes_share_their_work(tmp_path: Path) -> None:
    """The second one waits for a stage that the first one makes, and takes what it made."""
    made: list[str] = []

    def slow(job: Job) -> dict[str, Any]:
        made.append(job.stage.name)
        time.sleep(0.5)
        return run_number_stage(job)

    base = Stage("slow", {})
    wanted = [Stage("number", {"add": add}, {"base": base}) for add in (1, 2)]
    benches = [Runner(tmp_path / name, tmp_path / "work", NullProgress(), {"slow": slow, "number": run_number_stage})
               for name in ("one", "two")]  # fmt: skip
    threads = [threading.Thread(target=own.run_stages, args=({"x": stage},))
               for own, stage in zip(benches, wanted, strict=True)]  # fmt: skip
    for own in threads:
        own.start()
    for own in threads:
        own.join()
    assert made == [base.name]
    assert [own.failures for own in benches] == [{}, {}]
    assert [own.get_result(base) for own in benches] == [{"value": 1}] * 2
    assert [own.get_result(stage) for own, stage in zip(benches, wanted, strict=True)] == [
        {"value": 3}, {"value": 4},
    ]  # fmt: skip


def test_half_a_result_counts_as_missing(tmp_path: Path) -> None:
    """What a kind must hold and does not, no report is asked to tell."""
    laboratory = ExperimentRun("activations", scale="smoke", out=tmp_path)
    stage = next(iter(laboratory.stages.values()))
    halves: list[dict[str, Any]] = [
        {"result": {}},
        {"kind": "pretrain", "result": {"heldout": {"masked_lm": 4.1}}},
    ]
    for half in halves:
        laboratory.runner.results.append(stage.name, half)
        assert laboratory.runner.get_result(stage) is None
    assert laboratory.write_report().num_missing == 4
