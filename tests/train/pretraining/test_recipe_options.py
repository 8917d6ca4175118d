"""Options of a recipe: runs with them can be interrupted, and write a plain BERT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForPreTraining

from bertsmith.data.store import Store
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from bertsmith.use.inspection.describe import describe_model
from tests.train.conftest import (
    TrainFunction,
    assert_same_weights,
    copy_interrupted_run,
    make_assignments,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"optim__optimizer": "muon"},
    "sentence order": {"data__pair_objective": "sop"},
    "average": {"optim__average_fraction": 0.3},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_resumed_run_has_the_same_bytes(train: TrainFunction, tmp_path: Path, option: str) -> None:
    """A run that loses its last checkpoints and resumes ends with the same checkpoint and model."""
    arguments: dict[str, Any] = {
        "steps": 7,
        "checkpoint__steps": 1,
        "checkpoint__keep": 9,
        "run__eval_every": 2,
        "checkpoint__keep_optimizer": "true",
        **OPTIONS[option],
    }
    train("uninterrupted", **arguments)
    run = tmp_path / "run"
    copy_interrupted_run(tmp_path / "uninterrupted", run, last_step=3)
    train("run", **arguments)
    for folder in ("model", f"{CHECKPOINTS_DIR}/step-7"):
        assert_same_weights(run / folder, tmp_path / "uninterrupted" / folder)


@pytest.mark.parametrize("option", OPTIONS)
def test_model_is_a_plain_bert(train: TrainFunction, option: str) -> None:
    """Transformers loads the model of each option with no missing or unexpected keys."""
    result = train(steps=2, **OPTIONS[option])
    assert result.model is not None
    model, loading_info = AutoModelForPreTraining.from_pretrained(
        result.model, output_loading_info=True
    )
    assert type(model).__name__ == "BertForPreTraining"
    assert not any(loading_info.values())


def test_sentence_order_is_named(train: TrainFunction) -> None:
    """Model card and ``inspect`` say that the head was trained on sentence order, not NSP."""
    result = train(steps=2, data__pair_objective="sop")
    assert result.model is not None
    assert "nsp_accuracy" in result.heldout
    card = (result.model / "README.md").read_text()
    assert "- pre-training tasks: masked LM and sentence order" in card
    assert "masked LM, sentence order" in " ".join(describe_model(result.model).lines)
    plain = train("plain", steps=2)
    assert plain.model is not None
    card = (plain.model / "README.md").read_text()
    assert "- pre-training tasks: masked LM and next-sentence prediction\n" in card


def test_card_has_the_trained_length(train: TrainFunction) -> None:
    """The model card has the longest sequences of the run; the config allows longer ones."""
    two_phases: dict[str, Any] = {"schedule__phase2_max_seqlen": 32}
    for name, changes, length in (("one", {}, 24), ("two", two_phases, 32)):
        result = train(name, steps=2, data__max_seqlen=24, **changes)
        assert result.model is not None
        assert f"- maximum sequence length: {length}\n" in (result.model / "README.md").read_text()


def test_each_initialization_can_be_switched_off(store: Path) -> None:
    """The value "random" sets no weights by hand; "cross-segment-heads" sets most."""
    opened_store = Store.open(store)

    def initialize(name: str) -> dict[str, Tensor]:
        assignments = make_assignments(model__layers=2, model__width=32, run__initialization=name)
        settings = resolve_settings(Overrides(data=store, assignments=assignments), opened_store)
        return Session(settings, opened_store).model.state_dict()

    random_weights = initialize("random")
    config = resolve_settings(
        Overrides(data=store, assignments=make_assignments(model__layers=2, model__width=32)),
        opened_store,
    ).model
    model = BertForPreTraining(config)
    torch.manual_seed(0)
    model.initialize()
    expected = model.state_dict()
    assert all(torch.equal(random_weights[name], expected[name]) for name in expected)
    changed = {
        name: {
            key
            for key, value in initialize(name).items()
            if not torch.equal(value, random_weights[key])
        }
        for name in (
            "unigram",
            "separate-positions",
            "neighbor-heads",
            "match-heads",
            "cross-segment-heads",
        )
    }
    assert changed["unigram"] == {"mlm.decoder.bias", "bert.embeddings.positions.weight"}
    assert changed["unigram"] < changed["separate-positions"] < changed["neighbor-heads"]
    assert not any("layers" in key for key in changed["separate-positions"])
    assert changed["neighbor-heads"] < changed["cross-segment-heads"]
    assert changed["separate-positions"] < changed["match-heads"]
    # The first head of "cross-segment-heads" is a neighbor head, and that of "match-heads" random.
    name = "bert.encoder.layers.0.attention.query_key_value.weight"
    first_heads = {
        value: initialize(value)[name].view(3, config.heads, -1, config.width)[:, 0]
        for value in ("random", "match-heads", "cross-segment-heads")
    }
    assert torch.equal(first_heads["match-heads"], first_heads["random"])
    assert not torch.equal(first_heads["cross-segment-heads"], first_heads["random"])
    assert not any(key.startswith(("nsp.", "pooler.")) for key in changed["neighbor-heads"])
    assert "nsp.classifier.weight" in changed["match-heads"]
    assert "nsp.classifier.weight" in changed["cross-segment-heads"]
