"""Lab results, work directories and reports of version 0.1 are still used."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.compatibility.lab import downgrade_stage_name, upgrade_lab_record
from bertsmith.errors import RunError
from bertsmith.files import write_json
from bertsmith.lab import stage as stage_module
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import learning
from bertsmith.lab.experiments.context import create_senses_stage
from bertsmith.lab.results import ResultsFile
from bertsmith.lab.runner import Runner
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stage import Stage
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.toy_language import fill_missing_sources
from bertsmith.progress import NullProgress
from tests.lab.number_stages import run_number_stage

OLD_RESULTS = Path(__file__).parent / "fixtures" / "v0.1" / "results.jsonl"
OLD_RECORDS: list[dict[str, Any]] = [
    json.loads(line) for line in OLD_RESULTS.read_text(encoding="utf-8").splitlines()
]
OLD_NAMES = [record["name"] for record in OLD_RECORDS]
CURRENT_RECORDS = {record["name"]: upgrade_lab_record(record) for record in OLD_RECORDS}


class RecordedStage(Stage):
    """A stage with a known name but unknown settings."""

    def __init__(self, name: str) -> None:
        """Set kind and key from the name."""
        kind, _, key = name.rpartition("-")
        super().__init__(kind, {})
        # Set the cached property, which cannot be computed without settings.
        self.__dict__["key"] = key


@pytest.fixture(autouse=True)
def _ignore_changed_initializations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give runs their old keys, although their initialization has changed since then."""
    monkeypatch.setattr(stage_module, "_INITIALIZATION_CHANGES", {})


@pytest.fixture
def factory(tmp_path: Path) -> StageFactory:
    """Return a factory at scale "smoke" with toy files."""
    sources = fill_missing_sources(Sources(), tmp_path / "toy")
    return StageFactory(SCALES["smoke"], sources, tmp_path)


@pytest.mark.parametrize("name", [record["name"] for record in OLD_RECORDS if not record["files"]])
def test_recorded_settings_give_the_recorded_hash(name: str) -> None:
    """The hash of a stage has not changed, although its kind and settings were renamed."""
    record = CURRENT_RECORDS[name]
    dependencies: dict[str, Stage] = {
        role: RecordedStage(dependency) for role, dependency in record["dependencies"].items()
    }
    stage = Stage(record["kind"], record["settings"], dependencies)
    assert stage.key == name.rpartition("-")[2]
    assert downgrade_stage_name(stage.name) == name


def test_stages_have_the_hashes_of_version_0_1(factory: StageFactory) -> None:
    """Stages at scale "smoke" have the names that version 0.1 (commit 6675940) gave them."""
    run = factory.create_baseline_run()
    predictions = learning.EXPERIMENT.build_stages(factory)["predictions", 0]
    stages = [
        factory.create_text_stage(),
        factory.create_vocabulary_stage(),
        factory.create_store_stage(),
        run,
        factory.create_initialized_model(run),
        factory.create_finetuning_run(run, "mrpc"),
        create_senses_stage(factory, "en", 0),
        predictions,
    ]
    assert [downgrade_stage_name(stage.name) for stage in stages] == [
        "text-b3201d3cc6fc", "words-e5d765d879cc", "store-fccfeace82aa", "pretrain-e65e32acc7d8",
        "begun-3189a6981b16", "finetune-33e600e63ef5", "senses-2fb49a397eb6",
        "filled-89034c7d2193",
    ]  # fmt: skip


@pytest.mark.parametrize("name", OLD_NAMES)
def test_upgraded_record_keeps_all_numbers(name: str) -> None:
    """Upgrading a record changes names only. Upgrading it again changes nothing."""
    old = next(record for record in OLD_RECORDS if record["name"] == name)
    current = CURRENT_RECORDS[name]
    assert _list_numbers(current) == _list_numbers(old)
    assert upgrade_lab_record(current) == current


def _list_numbers(value: Any) -> list[float]:
    """Return all numbers of a JSON value in their order."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in _list_numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in _list_numbers(item)]
    return [value] if isinstance(value, int | float) else []


def test_results_file_of_version_0_1_is_read() -> None:
    """Records are found under the current name of their stage, with current field names."""
    messages: list[str] = []
    results = ResultsFile(OLD_RESULTS, messages.append)
    records = [results.get(record["name"]) for record in CURRENT_RECORDS.values()]
    assert records == list(CURRENT_RECORDS.values())
    assert messages == []
    old_predictions = next(record for record in OLD_RECORDS if record["kind"] == "filled")
    predictions = CURRENT_RECORDS[old_predictions["name"]]
    assert predictions["result"] == {"predictions": old_predictions["result"]["filled"]}
    assert predictions["settings"]["top_k"] == old_predictions["settings"]["top"]
    (old_model,) = old_predictions["needs"].values()
    assert predictions["dependencies"] == {"model": old_model.replace("begun", "initialized-model")}


def test_work_directory_of_version_0_1_is_used(tmp_path: Path) -> None:
    """A stage whose output exists under its old names is not computed again."""
    base = Stage("vocabulary", {})
    dependent = Stage("number", {"add": 10}, {"vocabulary": base})
    folder = tmp_path / "work" / f"words-{base.key}"
    record = {
        "kind": "words",
        "needs": {},
        "settings": {},
        "result": {"words": 5},
        "outcome": True,
        "date": "2026-11-23",
        "machine": {"auto": "cpu, bf16"},
    }
    write_json(folder / "result.json", record)
    functions = {"number": run_number_stage}
    runner = Runner(tmp_path / "out", tmp_path / "work", NullProgress(), functions)
    # The record says that the stage has an output, but the file is missing.
    assert runner.find_missing_stages([dependent]) == [base, dependent]
    (folder / "outcome").write_text("5")
    assert runner.find_missing_stages([dependent]) == [dependent]
    runner.run_stages({"base": base, "dependent": dependent})
    assert runner.get_result(base) == {"vocab_size": 5}
    # 1 + the input + the setting "add".
    assert runner.get_result(dependent) == {"value": 1 + 5 + 10}
    provenance = runner.results.get(dependent.name)["input_provenance"]  # type: ignore[index]
    assert provenance["vocabulary"]["machine"] == {"auto_device": "cpu, bf16"}


def test_interrupted_stage_of_version_0_1_resumes_in_its_directory(tmp_path: Path) -> None:
    """An output without a record belongs to an interrupted stage, which continues to write it."""
    stage = Stage("vocabulary", {})
    folder = tmp_path / "work" / f"words-{stage.key}"
    folder.mkdir(parents=True)
    (folder / "outcome").write_text("0")
    functions = {"vocabulary": run_number_stage}
    runner = Runner(tmp_path / "out", tmp_path / "work", NullProgress(), functions)
    runner.run_stages({"a": stage})
    # A number stage without inputs and settings writes 1.
    assert (folder / "outcome").read_text() == "1"
    assert [path.name for path in (tmp_path / "work").iterdir() if path.is_dir()] == [folder.name]


def test_model_report_of_version_0_1_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that version 0.1 wrote for another model is not replaced."""
    monkeypatch.setattr("bertsmith.lab.experiment_run.locate_model", Path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    write_json(tmp_path / "lab/smoke/given-positions.json", {"model_hash": "of another model"})
    sources = Sources(model=str(tmp_path / "model"))
    with pytest.raises(RunError, match="is the report of another model"):
        ExperimentRun("positions", scale="smoke", out=tmp_path / "lab", sources=sources)
