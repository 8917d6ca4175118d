"""The panel: results, resuming, untrained baselines and the plan."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.bundle import load
from bertsmith.cli.panel import DEFAULT_LEARNING_RATE
from bertsmith.errors import MissingExtraError, SettingsError, StoppedError, TaskError
from bertsmith.files import dump_json
from bertsmith.lab import stage_runners
from bertsmith.lab.panel import cost, stage_functions
from bertsmith.lab.panel.cells import CellKey, PanelOptions
from bertsmith.lab.panel.models import PanelModel, load_models
from bertsmith.lab.panel.panel import Panel
from bertsmith.lab.panel.table import build_json, read_table
from bertsmith.lab.panel.tasks import LEARNING_RATE, TASKS, select_tasks
from bertsmith.lab.results import RESULTS_FILE
from bertsmith.lab.stage_runners import Job, StageFunction
from bertsmith.model.config import ModelConfig
from tests.lab.panel.conftest import write_model

#: Tasks without logistic regression.
NAMES = ("held-out", "minimal-pairs", "sst-2-1k", "rte")


def make_panel(
    models: list[Path], data: Path, out: Path, names: tuple[str, ...] = NAMES, **options: Any
) -> Panel:
    """Return a panel with two seeds on the test data."""
    tasks = select_tasks(names, has_text=True, has_minimal_pairs=True)
    return Panel(models, tasks, data=data, text=data / "text.txt",
                 minimal_pairs=[data / "pairs.jsonl"], out=out,
                 options=PanelOptions(num_seeds=2), **options)  # fmt: skip


def count_stage_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each stage is added when it runs."""
    runs: list[str] = []
    functions = (stage_runners.STAGE_FUNCTIONS, stage_functions.PANEL_STAGE_FUNCTIONS)
    for kinds in functions:
        for kind, function in list(kinds.items()):

            def record(job: Job, function: StageFunction = function) -> dict[str, Any]:
                runs.append(job.stage.name)
                return function(job)

            monkeypatch.setitem(kinds, kind, record)
    return runs


def test_table_has_all_models_and_the_untrained_baseline(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """Two models of one architecture share an untrained model; every measure has a value."""
    panel = make_panel(model_dirs, data, tmp_path, (*NAMES, "probe"))
    outcome = panel.run()
    names = ["first", "second", "untrained, 1 x 8, 124 tokens"]
    assert [model["name"] for model in outcome.data["models"]] == names
    header, _, *rows = outcome.markdown.splitlines()[2:11]
    assert header == f"| measure | {' | '.join(names)} |"
    assert [row.split(" | ")[0] for row in rows] == [
        "| held-out masked-LM loss, nats", "| held-out bits per character",
        "| minimal pairs, accuracy", "| minimal pairs, accuracy (within-word)",
        "| SST-2, 1,000 examples, accuracy", "| RTE, accuracy", "| frozen [CLS], SST-2, accuracy",
    ]  # fmt: skip
    assert "learning rate 0.0001, batch size 32" in outcome.markdown
    assert not outcome.failures
    assert outcome.num_missing == 0
    accuracy = outcome.data["results"]["first"]["sst-2-1k"]["accuracy"]
    assert len(accuracy["values"]) == 2
    assert accuracy["mean"] == pytest.approx(sum(accuracy["values"]) / 2)
    assert json.loads((tmp_path / "panel.json").read_text()) == json.loads(json.dumps(outcome.data))


def test_finished_cells_are_not_computed_again(
    model_dirs: list[Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated panel runs nothing; another model adds only its own cells."""
    first = make_panel(model_dirs[:1], data, tmp_path, ("rte",)).run()
    runs = count_stage_runs(monkeypatch)
    repeated = make_panel(model_dirs[:1], data, tmp_path, ("rte",)).run()
    assert not runs
    assert repeated.data["results"] == first.data["results"]
    make_panel(model_dirs, data, tmp_path, ("rte",)).run()
    assert len(runs) == 2


def test_truncated_last_line_loses_only_its_cell(
    model_dirs: list[Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process was killed while it wrote a record, only that cell is computed again."""
    panel = make_panel(model_dirs[:1], data, tmp_path, ("rte", "held-out"), with_untrained=False)
    expected = panel.run().data["results"]
    results_file = tmp_path / RESULTS_FILE
    results_file.write_bytes(results_file.read_bytes()[:-20])
    runs = count_stage_runs(monkeypatch)
    panel = make_panel(model_dirs[:1], data, tmp_path, ("rte", "held-out"), with_untrained=False)
    assert panel.run().data["results"] == expected
    assert runs == [panel.cells[CellKey("first", "rte", 1)].name]


def test_results_do_not_depend_on_the_order_of_models(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """Models in the other order have the same results, also their untrained baseline."""
    outcomes = [
        make_panel(models, data, tmp_path / str(number), ("rte", "minimal-pairs")).run()
        for number, models in enumerate((model_dirs, model_dirs[::-1]))
    ]
    assert outcomes[0].data["results"] == outcomes[1].data["results"]
    names = [model["name"] for model in outcomes[1].data["models"]]
    assert names[:2] == ["second", "first"]


def test_untrained_models_are_deterministic_and_differ_by_seed(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """The weights of an untrained model depend on the architecture and the seed alone."""
    weights = []
    for number, models in enumerate((model_dirs[:1], model_dirs[1:])):
        panel = make_panel(models, data, tmp_path / str(number), ("rte",))
        label = panel.models[-1].label
        for seed in range(2):
            stage = panel.cells[CellKey(label, "rte", seed)].dependencies["model"]
            panel.runner.run_stages({"untrained": stage})
            path = tmp_path / str(number) / "work" / stage.name / "output"
            weights.append(load(path).model.bert.embeddings.words.weight)
    assert weights[0].equal(weights[2])
    assert weights[1].equal(weights[3])
    assert not weights[0].equal(weights[1])
    # A field that is not set would change the hash of results that were computed without it.
    assert None not in stage.settings["model"].values()


def test_each_architecture_has_an_untrained_model(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """Untrained models follow the models; --no-untrained leaves them out."""
    models = [*model_dirs, write_model(tmp_path / "wide", 3, width=12)]
    panel = make_panel(models, data, tmp_path, ("rte",))
    assert [model.label for model in panel.models] == [
        "first", "second", "wide", "untrained, 1 x 8, 124 tokens", "untrained, 1 x 12, 124 tokens",
    ]  # fmt: skip
    panel = make_panel(models, data, tmp_path, ("rte",), with_untrained=False)
    assert [model.label for model in panel.models] == ["first", "second", "wide"]


def test_untrained_model_has_the_initialization_of_the_trained_one(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """Scores of heads that were set by hand are not attributed to pre-training."""
    paths = []
    for name, start in (("new", {}), ("continued", {"start_from": "google-bert"})):
        info = {"provenance": {"settings": {"run": {"initialization": "match-heads"} | start}}}
        paths.append(write_model(tmp_path / name, 1, width=32, layers=2, info=info))
    panel = make_panel(paths, data, tmp_path, ("rte",))
    structured, random = panel.models[2:]
    assert structured.label == "untrained, 2 x 32, 124 tokens, match-heads"
    assert random.label == "untrained, 2 x 32, 124 tokens"
    queries = []
    for model in (structured, random):
        stage = panel.cells[CellKey(model.label, "rte", 0)].dependencies["model"]
        panel.runner.run_stages({"untrained": stage})
        untrained = load(tmp_path / "work" / stage.name / "output").model
        name = "bert.encoder.layers.0.attention.query_key_value.weight"
        queries.append(untrained.get_parameter(name).view(3, 2, 16, 32)[0])
    # The weights do not depend on the state of the global random generator.
    stage = panel.cells[CellKey(structured.label, "rte", 0)].dependencies["model"]
    folder = tmp_path / "work" / stage.name
    name = "bert.embeddings.positions.weight"
    weights = [load(folder / "output").model.get_parameter(name)]
    shutil.rmtree(folder)
    torch.manual_seed(7)
    panel.runner._run_with_dependencies(stage)
    weights.append(load(folder / "output").model.get_parameter(name))
    assert weights[0].equal(weights[1])
    # The second head of the first layer is set by hand, the first one is random.
    assert queries[0][0].equal(queries[1][0])
    assert not queries[0][1].equal(queries[1][1])


def test_interrupted_panel_writes_its_table_and_continues(
    model_dirs: list[Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C the finished results are in the table; a second call computes the others."""

    def interrupt(job: Job) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return stage_functions.measure_minimal_pairs(job)

    names = ("held-out", "minimal-pairs")
    with monkeypatch.context() as patch:
        patch.setitem(stage_functions.PANEL_STAGE_FUNCTIONS, "minimal-pairs", interrupt)
        with pytest.raises(StoppedError):
            make_panel(model_dirs, data, tmp_path, names).run()
    interrupted = json.loads((tmp_path / "panel.json").read_text())
    assert interrupted["results"]["first"]["held-out"]["mlm_loss"]["mean"] > 0
    assert "first, minimal-pairs, seed 0" in interrupted["missing"]
    assert make_panel(model_dirs, data, tmp_path, names).run().num_missing == 0


def test_plan_estimates_only_missing_cells(
    model_dirs: list[Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan lists tasks with missing cells and the duration of their steps."""
    monkeypatch.setattr(cost, "measure_step_seconds", lambda *_, **__: 2.0)
    monkeypatch.setattr(cost, "measure_forward_seconds", lambda *_: 0.0)
    panel = make_panel(model_dirs, data, tmp_path, ("rte", "held-out"))
    planned = {task.task.name: task for task in panel.plan()}
    assert planned["held-out"].num_cells == 3
    assert planned["rte"].num_cells == 6
    # One step of 24 examples in each epoch; a step of 32 sequences of the rounded length takes 2 s.
    files, model = panel._files["rte"], panel.models[0]
    _, length = cost._measure_lengths(model, TASKS["rte"], files["train"])
    assert 32 < length <= 48
    step_seconds = 2.0 * 24 * length / (32 * 48)
    epochs = TASKS["rte"].epochs
    assert planned["rte"].seconds == pytest.approx(6 * epochs * step_seconds)
    panel.run()
    assert make_panel(model_dirs, data, tmp_path, ("rte", "held-out")).plan() == []


def test_failed_cell_does_not_stop_the_others(
    model_dirs: list[Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is reported with the name of its cell, and the other cells have results."""

    def fail(job: Job) -> dict[str, Any]:
        raise OSError("the disk is full")

    monkeypatch.setitem(stage_functions.PANEL_STAGE_FUNCTIONS, "minimal-pairs", fail)
    names = ("held-out", "minimal-pairs")
    outcome = make_panel(model_dirs[:1], data, tmp_path, names, with_untrained=False).run()
    assert outcome.failures == {"first, minimal-pairs, seed 0": "OSError: the disk is full"}
    assert outcome.num_missing == 1
    assert outcome.data["results"]["first"]["held-out"]["mlm_loss"]["mean"] > 0


def test_groups_stand_for_their_tasks() -> None:
    """A group selects its labeled tasks, and the user's text and pairs; names are checked."""
    glue = select_tasks(["glue"], has_text=False, has_minimal_pairs=False)
    assert {task.public_task for task in glue} == {
        "cola", "mrpc", "rte", "sts-b", "sst-2", "qnli", "qqp", "mnli",
    }  # fmt: skip
    assert all(task.max_train_examples is None for task in glue)
    korean = select_tasks(["korean"], has_text=True, has_minimal_pairs=False)
    assert [task.name for task in korean] == ["held-out", "nsmc", "korsts", "klue-ner"]
    with pytest.raises(SettingsError, match="unknown task 'sst2'; expected: english, korean, glue"):
        select_tasks(["sst2"], has_text=False, has_minimal_pairs=False)


def test_missing_data_is_an_error_that_names_the_files(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """A missing folder or option is reported before anything runs."""
    expected = "no folder CoLA or glue/CoLA for cola; add CoLA/train.tsv and CoLA/dev.tsv"
    with pytest.raises(TaskError, match=expected):
        make_panel(model_dirs, data, tmp_path / "out", ("rte", "cola"))
    with pytest.raises(TaskError, match="a text, but --text is missing; pass --text"):
        Panel(model_dirs, [TASKS["held-out"]], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_without_effect_on_the_model_do_not_change_results(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new model card or released panel leaves the results valid; new weights do not."""
    model = write_model(tmp_path / "model-a", 1)
    make_panel([model], data, tmp_path / "out", ("held-out",), with_untrained=False).run()
    runs = count_stage_runs(monkeypatch)
    (model / "README.md").write_text("A model.")
    (model / "results").mkdir()
    (model / "results" / "panel.json").write_text("{}")
    make_panel([model], data, tmp_path / "out", ("held-out",), with_untrained=False).run()
    assert not runs
    write_model(model, 2)
    make_panel([model], data, tmp_path / "out", ("held-out",), with_untrained=False).run()
    assert len(runs) == 1


def test_labels_are_names_and_as_short_as_possible(tmp_path: Path) -> None:
    """Models on the hub have their id. Only equal names are followed by a commit or a folder."""
    folders = [
        "hub/models--owner--name/snapshots/" + "a" * 40,
        "hub/models--owner--other/snapshots/" + "b" * 40,
        "hub/models--owner--other/snapshots/" + "c" * 40,
        "first/run/model",
        "second/run/model",
        "first/single",
    ]
    paths = [write_model(tmp_path / folder, 1) for folder in folders]
    models = load_models([*paths, paths[0]], with_untrained=False)
    assert [model.label for model in models] == [
        "owner/name", "owner/other@" + "b" * 12, "owner/other@" + "c" * 12, "first/run",
        "second/run", "single",
    ]  # fmt: skip


def test_output_in_the_folder_of_the_text_is_rejected(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """The next panel would read its output as held-out text."""
    shutil.copy(data / "text.txt", tmp_path)
    with pytest.raises(TaskError, match=r"--text .*: this folder contains the output folder"):
        Panel(model_dirs, [TASKS["held-out"]], text=tmp_path, out=tmp_path / "panel")


def test_output_in_the_folder_of_minimal_pairs_is_rejected(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """The next panel would read its tables as minimal pairs; a subfolder is not read."""
    shutil.copy(data / "pairs.jsonl", tmp_path)
    tasks = [TASKS["minimal-pairs"]]
    with pytest.raises(TaskError, match=r"--minimal-pairs .*: this is also the output folder"):
        Panel(model_dirs, tasks, minimal_pairs=[tmp_path], out=tmp_path)
    Panel(model_dirs, tasks, minimal_pairs=[tmp_path], out=tmp_path / "panel")


def test_missing_scikit_learn_is_reported_before_the_probe_runs(
    model_dirs: list[Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a panel with results of the probe to compute needs scikit-learn."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"'scikit-learn', .*bertsmith\[lab\]"):
        make_panel(model_dirs, data, tmp_path, ("rte", "probe"))
    make_panel(model_dirs, data, tmp_path, ("rte",))


def test_files_of_minimal_pairs_with_equal_names_are_counted(
    model_dirs: list[Path], data: Path, tmp_path: Path
) -> None:
    """Files with the same name in two folders have an entry each."""
    (tmp_path / "more").mkdir()
    other = Path(shutil.copy(data / "pairs.jsonl", tmp_path / "more"))
    panel = Panel(model_dirs[:1], [TASKS["minimal-pairs"]], out=tmp_path / "out",
                  minimal_pairs=[data / "pairs.jsonl", other], with_untrained=False)  # fmt: skip
    assert "Minimal pairs: mean of 2 files, 6 pairs." in panel.run().data["notes"]


def test_advice_to_skip_invalid_pairs_names_its_command(
    model_dirs: list[Path], tmp_path: Path
) -> None:
    """--skip-invalid is an option of `evaluate`, not of `lab panel`."""
    pair = {"sentence_good": "the small cat " * 30, "sentence_bad": "the cat"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    panel = Panel(model_dirs[:1], [TASKS["minimal-pairs"]], out=tmp_path / "out",
                  minimal_pairs=[tmp_path / "pairs.jsonl"], with_untrained=False)  # fmt: skip
    (message,) = panel.run().failures.values()
    assert "pairs.jsonl, line 1: sentence_good is" in message
    assert message.endswith("with --skip-invalid (an option of evaluate; the lab has none)")


def test_table_from_json_is_that_of_the_results() -> None:
    """Diverged runs, which are null in JSON, differ from missing ones in the table."""
    model = PanelModel("m", Path("m"), ModelConfig(vocab_size=8), None)  # type: ignore[arg-type]
    results: dict[CellKey, dict[str, Any] | None] = {
        CellKey("m", "rte", 0): {"metrics": {"accuracy": 0.5}},
        CellKey("m", "rte", 1): {"diverged": "in step 3"},
        CellKey("m", "rte", 2): None,
        CellKey("m", "rte", 3): {"metrics": {"accuracy": 0.7}},
    }
    data = {
        "models": [{"name": "m"}],
        "results": build_json(results, [model], [TASKS["rte"]]),
        "missing": ["m, rte, seed 2"],
    }
    table = read_table(data)
    assert table.rows == [("RTE, accuracy", "0.600 ± 0.141 (2 of 4; 1 diverged or constant)")]
    assert read_table(json.loads(dump_json(data))) == table


def test_default_learning_rate_of_the_command() -> None:
    """The command repeats the default learning rate, so that --help does not import torch."""
    assert DEFAULT_LEARNING_RATE == LEARNING_RATE
