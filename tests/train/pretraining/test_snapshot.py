"""Checkpoints on the way as model directories, gradients by layer, and the ablations' switches."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertsmith import bundle
from bertsmith.errors import DivergedError, ModelError, RunError, SettingsError
from bertsmith.train.engine import metrics_log
from bertsmith.train.pretraining.pretrain import pretrain, write_initial_model
from bertsmith.train.pretraining.snapshot import write_snapshot
from bertsmith.use.fill import fill
from tests.train.conftest import assignments

CAUSAL: dict[str, Any] = {
    "model__attention": "causal", "data__nsp": "false", "data__objective": "left-to-right",
}  # fmt: skip


def test_a_snapshot_is_the_model_of_its_step(store: Path, tmp_path: Path) -> None:
    """That of the last step has the run's weights; an earlier one has others, and loads."""
    run = tmp_path / "run"
    chosen = assignments(checkpoint__every=3, checkpoint__keep=9, run__eval_every=50)
    pretrain(store, run, steps=9, assignments=chosen)
    write_snapshot(run, 9, tmp_path / "last")
    write_snapshot(run, 3, tmp_path / "third")
    weights = [load_file(path / "model.safetensors")
               for path in (run / "model", tmp_path / "last", tmp_path / "third")]  # fmt: skip
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert bundle.load(tmp_path / "third").info["provenance"]["step"] == 3
    with pytest.raises(RunError, match="no checkpoint of step 4; there: 3, 6, 9"):
        write_snapshot(run, 4, tmp_path / "fourth")


def test_a_run_begins_with_the_model_that_begin_writes(store: Path, tmp_path: Path) -> None:
    """A run that hardly learns stays near it; another seed begins elsewhere."""
    for name, seed in (("run", 1), ("other", 2)):
        chosen = assignments(optim__lr=1e-12, optim__weight_decay=0, run__seed=seed)
        pretrain(store, tmp_path / name, steps=1, assignments=chosen)
        write_initial_model(store, tmp_path / f"{name}-0", assignments=chosen)
    weights = [load_file(tmp_path / path / "model.safetensors")
               for path in ("run/model", "run-0", "other-0")]  # fmt: skip
    for name, first in weights[1].items():
        torch.testing.assert_close(weights[0][name], first, rtol=0, atol=1e-9)
    assert any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    assert bundle.load(tmp_path / "run-0").info["provenance"]["step"] == 0


def test_the_journal_has_gradients_by_layer(store: Path, tmp_path: Path) -> None:
    """Squared and added up they are the whole gradient's norm; unasked they are not there."""
    for name, asked in (("plain", "false"), ("asked", "true")):
        chosen = assignments(model__layers=3, run__log_gradients=asked)
        pretrain(store, tmp_path / name, steps=4, assignments=chosen)
    lines = [
        line for line in metrics_log.read_metrics(tmp_path / "asked") if line["kind"] == "train"
    ]
    assert len(lines) == 4
    for line in lines:
        own = line["gradients"]
        assert list(own) == ["embeddings", "layer 1", "layer 2", "layer 3", "heads"]
        whole = math.sqrt(sum(value**2 for value in own.values()))
        assert whole == pytest.approx(line["grad_norm"], rel=1e-4)
    assert all("gradients" not in line for line in metrics_log.read_metrics(tmp_path / "plain"))


def test_left_to_right_learns_and_is_told_from_masked(store: Path, tmp_path: Path) -> None:
    """Its held-out loss falls; it does not fill in masks; without a causal model it is refused."""
    done = pretrain(
        store, tmp_path / "run", steps=40,
        assignments=assignments(**CAUSAL, optim__lr=1e-2, run__eval_every=10),
    )  # fmt: skip
    losses = [
        line["masked_lm"]
        for line in metrics_log.read_metrics(done.run)
        if line["kind"] == "heldout"
    ]
    assert losses[-1] < losses[0]
    assert done.model is not None
    assert not done.is_masked_lm
    with pytest.raises(ModelError, match="trained left to right"):
        fill(done.model, "ba [MASK].")
    seeing = assignments(**{**CAUSAL, "model__attention": "bidirectional"})
    with pytest.raises(SettingsError, match=r"set model\.attention=causal"):
        pretrain(store, tmp_path / "seeing", steps=1, assignments=seeing)


def test_batch_norm_goes_on_where_it_was(store: Path, tmp_path: Path) -> None:
    """Its running statistics are part of a checkpoint: a resumed run has the same weights."""
    chosen = assignments(model__norm="batch", checkpoint__every=3, run__eval_every=50,
                         checkpoint__keep_optimizer="true")  # fmt: skip
    whole = pretrain(store, tmp_path / "whole", steps=6, assignments=chosen)
    run = tmp_path / "parted"
    pretrain(store, run, steps=6, assignments=chosen)
    # As a kill after step 3 would leave it.
    for path in ("checkpoints/step-6", "model"):
        (run / path).rename(tmp_path / path.replace("/", "-"))
    pretrain(store, run, steps=6, assignments=chosen)
    assert whole.model is not None
    ours, theirs = (load_file(own / "model" / "model.safetensors") for own in (whole.run, run))
    assert "bert.encoder.layer.0.output.LayerNorm.running_var" in ours
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_that_diverges_says_so(store: Path, tmp_path: Path) -> None:
    """It is an error of its own kind, that a caller can tell from a wrong directory."""
    chosen = assignments(model__norm="none", optim__lr=1e18)
    with pytest.raises(DivergedError, match="the weights were left as they were"):
        pretrain(store, tmp_path / "run", steps=20, assignments=chosen)
