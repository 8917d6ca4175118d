"""Distillation of pre-trained models: learning, output, resuming, errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from bertsmith import bundle
from bertsmith.errors import BertsmithError, SettingsError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.distillation.distill import distill
from bertsmith.train.engine import loop
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.step import take_step
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.use.embed import embed
from tests.model.examples import make_prime_size_config
from tests.train.conftest import make_assignments, make_store, make_tokenizer
from tests.train.embedding.conftest import save_start_model

#: Settings with which a small student learns fast.
FAST_SETTINGS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-3},
    "model": {"dropout": 0.0, "attention_dropout": 0.0},
    "run": {"threads": 1, "precision": "fp32"},
    "distill": {"layers": 1, "batch_size": 8, "max_seqlen": 32},
    "schedule": {"steps": 30},
}


@pytest.fixture(scope="module")
def text_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of 120 documents."""
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def teacher(text_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that pre-trained a model of two layers for a few steps."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    assignments = make_assignments(
        model__layers=2, model__width=24, optim__lr=3e-3, data__nsp="false"
    )
    pretrain(text_store, run, assignments=assignments, steps=40)
    return run


def train(
    teacher: Path, out: Path, store: Path, start_from: Path | None = None, **tables: dict[str, Any]
) -> FinetuneResult:
    """Distill with fast settings; keywords are tables of settings."""
    values = {name: FAST_SETTINGS.get(name, {}) | table for name, table in tables.items()}
    return distill(
        teacher, out, data=store, start_from=start_from, values={**FAST_SETTINGS, **values}
    )


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ("mlm", {}),
        ("mlm", {"layers": None, "size": "tiny", "hard_weight": 0.5}),
        ("relations", {}),
        ("relations", {"layers": None, "size": "tiny", "teacher_layer": 1, "relation_heads": 4}),
        ("hidden", {}),
        ("hidden", {"layers": None, "size": "tiny"}),
    ],
)
def test_student_learns_from_its_teacher(
    teacher: Path, text_store: Path, tmp_path: Path, objective: str, settings: dict[str, Any]
) -> None:
    """The loss falls; transformers loads the student and computes the same states."""
    table = FAST_SETTINGS["distill"] | {"objective": objective, **settings}
    result = train(teacher, tmp_path / "run", text_store, distill=table)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert losses[-1] < 0.97 * losses[0]
    assert result.metrics["examples"] > 10
    assert result.model is not None
    student = bundle.load(result.model)
    assert bool(student.new_weights) == (objective != "mlm")
    loader = AutoModelForMaskedLM if objective == "mlm" else AutoModel
    options = {} if objective == "mlm" else {"add_pooling_layer": False}
    model, info = loader.from_pretrained(result.model, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    encoder = model.bert if objective == "mlm" else model
    ids = student.tokenizer.encode_batch(["Ba be bi."])[0]
    tokens = torch.tensor([[student.tokenizer.cls_id, *ids, student.tokenizer.sep_id]])
    with torch.no_grad():
        expected = encoder.eval()(tokens).last_hidden_state[0].mean(0).numpy()
    vector = embed(result.model, ["Ba be bi."], normalize=False)[0]
    np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5)


def test_default_objective_depends_on_the_heads(
    teacher: Path, text_store: Path, tmp_path: Path
) -> None:
    """A teacher with a masked-LM head is distilled with it, an encoder by its relations."""
    result = train(teacher, tmp_path / "mlm", text_store, schedule={"steps": 1})
    assert result.metric_names == ["mlm_loss", "mlm_accuracy"]
    encoder = train(
        teacher, tmp_path / "encoder", text_store, distill={"objective": "hidden"},
        schedule={"steps": 1},
    )  # fmt: skip
    assert encoder.model is not None
    result = train(encoder.model, tmp_path / "relations", text_store, schedule={"steps": 1})
    assert result.metric_names == ["loss"]
    with pytest.raises(BertsmithError, match="has no masked-LM head"):
        train(encoder.model, tmp_path / "x", text_store, distill={"objective": "mlm"})


@pytest.mark.parametrize("objective", ["mlm", "relations", "hidden"])
def test_interrupted_run_ends_with_the_same_bytes(
    teacher: Path,
    text_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
) -> None:
    """A run that ends without a checkpoint of its last steps ends with the same weights."""
    tables: dict[str, Any] = {
        "checkpoint": {"steps": 2}, "schedule": {"steps": 8},
        "distill": {"objective": objective, "layers": None, "size": "tiny"},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
        "run": {"threads": 1, "precision": "fp32", "micro_batch_tokens": 100},
    }  # fmt: skip
    expected = train(teacher, tmp_path / "uninterrupted", text_store, **tables)
    num_steps = 0

    def interrupt_step_6(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            raise KeyboardInterrupt
        return take_step(*arguments, **keywords)

    run = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", interrupt_step_6)
        with pytest.raises(KeyboardInterrupt):
            train(teacher, run, text_store, **tables)
    write_latest_snapshot(run, tmp_path / "snapshot")
    assert bundle.load_encoder(tmp_path / "snapshot").config.width == 128
    resumed = train(teacher, run, text_store, **tables)
    assert expected.model is not None
    assert resumed.model is not None
    name = bundle.WEIGHTS_FILE
    assert (resumed.model / name).read_bytes() == (expected.model / name).read_bytes()
    assert resumed.metrics == expected.metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "relations", "relation_heads": 7},
            "7, which does not divide the widths of teacher and student, 24 and 24; use one of 1",
        ),
        ({"objective": "relations", "teacher_layer": 3}, "teacher_layer is 3, but the teacher has"),
        ({"objective": "hidden", "temperature": 1.0}, "not used by the objective hidden"),
        ({"objective": "hidden", "text_column": "x"}, "not used by the objective hidden"),
        ({"objective": "mlm", "max_seqlen": 99}, "the teacher takes at most 64 tokens"),
        ({"objective": "mlm", "layers": 3}, "the teacher has 2 layers"),
    ],
)
def test_unsuitable_settings_are_errors(
    teacher: Path, text_store: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """The error says what is wrong, and no run directory is left behind."""
    with pytest.raises(BertsmithError, match=message):
        train(teacher, tmp_path / "run", text_store, distill=settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_relations_of_frozen_layers_are_rejected(
    text_store: Path, tmp_path: Path, norm: str
) -> None:
    """With frozen layers nothing is left to train: a pre-norm student's last norm is unused."""
    run = tmp_path / "teacher"
    assignments = make_assignments(model__norm=f'"{norm}"', data__nsp="false")
    pretrain(text_store, run, assignments=assignments, steps=1)
    frozen = {"num_frozen_layers": 1}
    with pytest.raises(SettingsError, match="num_frozen_layers: all layers are frozen"):
        train(run, tmp_path / "run", text_store, run=frozen, distill={"objective": "relations"})


def test_data_must_be_a_store_of_the_same_vocabulary(
    teacher: Path, text_store: Path, tmp_path: Path
) -> None:
    """A text file, a store of another vocabulary, and another student vocabulary are errors."""
    lines = tmp_path / "lines.txt"
    lines.write_text("ba be\n")
    with pytest.raises(BertsmithError, match="the objective mlm reads a single token store"):
        train(teacher, tmp_path / "run", lines)
    other = make_store(tmp_path / "other", num_documents=40, extra_words=("xa",))
    with pytest.raises(BertsmithError, match="made with another vocabulary"):
        train(teacher, tmp_path / "run", other)
    start = tmp_path / "start"
    tokenizer = make_tokenizer(("xa",))
    config = make_prime_size_config(vocab_size=tokenizer.vocab_size)
    bundle.save(start, BertForPreTraining(config), tokenizer, {})
    with pytest.raises(BertsmithError, match="differs from the teacher's"):
        train(teacher, tmp_path / "run", text_store, start, distill={"layers": None})
    result = train(
        teacher, tmp_path / "run", text_store, save_start_model(tmp_path / "same"),
        distill={"layers": None, "objective": "relations"}, schedule={"steps": 2},
    )  # fmt: skip
    assert result.model is not None
    assert bundle.load_encoder(result.model).config.width == 32
