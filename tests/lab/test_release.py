"""``bertsmith lab release``: the contents of the directory, and which panels it accepts."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from bertsmith.bundle import load
from bertsmith.errors import ModelError, RunError, SettingsError
from bertsmith.lab.panel.cells import PanelOptions
from bertsmith.lab.panel.panel import Panel
from bertsmith.lab.panel.tasks import TASKS, select_tasks
from bertsmith.lab.release import ReleaseOptions, write_release
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.snapshot import write_snapshot
from tests.cli.conftest import RunCli, run_cli  # noqa: F401 - a fixture
from tests.train.conftest import make_assignments, make_store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished pre-training run of three steps."""
    folder = tmp_path_factory.mktemp("release")
    options = make_assignments(run__eval_every=2)
    pretrain(make_store(folder), folder / "my-run", steps=3, assignments=options)
    return folder / "my-run"


def write_panel(model: Path, folder: Path) -> Path:
    """Evaluate a model on a held-out text and return the path of panel.json."""
    text = folder / "text.txt"
    text.write_text("Ba de gi ko lu ma ne pi ro su.\nTa be di go ku la me ni po ru.\n")
    tasks = select_tasks(["held-out"], has_text=True, has_minimal_pairs=False)
    Panel([model], tasks, text=text, out=folder / "panel",
          options=PanelOptions(num_seeds=1)).run()  # fmt: skip
    return folder / "panel" / "panel.json"


def test_release_contains_the_record_of_the_run_without_paths(run: Path, tmp_path: Path) -> None:
    """Settings, evaluations and curve are those of the run; no text file names the run's folder.

    The settings leave out those of the machine, such as threads and precision.
    """
    out = tmp_path / "my-bert"
    assert write_release(run, run, out, ReleaseOptions()) == []
    settings = tomllib.loads((out / "settings.toml").read_text())
    stored = tomllib.loads((run / "settings.toml").read_text())
    released_run, stored_run = settings.pop("run"), stored.pop("run") | {"store_path": "store"}
    omitted = {"device", "precision", "attention_kernel", "compile", "threads",
               "micro_batch_tokens"}  # fmt: skip
    assert stored_run.keys() - released_run.keys() == omitted
    assert released_run.items() <= stored_run.items()
    assert settings == stored
    training = json.loads((out / "training.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["mlm_loss"] for line in lines if line["kind"] == "heldout"]
    assert [evaluation["mlm_loss"] for evaluation in training["evaluations"]] == losses
    assert training["steps"] == 3
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    for file in (*out.glob("*.json"), *out.glob("*.toml"), out / "README.md"):
        assert str(run.parent) not in file.read_text(), file


def test_release_of_a_continued_model_contains_its_earlier_training(
    run: Path, tmp_path: Path
) -> None:
    """A run that started from a release repeats its training and settings, and adds its minutes."""
    write_release(run, run, tmp_path / "first", ReleaseOptions())
    training_file = tmp_path / "first" / "training.json"
    first = json.loads(training_file.read_text()) | {"minutes": 42.0}
    training_file.write_text(json.dumps(first))
    assignments = make_assignments()
    for name in ("second", "third"):
        start_from = str(tmp_path / ("first" if name == "second" else "second"))
        pretrain(run.parent / "store", tmp_path / f"{name}-run", steps=2, start_from=start_from,
                 assignments=assignments)  # fmt: skip
        write_release(tmp_path / f"{name}-run", tmp_path / f"{name}-run", tmp_path / name,
                      ReleaseOptions())  # fmt: skip
    second = json.loads((tmp_path / "second" / "training.json").read_text())
    third = json.loads((tmp_path / "third" / "training.json").read_text())
    settings = tomllib.loads((tmp_path / "first" / "settings.toml").read_text())
    assert second["started_from"] == {"name": "first", **first, "settings": settings}
    assert third["started_from"]["started_from"] == second["started_from"]
    # If another model is in the folder of the start model, its training is not that of this model.
    shutil.copy(tmp_path / "first" / "model.safetensors", tmp_path / "second")
    write_release(tmp_path / "third-run", tmp_path / "third-run", tmp_path / "fourth",
                  ReleaseOptions())  # fmt: skip
    fourth = json.loads((tmp_path / "fourth" / "training.json").read_text())
    assert "started_from" not in fourth
    for name in ("second", "third"):
        card = (tmp_path / name / "README.md").read_text()
        assert "- training time: 0 minutes, after 42 minutes of the model it continues\n" in card
        assert str(tmp_path) not in (tmp_path / name / "training.json").read_text()
    assert "- started from `second`\n" in (tmp_path / "third" / "README.md").read_text()
    third_run, new_second = tmp_path / "third-run", tmp_path / "new" / "second"
    write_release(third_run, third_run, new_second, ReleaseOptions())
    expected = "- started from an earlier version of `second`\n"
    assert expected in (new_second / "README.md").read_text()


def copy_run(run: Path, copy: Path, start_from: Path) -> Path:
    """Copy a run as if it had started from a model, and return the directory of the copy."""
    shutil.copytree(run, copy, dirs_exist_ok=True)
    settings = tomllib.loads((run / "settings.toml").read_text())
    settings["run"]["start_from"] = str(start_from)
    (copy / "settings.toml").write_text(tomli_w.dumps(settings))
    return copy


def test_release_of_a_continued_run_contains_its_earlier_trainings(
    run: Path, tmp_path: Path
) -> None:
    """The training of a start model in a run directory is that of its run, also of earlier runs.

    A start model in the directory of a later run is ignored, because it was overwritten.
    """
    second = copy_run(run, tmp_path / "second", run)
    third = copy_run(run, tmp_path / "third", second / "model")
    trainings = []
    for number in range(2):
        out = tmp_path / f"out-{number}"
        write_release(third, third, out, ReleaseOptions())
        trainings.append(json.loads((out / "training.json").read_text()))
        assert str(tmp_path) not in (out / "training.json").read_text()
        copy_run(run, second, third)
    training = trainings[0]
    assert training["started_from"]["name"] == "second"
    settings = training["started_from"].pop("settings")
    assert settings["run"]["start_from"] == "my-run"
    first = training["started_from"].pop("started_from")
    assert first.pop("settings")["data"]["max_seqlen"] == 32
    assert first.pop("name") == "my-run"
    assert first == {key: training[key] for key in first}
    assert "started_from" not in trainings[1]["started_from"]


@pytest.mark.parametrize(
    "training",
    ['{"minutes": "42"}', '{"evaluations": [], "minutes": "42"}',
     '{"evaluations": [], "started_from": {"minutes": 42}}', "[]", '{"minutes": '],
)  # fmt: skip
def test_training_file_of_another_program_is_ignored(
    run: Path, tmp_path: Path, training: str
) -> None:
    """A training.json of the start model that has another form is not part of the release."""
    (tmp_path / "training.json").write_text(training)
    new_run = copy_run(run, tmp_path / "new-run", tmp_path)
    write_release(new_run, new_run, tmp_path / "out", ReleaseOptions())
    assert "started_from" not in json.loads((tmp_path / "out" / "training.json").read_text())


def test_weights_are_rounded_and_load_in_transformers(run: Path, tmp_path: Path) -> None:
    """The weights are those of the run in bf16, and transformers loads them without other keys."""
    write_release(run, run, tmp_path / "out", ReleaseOptions())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(run / "model" / "model.safetensors")
    assert stored.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(stored[name], weight.bfloat16(), rtol=0, atol=0)
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]


def test_settings_repeat_the_training(run: Path, tmp_path: Path) -> None:
    """``pretrain --config`` with the released settings computes the same weights.

    A release leaves out the settings of the machine, whose defaults differ between processors.
    """
    write_release(run, run, tmp_path / "out", ReleaseOptions(dtype="fp32"))
    machine = tomllib.loads((run / "settings.toml").read_text())["run"]
    assignments = [f"run.{name}={machine[name]}" for name in ("precision", "threads")]
    result = pretrain(run.parent / "store", tmp_path / "again", assignments=assignments,
                      config=tmp_path / "out" / "settings.toml")  # fmt: skip
    assert result.model is not None
    repeated, original = load(result.model).model, load(tmp_path / "out").model
    torch.testing.assert_close(dict(repeated.state_dict()), dict(original.state_dict()), rtol=0,
                               atol=0)  # fmt: skip


def test_release_of_a_checkpoint_has_its_number_of_steps(run: Path, tmp_path: Path) -> None:
    """The card and the summary of an unfinished run do not name the planned or logged steps."""
    options = make_assignments(checkpoint__steps=4, run__log_every=3)
    pretrain(run.parent / "store", tmp_path / "run", steps=5, assignments=options)
    write_snapshot(tmp_path / "run", 4, tmp_path / "step-4")
    write_release(tmp_path / "run", tmp_path / "step-4", tmp_path / "out", ReleaseOptions())
    assert json.loads((tmp_path / "out" / "training.json").read_text())["steps"] == 4
    for folder in ("step-4", "out"):
        assert "\n- steps: 4\n" in (tmp_path / folder / "README.md").read_text()


def test_card_shows_license_notes_and_curve(run: Path, tmp_path: Path) -> None:
    """The card has the license in front matter and text, the notes, and the image of the curve."""
    notes = tmp_path / "notes.md"
    notes.write_text("## Text\n\nSyllables, in the public domain.\n")
    options = ReleaseOptions(license_id="apache-2.0", notes=notes)
    write_release(run, run, tmp_path / "my-bert", options)
    card = (tmp_path / "my-bert" / "README.md").read_text()
    assert '\nlicense: "apache-2.0"\n---\n' in card
    assert "\n# my-bert\n" in card
    assert "\n## Text\n\nSyllables, in the public domain.\n\n## Model\n" in card
    assert "![Loss curve](curve.png)" in card
    assert "The weights are published under the license `apache-2.0`.\n" in card
    assert "fill this in" not in card
    assert "To be filled in" not in card


def test_panel_of_the_release_or_its_run_is_shown(run: Path, tmp_path: Path) -> None:
    """Only results from before the rounding have a note; results do not change the model's hash."""
    write_release(run, run, tmp_path / "first", ReleaseOptions())
    for name, model in (("of-release", tmp_path / "first"), ("of-run", run)):
        (tmp_path / name).mkdir()
        panel = write_panel(model, tmp_path / name)
        out = tmp_path / f"{name}-out"
        write_release(run, run, out, ReleaseOptions(panel=panel))
        card = (out / "README.md").read_text()
        assert f"| measure | {'first' if name == 'of-release' else 'my-run'} | untrained" in card
        value = json.loads(panel.read_text())["results"]
        loss = next(iter(value.values()))["held-out"]["mlm_loss"]["mean"]
        label = TASKS["held-out"].measures[0].label
        assert f"| {label} | {loss:.3f} |" in card
        assert ("Measured before the weights were rounded to bf16." in card) == (name == "of-run")
        published = (out / "results" / "panel.json").read_text()
        assert str(tmp_path) not in published
        assert json.loads(published)["results"] == value
    options = ReleaseOptions(panel=tmp_path / "of-run" / "panel" / "panel.json", dtype="fp32")
    write_release(run, run, tmp_path / "exact", options)
    assert "were rounded" not in (tmp_path / "exact" / "README.md").read_text()
    # The panel of the release is also valid for the release that contains a panel.
    panel = tmp_path / "of-release" / "panel" / "panel.json"
    write_release(run, run, tmp_path / "again", ReleaseOptions(panel=panel))


def test_panel_of_another_model_is_rejected(run: Path, tmp_path: Path) -> None:
    """A panel without this model is an error, and nothing is written."""
    panel = write_panel(run, tmp_path)
    data = json.loads(panel.read_text())
    data["models"][0]["hash"] = "0" * 12
    panel.write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"panel\.json: no results of this model"):
        write_release(run, run, tmp_path / "out", ReleaseOptions(panel=panel))
    panel.write_text('{"models": []}')
    with pytest.raises(SettingsError, match=r"not a panel \('seeds' is missing\)"):
        write_release(run, run, tmp_path / "out", ReleaseOptions(panel=panel))
    assert not (tmp_path / "out").exists()


def test_other_directories_are_rejected(run: Path, tmp_path: Path) -> None:
    """A model directory, and a fine-tuning run, are not pre-training runs."""
    with pytest.raises(RunError, match=r"model: not a run directory \(no settings.toml\)"):
        write_release(run / "model", run, tmp_path / "out", ReleaseOptions())
    (tmp_path / "settings.toml").write_text("[task]\nname = 'sst-2'\n")
    with pytest.raises(RunError, match="not a pre-training run; export its model with"):
        write_release(tmp_path, run, tmp_path / "out", ReleaseOptions())


def test_command_prints_the_size_and_the_next_command(
    run: Path,
    tmp_path: Path,
    run_cli: RunCli,  # noqa: F811 - the fixture
) -> None:
    """The command writes the directory; its size in the JSON output is that of the files."""
    out = tmp_path / "my-bert"
    completed = run_cli("lab", "release", run, "--out", out, "--json")
    assert completed.status == 0, completed.err
    size = sum(file.stat().st_size for file in out.iterdir())
    assert json.loads(completed.out)["bytes"] == size
    assert f"next: bertsmith lab panel {out}" in completed.err
    completed = run_cli("lab", "release", run, "--out", out)
    assert completed.status == 2
    assert "already exists and is not an empty folder" in completed.err
