"""Descriptions of models, runs and checkpoints; and what is told from a path."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bertsmith import bundle
from bertsmith.bundle import PretrainedBundle
from bertsmith.data import store
from bertsmith.errors import InputError, ModelError, RunError
from bertsmith.model.bert import count_parameters
from bertsmith.progress import NullProgress
from bertsmith.text import tokenizer_files
from bertsmith.train.engine import checkpoint, run_directory
from bertsmith.train.engine.checkpoint import TrainingState
from bertsmith.train.engine.metrics_log import MetricsLog
from bertsmith.use.inspection.artifacts import identify_artifact
from bertsmith.use.inspection.describe import (
    describe_checkpoint,
    describe_model,
    describe_run,
    describe_settings,
    describe_tensors,
    summarize_tensors,
)


@pytest.fixture
def a_run(tmp_path: Path, directory: Path) -> Path:
    """A run that stopped after step 40 of 100, as the training loop leaves one."""
    run = tmp_path / "run"
    run.mkdir()
    (run / run_directory.SETTINGS_FILE).write_text(
        "[schedule]\nsteps = 100\n\n[optim]\nlr = 1e-3\n"
    )
    model = bundle.load(directory).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    journal = MetricsLog(run, 0)
    for step in (1, 10, 20, 30, 40):
        loss = 9.0 - step / 10
        journal.write({"step": step, "kind": "train", "loss": loss, "masked_lm": loss})
    journal.write({"step": 40, "kind": "heldout", "masked_lm": 6.5, "unigram_entropy": 6.1})
    journal.close()
    for step in (20, 40):
        checkpoint.save(run, TrainingState(step, 1.5, 40, 6.5), model, optimizer, keep=2)
    return run


def test_tensor_facts_are_those_of_the_tensor(tmp_path: Path) -> None:
    """Mean and deviation are over the finite values; the others are counted."""
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, float("nan"), float("inf")]])
    file = tmp_path / "some.safetensors"
    save_file({"odd": values, "half": torch.ones(5, dtype=torch.bfloat16)}, file)
    half, odd = summarize_tensors(file)
    assert (half.name, half.dtype, half.shape, half.num_nonfinite) == ("half", "bfloat16", [5], 0)
    assert (half.mean, half.std) == (1.0, 0.0)
    assert (odd.shape, odd.num_nonfinite, odd.mean) == ([2, 3], 2, 3.0)
    # Squares about 3: 4 + 1 + 0 + 9 over 4 values.
    assert odd.std == pytest.approx(3.5**0.5)
    assert any("2 values are not finite" in line for line in describe_tensors(file).lines)


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    """A file that is no safetensors file is named."""
    file = tmp_path / "broken.safetensors"
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=r"broken\.safetensors: not a readable safetensors file"):
        describe_tensors(file)


def test_a_model_is_described(loaded: PretrainedBundle, directory: Path) -> None:
    """Config, parameter count and every stored tensor are told, and all of it is plain JSON."""
    found = describe_model(directory)
    assert found.facts["parameters"] == count_parameters(loaded.model)
    assert found.facts["config"] == loaded.config.model_dump()
    by_name = bundle.names.names(list(loaded.model.state_dict()))
    stored = sum(len(names) for names in by_name.values())
    assert len(found.facts["tensors"]) == stored
    assert f"{count_parameters(loaded.model):,} parameters" in found.lines[1]
    assert "next sentence" in found.lines[1]
    assert json.loads(json.dumps(found.facts)) == found.facts


def test_a_model_without_pairs_is_described(directory_without_pairs: Path) -> None:
    """A head that is not there is not named."""
    assert "next sentence" not in describe_model(directory_without_pairs).lines[1]


def test_a_run_is_described(a_run: Path, directory: Path) -> None:
    """How far a run is, its last figures, its checkpoints and settings; finished with a model."""
    found = describe_run(a_run)
    facts = found.facts
    assert (facts["step"], facts["steps"], facts["finished"]) == (40, 100, False)
    assert facts["last"]["heldout"] == {"step": 40, "masked_lm": 6.5, "unigram_entropy": 6.1}
    assert facts["last"]["train"]["masked_lm"] == 5.0
    assert [one["step"] for one in facts["checkpoints"]] == [20, 40]
    folder = a_run / "checkpoints" / "step-40"
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert facts["checkpoints"][1]["bytes"] == size
    assert "not finished" in found.lines[0]
    assert found.lines[1] == "step 40 of 100"
    assert any("8.900 to 5.000" in line and "█▆▅▃▁" in line for line in found.lines)
    assert json.loads(json.dumps(facts)) == facts
    shutil.copytree(directory, a_run / "model")
    assert describe_run(a_run).facts["finished"]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    """A RUN with its settings only is described too."""
    (tmp_path / run_directory.SETTINGS_FILE).write_text("[data]\nlength = 128\n")
    found = describe_run(tmp_path)
    assert found.facts["step"] == 0
    assert "no checkpoint yet" in found.lines
    assert found.lines[1] == "step 0 of unknown"


def test_a_checkpoint_is_described(a_run: Path, loaded: PretrainedBundle) -> None:
    """Where the run stood, the weights under the model's names, and two moments a weight."""
    found = describe_checkpoint(a_run / "checkpoints" / "step-40")
    assert found.facts["state"] == {"step": 40, "seconds": 1.5, "best_step": 40, "best_loss": 6.5}
    names = {name for name, _ in loaded.model.named_parameters()}
    assert {one["name"] for one in found.facts["weights"]} == names
    assert len(found.facts["moments"]) == 2 * len(names)
    # Adam's first moment after one step: 0.1 of the gradient, which is 0.5 everywhere.
    means = {one["name"]: one["mean"] for one in found.facts["moments"]}
    assert means["nsp.classifier.bias.exp_avg"] == pytest.approx(0.05)


def test_a_checkpoint_of_a_finished_run_is_described(a_run: Path) -> None:
    """Without optimizer state the weights are described, and the run's checkpoints are smaller."""
    before = describe_run(a_run).facts["checkpoints"][1]["bytes"]
    checkpoint.remove_optimizer_state(a_run, NullProgress())
    found = describe_checkpoint(a_run / "checkpoints" / "step-40")
    assert found.facts["weights"]
    assert found.facts["moments"] == []
    assert "no optimizer state (a finished run removes it)" in found.lines
    assert describe_run(a_run).facts["checkpoints"][1]["bytes"] < before / 2


def test_a_broken_state_is_an_error(a_run: Path) -> None:
    """A checkpoint whose state.json was cut off is named."""
    folder = a_run / "checkpoints" / "step-40"
    (folder / checkpoint.STATE_FILE).write_text('{"step": 4')
    with pytest.raises(RunError, match=r"state\.json: not a readable JSON object"):
        describe_checkpoint(folder)


def test_settings_are_described_flat(tmp_path: Path) -> None:
    """Each setting stands on a line of its own under its dotted name."""
    file = tmp_path / "mine.toml"
    file.write_text("[optim]\nlr = 2e-4\n[a]\nb = [1, 2]\n")
    assert describe_settings(file).lines[1:] == ["  optim.lr  0.0002", "  a.b       1, 2"]


def test_a_path_is_recognized(a_run: Path, directory: Path, tmp_path: Path) -> None:
    """Every kind by the names that its own writer uses; a file inside speaks for its directory."""
    step = a_run / checkpoint.CHECKPOINTS_DIR / "step-20"
    vocabulary = directory / tokenizer_files.VOCAB_FILE
    (tmp_path / "words.txt").write_bytes(vocabulary.read_bytes())
    for name in (store.MANIFEST_FILE, tokenizer_files.VOCAB_FILE, tokenizer_files.TOKENIZER_FILE):
        (tmp_path / name.replace(".", "-")).mkdir()
        (tmp_path / name.replace(".", "-") / name).write_text("")
    (tmp_path / "unfinished" / "parts").mkdir(parents=True)
    expected = {
        a_run: ("run", a_run),
        a_run / "metrics.jsonl": ("run", a_run),
        a_run / run_directory.SETTINGS_FILE: ("settings", a_run / run_directory.SETTINGS_FILE),
        step: ("checkpoint", step),
        step / checkpoint.STATE_FILE: ("checkpoint", step),
        step / checkpoint.WEIGHTS_FILE: ("tensors", step / checkpoint.WEIGHTS_FILE),
        directory: ("model", directory),
        directory / bundle.CONFIG_FILE: ("model", directory),
        directory / bundle.INFO_FILE: ("model", directory),
        vocabulary: ("tokenizer", vocabulary),
        tmp_path / "words.txt": ("tokenizer", tmp_path / "words.txt"),
        tmp_path / "manifest-json": ("store", tmp_path / "manifest-json"),
        tmp_path / "unfinished": ("store", tmp_path / "unfinished"),
        tmp_path / "vocab-txt": ("tokenizer", tmp_path / "vocab-txt"),
        tmp_path / "tokenizer-json": ("tokenizer", tmp_path / "tokenizer-json"),
    }
    for path, kind in expected.items():
        assert identify_artifact(path) == kind, path


def test_the_unknown_is_refused(tmp_path: Path) -> None:
    """Nothing, an empty folder and a stray file are errors that list what is known."""
    (tmp_path / "stray.txt").write_text("no mask here\n")
    for path in (tmp_path, tmp_path / "stray.txt", tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"expected one of: .*a RUN"):
            identify_artifact(path)
