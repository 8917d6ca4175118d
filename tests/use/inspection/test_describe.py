"""Descriptions of models, runs and checkpoints, and identification of artifacts by path."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bertsmith import bundle
from bertsmith.bundle import PretrainedBundle
from bertsmith.bundle.weight_names import map_to_hf_names
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
def unfinished_run(tmp_path: Path, model_dir: Path) -> Path:
    """A run directory as training leaves it if it is interrupted after step 40 of 100."""
    run = tmp_path / "run"
    run.mkdir()
    (run / run_directory.SETTINGS_FILE).write_text(
        "[schedule]\nsteps = 100\n\n[optim]\nlr = 1e-3\n"
    )
    model = bundle.load(model_dir).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    metrics_log = MetricsLog(run, 0)
    for step in (1, 10, 20, 30, 40):
        loss = 9.0 - step / 10
        metrics_log.write({"step": step, "kind": "train", "loss": loss, "mlm_loss": loss})
    metrics_log.write({"step": 40, "kind": "heldout", "mlm_loss": 6.5, "unigram_entropy": 6.1})
    metrics_log.close()
    for step in (20, 40):
        state = TrainingState(step=step, seconds=1.5, best_step=40, best_loss=6.5)
        checkpoint.save(run, state, model, optimizer, keep=2)
    return run


def test_statistics_ignore_nonfinite_values(tmp_path: Path) -> None:
    """Mean and standard deviation are those of the finite values; the others are counted."""
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, float("nan"), float("inf")]])
    file = tmp_path / "some.safetensors"
    save_file({"nonfinite": values, "bf16": torch.ones(5, dtype=torch.bfloat16)}, file)
    bf16, nonfinite = summarize_tensors(file)
    assert (bf16.name, bf16.dtype, bf16.shape, bf16.num_nonfinite) == ("bf16", "bfloat16", [5], 0)
    assert (bf16.mean, bf16.std) == (1.0, 0.0)
    assert (nonfinite.shape, nonfinite.num_nonfinite, nonfinite.mean) == ([2, 3], 2, 3.0)
    # The squared deviations from the mean 3 are 4, 1, 0 and 9; their mean is 3.5.
    assert nonfinite.std == pytest.approx(3.5**0.5)
    assert any("2 values are not finite" in line for line in describe_tensors(file).lines)


def test_damaged_file_is_an_error(tmp_path: Path) -> None:
    """The error for a file that is not a safetensors file contains its name."""
    file = tmp_path / "broken.safetensors"
    file.write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match=r"broken\.safetensors: not a readable safetensors file"):
        describe_tensors(file)


def test_description_of_a_model_has_config_and_tensors(
    pretrained: PretrainedBundle, model_dir: Path
) -> None:
    """The description has the config, the number of parameters, and all stored tensors."""
    description = describe_model(model_dir)
    num_parameters = count_parameters(pretrained.model)
    assert description.facts["num_parameters"] == num_parameters
    assert description.facts["config"] == pretrained.config.model_dump()
    names_by_parameter = map_to_hf_names(list(pretrained.model.state_dict()))
    num_stored = sum(len(names) for names in names_by_parameter.values())
    assert len(description.facts["tensors"]) == num_stored
    assert f"{num_parameters:,} parameters" in description.lines[1]
    assert "next sentence" in description.lines[1]
    assert json.loads(json.dumps(description.facts)) == description.facts


def test_missing_head_is_not_described(model_dir_without_nsp: Path) -> None:
    """The description of a model without a next-sentence head does not list this head."""
    assert "next sentence" not in describe_model(model_dir_without_nsp).lines[1]


def test_description_of_a_run_has_metrics_and_checkpoints(
    unfinished_run: Path, model_dir: Path
) -> None:
    """The description has the step, the last metrics, the checkpoints, and the run's state."""
    description = describe_run(unfinished_run)
    facts = description.facts
    assert (facts["step"], facts["steps"], facts["finished"]) == (40, 100, False)
    assert facts["last_metrics"]["heldout"] == {
        "step": 40,
        "mlm_loss": 6.5,
        "unigram_entropy": 6.1,
    }
    assert facts["last_metrics"]["train"]["mlm_loss"] == 5.0
    assert [entry["step"] for entry in facts["checkpoints"]] == [20, 40]
    folder = unfinished_run / "checkpoints" / "step-40"
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert facts["checkpoints"][1]["bytes"] == size
    assert "not finished" in description.lines[0]
    assert description.lines[1] == "step 40 of 100"
    # The sparkline of the masked-LM losses 8.9, 8, 7, 6 and 5.
    assert any("8.900 to 5.000" in line and "█▆▅▃▁" in line for line in description.lines)
    assert json.loads(json.dumps(facts)) == facts
    shutil.copytree(model_dir, unfinished_run / "model")
    assert describe_run(unfinished_run).facts["finished"]


def test_run_without_metrics_is_described(tmp_path: Path) -> None:
    """A run directory that contains only settings is at step 0."""
    (tmp_path / run_directory.SETTINGS_FILE).write_text("[data]\nlength = 128\n")
    description = describe_run(tmp_path)
    assert description.facts["step"] == 0
    assert "no checkpoint yet" in description.lines
    assert description.lines[1] == "step 0 of unknown"


def test_description_of_a_checkpoint_has_weights_and_moments(
    unfinished_run: Path, pretrained: PretrainedBundle
) -> None:
    """The description has the training state, all weights, and two moments for each weight."""
    facts = describe_checkpoint(unfinished_run / "checkpoints" / "step-40").facts
    assert facts["state"] == {"step": 40, "seconds": 1.5, "best_step": 40, "best_loss": 6.5}
    names = {name for name, _ in pretrained.model.named_parameters()}
    assert {tensor["name"] for tensor in facts["weights"]} == names
    assert len(facts["moments"]) == 2 * len(names)
    # Adam's first moment after one step is 0.1 times the gradient, which is 0.5 everywhere.
    means = {tensor["name"]: tensor["mean"] for tensor in facts["moments"]}
    assert means["nsp.classifier.bias.exp_avg"] == pytest.approx(0.05)


def test_checkpoint_of_a_finished_run_has_no_moments(unfinished_run: Path) -> None:
    """After the optimizer state is removed, only weights are described; the size is reported."""
    size_before = describe_run(unfinished_run).facts["checkpoints"][1]["bytes"]
    checkpoint.remove_optimizer_state(unfinished_run, NullProgress())
    description = describe_checkpoint(unfinished_run / "checkpoints" / "step-40")
    assert description.facts["weights"]
    assert description.facts["moments"] == []
    assert "no optimizer state (a finished run removes it)" in description.lines
    size_after = describe_run(unfinished_run).facts["checkpoints"][1]["bytes"]
    assert size_after < size_before / 2


def test_damaged_state_is_an_error(unfinished_run: Path) -> None:
    """The error for a truncated state.json contains its name."""
    folder = unfinished_run / "checkpoints" / "step-40"
    (folder / checkpoint.STATE_FILE).write_text('{"step": 4')
    with pytest.raises(RunError, match=r"state\.json: not a readable JSON object"):
        describe_checkpoint(folder)


def test_settings_are_described_by_dotted_names(tmp_path: Path) -> None:
    """Each setting is a line with its dotted name and its value."""
    file = tmp_path / "mine.toml"
    file.write_text("[optim]\nlr = 2e-4\n[a]\nb = [1, 2]\n")
    assert describe_settings(file).lines[1:] == ["  optim.lr  0.0002", "  a.b       1, 2"]


def test_artifacts_are_identified(unfinished_run: Path, model_dir: Path, tmp_path: Path) -> None:
    """Each kind of artifact is identified by its file names, or by a file in its directory."""
    step = unfinished_run / checkpoint.CHECKPOINTS_DIR / "step-20"
    vocab_file = model_dir / tokenizer_files.VOCAB_FILE
    (tmp_path / "words.txt").write_bytes(vocab_file.read_bytes())
    for name in (store.MANIFEST_FILE, tokenizer_files.VOCAB_FILE, tokenizer_files.TOKENIZER_FILE):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("")
    (tmp_path / "unfinished" / "parts").mkdir(parents=True)
    (tmp_path / "unfinished" / "parts" / "plan.json").touch()
    settings_file = unfinished_run / run_directory.SETTINGS_FILE
    # A released model has the settings of its run.
    released = shutil.copytree(model_dir, tmp_path / "released")
    shutil.copy(settings_file, released)
    expected = {
        released: ("model", released),
        unfinished_run: ("run", unfinished_run),
        unfinished_run / "metrics.jsonl": ("run", unfinished_run),
        settings_file: ("settings", settings_file),
        step: ("checkpoint", step),
        step / checkpoint.STATE_FILE: ("checkpoint", step),
        step / checkpoint.WEIGHTS_FILE: ("tensors", step / checkpoint.WEIGHTS_FILE),
        model_dir: ("model", model_dir),
        model_dir / bundle.CONFIG_FILE: ("model", model_dir),
        model_dir / bundle.INFO_FILE: ("model", model_dir),
        vocab_file: ("tokenizer", vocab_file),
        tmp_path / "words.txt": ("tokenizer", tmp_path / "words.txt"),
        tmp_path / "manifest-json": ("store", tmp_path / "manifest-json"),
        tmp_path / "unfinished": ("store", tmp_path / "unfinished"),
        tmp_path / "vocab-txt": ("tokenizer", tmp_path / "vocab-txt"),
        tmp_path / "tokenizer-json": ("tokenizer", tmp_path / "tokenizer-json"),
    }
    for path, artifact in expected.items():
        assert identify_artifact(path) == artifact, path


def test_unknown_paths_are_errors(tmp_path: Path) -> None:
    """A missing path, an unknown directory and an unknown file are errors that list all kinds."""
    (tmp_path / "unrelated.txt").write_text("a text without a mask\n")
    for path in (tmp_path, tmp_path / "unrelated.txt", tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"expected one of: .*a RUN"):
            identify_artifact(path)
