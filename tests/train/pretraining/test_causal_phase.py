"""Runs that start left to right: losses, interruption, time budgets and the resulting model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForPreTraining, BertLMHeadModel

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.data.stream import ExampleStream
from bertsmith.errors import SettingsError
from bertsmith.settings import read_toml
from bertsmith.train.engine import loop
from bertsmith.train.engine.checkpoint import CHECKPOINTS_DIR, list_checkpoints
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.step import take_step
from bertsmith.train.engine.time_duration import TimeDuration
from bertsmith.train.pretraining import speed
from bertsmith.train.pretraining.pretrain import write_initial_model
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from tests.train.conftest import (
    TrainFunction,
    assert_same_weights,
    copy_interrupted_run,
    make_assignments,
)

#: Seven steps: left to right in steps 1 to 4, and longer sequences from step 5 or 6 on.
ARGUMENTS: dict[str, Any] = {
    "steps": 7,
    "schedule__causal_fraction": 0.6,
    "checkpoint__steps": 1,
    "checkpoint__keep": 9,
    "checkpoint__keep_optimizer": "true",
    "run__micro_batch_tokens": 64,
}
#: Files of a run that depend on the switch to masked LM.
FOLDERS = ("model", f"{CHECKPOINTS_DIR}/step-7")


def _list_loss_names(run: Path) -> list[list[str]]:
    """Return the names of the losses of each step."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return [[name for name in line if name.endswith("_loss")] for line in lines]


def test_loss_is_that_of_a_decoder_of_transformers(
    train: TrainFunction, store: Path, tmp_path: Path
) -> None:
    """The first loss is that of the same weights as a decoder (BertLMHeadModel) in transformers."""
    options = {"model__dropout": 0, "model__attention_dropout": 0}
    train(steps=2, schedule__causal_fraction=0.5, run__micro_batch_tokens=64, **options)
    first, second = (line for line in read_metrics(tmp_path / "run") if line["kind"] == "train")
    write_initial_model(store, tmp_path / "initial", assignments=make_assignments(**options))
    decoder = BertLMHeadModel.from_pretrained(tmp_path / "initial", is_decoder=True).eval()
    opened_store = Store.open(store)
    vocabulary = VocabularyInfo.from_tokenizer(opened_store.load_tokenizer())
    settings = DataSettings(max_seqlen=32)
    batch = ExampleStream(
        opened_store.load_split("train"), vocabulary, settings, 32, seed=0, epoch=0
    ).batch(0, 4)
    ids = torch.from_numpy(batch.ids)
    ids[batch.masked_positions] = torch.from_numpy(batch.masked_labels)
    segments = torch.from_numpy(batch.segments)
    losses = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        sequence = ids[start:end]
        with torch.no_grad():
            logits = decoder(sequence[None], token_type_ids=segments[None, start:end]).logits[0]
        token_losses = F.cross_entropy(logits[:-1], sequence[1:], reduction="none")
        losses.append(token_losses[~torch.from_numpy(vocabulary.is_special)[sequence[1:]]])
    assert first["causal_lm_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert first["loss"] == first["causal_lm_loss"]
    assert second["loss"] == pytest.approx(second["mlm_loss"] + second["nsp_loss"])


@pytest.mark.parametrize(
    "options",
    [
        {"model__attention_dropout": 0.1},
        {
            "optim__optimizer": "muon",
            "optim__average_fraction": 0.5,
            "schedule__phase2_max_seqlen": 48,
            "schedule__phase2_fraction": 0.3,
            "data__final_masking_rate": 0.3,
            "data__initial_batch_size": 2,
        },
    ],
    ids=["adamw", "muon, average, phase 2"],
)
def test_resumed_run_has_the_same_bytes(
    train: TrainFunction, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A run resumed before, at and after the switch ends with the bytes of an uninterrupted one."""
    train("uninterrupted", **ARGUMENTS, **options)
    causal, masked = ["causal_lm_loss"], ["mlm_loss", "nsp_loss"]
    assert _list_loss_names(tmp_path / "uninterrupted") == [causal] * 4 + [masked] * 3
    for last_step in (2, 4, 6):
        run = tmp_path / f"run-{last_step}"
        copy_interrupted_run(tmp_path / "uninterrupted", run, last_step)
        train(run.name, **ARGUMENTS, **options)
        for folder in FOLDERS:
            assert_same_weights(run / folder, tmp_path / "uninterrupted" / folder)


def test_next_sentence_head_is_trained_only_after_the_switch(
    train: TrainFunction, tmp_path: Path
) -> None:
    """Pooler and head have no moments left to right, and later the moments of their own steps."""
    train(**ARGUMENTS)
    checkpoints = [
        (load_file(path / "weights.safetensors"), load_file(path / "moments.safetensors"))
        for _, path in list_checkpoints(tmp_path / "run")
    ]
    before, after = checkpoints[3], checkpoints[6]
    for name in ("pooler.dense.weight", "nsp.classifier.bias"):
        assert torch.equal(checkpoints[0][0][name], before[0][name])
        assert float(before[1][f"{name}.step"]) == 0
        assert f"{name}.exp_avg" not in before[1]
        assert not torch.equal(before[0][name], after[0][name])
        assert float(after[1][f"{name}.step"]) == 3
        assert bool(after[1][f"{name}.exp_avg"].any())
    assert "mlm.transform.weight.exp_avg" in before[1]
    assert "mlm.transform.weight.step" not in before[1]


def test_model_is_a_plain_bert(train: TrainFunction) -> None:
    """Transformers loads the model as a BERT that is not a decoder; the card names the phase."""
    result = train(steps=4, schedule__causal_fraction=0.25)
    assert result.model is not None
    model, loading_info = AutoModelForPreTraining.from_pretrained(
        result.model, output_loading_info=True
    )
    assert type(model).__name__ == "BertForPreTraining"
    assert not model.config.is_decoder
    assert not any(loading_info.values())
    card = (result.model / "README.md").read_text()
    assert "left-to-right language model (25% of the run), then masked LM and next-" in card


def test_time_budget_switches_once(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a time budget, the switch depends on the time; a resumed run does not switch back."""
    arguments = {
        "minutes": 60.0,
        "checkpoint__steps": 1,
        "schedule__causal_fraction": 0.5,
        "checkpoint__keep_optimizer": "true",
    }

    class StoppedError(Exception):
        """Ends the first process."""

    def take_step_or_raise(*positional: Any, **options: Any) -> Any:
        if options["step"] == 3:
            raise StoppedError
        return take_step(*positional, **options)

    def is_in_first_two_steps(_duration: TimeDuration, step: int, fraction: float) -> bool:
        assert fraction == 0.5
        return step < 2

    cost = Cost(0.1, 0.0, 0, 1e9, 0.1, 100.0, 512)
    monkeypatch.setattr(speed, "measure_cost", lambda *_: cost)
    with monkeypatch.context() as patch:
        patch.setattr(TimeDuration, "is_in_first", is_in_first_two_steps)
        patch.setattr(loop, "take_step", take_step_or_raise)
        with pytest.raises(StoppedError):
            train(**arguments)
    run = tmp_path / "run"
    state = json.loads((run / CHECKPOINTS_DIR / "step-3" / "state.json").read_text())
    assert state["data_state"]["is_causal_over"] is True
    # Little of the budget is used, so a new run would start left to right.
    monkeypatch.setattr(TimeDuration, "is_finished", lambda _, step: step >= 5)
    train(**arguments)
    causal, masked = ["causal_lm_loss"], ["mlm_loss", "nsp_loss"]
    assert _list_loss_names(run) == [causal] * 2 + [masked] * 3
    assert read_toml(run / "settings.toml")["schedule"]["causal_fraction"] == 0.5


def test_entirely_left_to_right_run_rejects_the_phase(store: Path) -> None:
    """The objective "left-to-right" with a left-to-right phase is an error."""
    assignments = make_assignments(
        data__objective="left-to-right",
        data__nsp="false",
        model__attention="causal",
        schedule__causal_fraction=0.5,
    )
    with pytest.raises(SettingsError, match=r"causal_fraction is 0\.5, but data\.objective"):
        resolve_settings(Overrides(data=store, assignments=assignments), Store.open(store))
