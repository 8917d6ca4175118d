"""Snapshots of checkpoints, logged gradient norms, left-to-right training and normalization."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertsmith import bundle
from bertsmith.errors import DivergedError, ModelError, RunError, SettingsError, StoreError
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.pretrain import pretrain, write_initial_model
from bertsmith.train.pretraining.snapshot import write_snapshot
from bertsmith.use.fill import fill
from tests.train.conftest import make_assignments

WEIGHTS = "model.safetensors"
LEFT_TO_RIGHT: dict[str, Any] = {
    "model__attention": "causal",
    "data__nsp": "false",
    "data__objective": "left-to-right",
}


def test_snapshot_has_the_weights_of_its_step(store: Path, tmp_path: Path) -> None:
    """Only the snapshot of the last step has the weights of the final model."""
    run = tmp_path / "run"
    options = make_assignments(checkpoint__steps=3, checkpoint__keep=9, run__eval_every=50)
    pretrain(store, run, steps=9, assignments=options)
    write_snapshot(run, 9, tmp_path / "step-9")
    write_snapshot(run, 3, tmp_path / "step-3")
    final_weights = load_file(run / "model" / WEIGHTS)
    weights_9 = load_file(tmp_path / "step-9" / WEIGHTS)
    weights_3 = load_file(tmp_path / "step-3" / WEIGHTS)
    assert all(torch.equal(final_weights[name], weights_9[name]) for name in final_weights)
    assert any(not torch.equal(final_weights[name], weights_3[name]) for name in final_weights)
    assert bundle.load(tmp_path / "step-3").info["provenance"]["step"] == 3
    with pytest.raises(RunError, match="no checkpoint of step 4; available: 3, 6, 9"):
        write_snapshot(run, 4, tmp_path / "step-4")


def test_snapshot_of_an_unfinished_run_needs_its_store(store: Path, tmp_path: Path) -> None:
    """The vocabulary of another store at the same path does not belong to the weights."""
    run, moved = tmp_path / "run", tmp_path / "store"
    shutil.copytree(store, moved)
    pretrain(moved, run, steps=2, assignments=make_assignments(checkpoint__steps=2))
    shutil.rmtree(run / "model")
    write_snapshot(run, 2, tmp_path / "snapshot")
    manifest = moved / "manifest.json"
    manifest.write_text(manifest.read_text().replace("{", "{ ", 1))
    with pytest.raises(StoreError, match=r"not the store with which .* was started"):
        write_snapshot(run, 2, tmp_path / "other")


def test_initial_model_is_the_start_of_a_run(store: Path, tmp_path: Path) -> None:
    """A run with a tiny learning rate ends near its initial model, which depends on the seed."""
    for name, seed in (("run", 1), ("other", 2)):
        options = make_assignments(optim__lr=1e-12, optim__weight_decay=0, run__seed=seed)
        pretrain(store, tmp_path / name, steps=1, assignments=options)
        write_initial_model(store, tmp_path / f"{name}-initial", assignments=options)
    trained = load_file(tmp_path / "run" / "model" / WEIGHTS)
    initial = load_file(tmp_path / "run-initial" / WEIGHTS)
    other_initial = load_file(tmp_path / "other-initial" / WEIGHTS)
    for name, weight in initial.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-9)
    assert any(not torch.equal(initial[name], other_initial[name]) for name in initial)
    assert bundle.load(tmp_path / "run-initial").info["provenance"]["step"] == 0


def test_gradient_norms_are_logged_by_layer(store: Path, tmp_path: Path) -> None:
    """With run.log_grad_norms, the squared group norms add up to the squared global norm."""
    for name, log_grad_norms in (("without", "false"), ("with", "true")):
        options = make_assignments(model__layers=3, run__log_grad_norms=log_grad_norms)
        pretrain(store, tmp_path / name, steps=4, assignments=options)
    lines = [line for line in read_metrics(tmp_path / "with") if line["kind"] == "train"]
    assert len(lines) == 4
    for line in lines:
        grad_norms = line["grad_norms"]
        assert list(grad_norms) == ["embeddings", "layer 1", "layer 2", "layer 3", "heads"]
        global_norm = math.sqrt(sum(norm**2 for norm in grad_norms.values()))
        assert global_norm == pytest.approx(line["grad_norm"], rel=1e-4)
    assert all("grad_norms" not in line for line in read_metrics(tmp_path / "without"))


def test_left_to_right_model_learns_but_fills_no_masks(store: Path, tmp_path: Path) -> None:
    """A left-to-right model learns, needs causal attention, and cannot be used by ``fill``."""
    result = pretrain(
        store,
        tmp_path / "run",
        steps=40,
        assignments=make_assignments(**LEFT_TO_RIGHT, optim__lr=1e-2, run__eval_every=10),
    )
    lines = read_metrics(result.run)
    losses = [line["mlm_loss"] for line in lines if line["kind"] == "heldout"]
    assert losses[-1] < losses[0]
    assert result.model is not None
    assert not result.is_masked_lm
    with pytest.raises(ModelError, match="trained left to right"):
        fill(result.model, "ba [MASK].")
    bidirectional = make_assignments(**{**LEFT_TO_RIGHT, "model__attention": "bidirectional"})
    with pytest.raises(SettingsError, match=r"set model\.attention=causal"):
        pretrain(store, tmp_path / "bidirectional", steps=1, assignments=bidirectional)


def test_batch_norm_statistics_are_in_the_checkpoint(store: Path, tmp_path: Path) -> None:
    """A resumed run with batch norm ends with the running statistics of an uninterrupted run."""
    options = make_assignments(
        model__norm="batch",
        checkpoint__steps=3,
        run__eval_every=50,
        checkpoint__keep_optimizer="true",
    )
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    pretrain(store, uninterrupted, steps=6, assignments=options)
    pretrain(store, resumed, steps=6, assignments=options)
    # Restore the state of a run that was killed after step 3.
    for path in ("checkpoints/step-6", "model"):
        (resumed / path).rename(tmp_path / path.replace("/", "-"))
    pretrain(store, resumed, steps=6, assignments=options)
    expected = load_file(uninterrupted / "model" / WEIGHTS)
    weights = load_file(resumed / "model" / WEIGHTS)
    assert "bert.encoder.layer.0.output.LayerNorm.running_var" in expected
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_divergence_has_its_own_error(store: Path, tmp_path: Path) -> None:
    """A run whose loss or gradient is not finite raises DivergedError."""
    options = make_assignments(model__norm="none", optim__lr=1e18)
    with pytest.raises(DivergedError, match="weights and the last checkpoint are unchanged"):
        pretrain(store, tmp_path / "run", steps=20, assignments=options)
