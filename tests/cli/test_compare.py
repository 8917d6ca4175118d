"""The command ``compare``: exit status and output."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from tests.cli.conftest import RunCli

#: Number of tensors of the fixture ``model``.
NUM_TENSORS = 46


@pytest.fixture(scope="module")
def modified_model(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The model with 0.001 added to the MLM decoder's bias."""
    modified = bundle.load(model)
    with torch.no_grad():
        modified.model.state_dict()["mlm.decoder.bias"] += 0.001
    directory = tmp_path_factory.mktemp("compare") / "modified"
    bundle.save_model(directory, modified)
    return directory


def test_equal_models_exit_with_0(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """A copy of a model is equal in config, tensors and outputs."""
    shutil.copytree(model, tmp_path / "copy")
    completed = run_cli("compare", model, tmp_path / "copy", "--tolerance", 0)
    assert completed.status == 0, completed.err
    lines = completed.out.splitlines()
    assert "config: equal" in lines
    assert f"tensors: {NUM_TENSORS} of {NUM_TENSORS} are bitwise equal" in lines
    assert "  masked LM\t0\t0" in lines
    assert lines[-1] == "equal (tolerance 0)"


def test_different_models_exit_with_1(run_cli: RunCli, model: Path, modified_model: Path) -> None:
    """Different tensors and outputs are listed; a larger tolerance makes the models equal."""
    completed = run_cli("compare", model, modified_model)
    assert completed.status == 1
    assert f"tensors: {NUM_TENSORS - 1} of {NUM_TENSORS} are bitwise equal" in completed.out
    assert "  cls.predictions.bias\t0.001\t" in completed.out
    assert "  layer 2\t0\t0" in completed.out
    assert completed.out.rstrip().endswith("different (tolerance 1e-05)")
    assert run_cli("compare", model, modified_model, "--tolerance", 0.01).status == 0


def test_json_contains_all_tensors(run_cli: RunCli, model: Path, modified_model: Path) -> None:
    """--json prints one object with every tensor and keeps the exit status."""
    texts = "나룻배\nthe\n".encode()
    completed = run_cli("compare", model, modified_model, "--json", "--text", "-", stdin=texts)
    assert completed.status == 1
    comparison = json.loads(completed.out)
    assert comparison["equal"] is False
    assert len(comparison["tensors"]) == NUM_TENSORS
    assert comparison["num_texts"] == 2
    bias = comparison["tensors"]["cls.predictions.bias"]
    assert bias["max_abs_difference"] == pytest.approx(0.001, rel=1e-3)
    assert comparison["outputs"]["embeddings"]["max_abs_difference"] == 0


def test_different_heads_and_vocabularies_are_listed(
    run_cli: RunCli, model: Path, model_without_nsp: Path, tmp_path: Path
) -> None:
    """Differing config fields, missing heads, words and tokenizations are printed."""
    completed = run_cli("compare", model, model_without_nsp)
    assert completed.status == 1
    assert "config: 1 field differs" in completed.out
    assert "  nsp\tTrue\tFalse" in completed.out
    assert "  next sentence\t-\t-\tonly in A" in completed.out
    (tmp_path / "words.txt").write_text("ferrymen\n")
    run_cli(
        "vocab", "extend", model, "--words", tmp_path / "words.txt", "--out", tmp_path / "extended"
    )
    (tmp_path / "text.txt").write_text("ferrymen\n")
    completed = run_cli("compare", model, tmp_path / "extended", "--text", tmp_path / "text.txt")
    assert "vocabulary: 1 id differs" in completed.out
    assert "\t-\tferrymen" in completed.out
    assert "1 text skipped: different tokenizations:" in completed.out
    assert "    B  ferrymen" in completed.out


def test_terminal_output_is_a_table(
    run_cli: RunCli, model: Path, modified_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal gets columns with headers; long names are wrapped instead of truncated."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "44")
    completed = run_cli("compare", model, modified_model)
    assert "\t" not in completed.out
    assert "difference" in completed.out
    assert "…" not in completed.out
    monkeypatch.setenv("COLUMNS", "100")
    assert "cls.predictions.bias" in run_cli("compare", model, modified_model).out


def test_errors_exit_with_2(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """A missing model or text file exits with 2, because 1 is the status of different models."""
    assert run_cli("compare", model, tmp_path / "nothing").status == 2
    completed = run_cli("compare", model, model, "--text", tmp_path / "nothing")
    assert completed.status == 2
    assert "nothing" in completed.err
