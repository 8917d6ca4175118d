"""Loading and saving of fine-tuned models, and loading of encoders for fine-tuning."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertModel,
)

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, load_fine_tuned, load_for_fine_tuning, save_fine_tuned
from bertsmith.errors import ModelError
from bertsmith.model.config import BiLSTMSettings
from bertsmith.model.ops.dropout import Dropout
from bertsmith.model.packed import pack_sequences
from bertsmith.model.task_models import TaskModel
from tests.model.examples import make_prime_size_config, make_tokenizer

#: A head of each task kind.
HEADS = [
    HeadConfig("single", ("bad", "fair", "good")),
    HeadConfig("multi", ("red", "green", "blue", "black", "white")),
    HeadConfig("regression"),
    HeadConfig("entities", ("O", "B-X", "I-X")),
    HeadConfig("tags", ("NN", "VB")),
    HeadConfig("choice"),
    HeadConfig("span"),
]
#: Task kind -> class of transformers that loads the model, for kinds other than sequence
#: classification.
AUTO_CLASSES: dict[str, Any] = {
    "choice": AutoModelForMultipleChoice,
    "entities": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
    "tags": AutoModelForTokenClassification,
}
#: Token ids and segment ids of two sequences.
SEQUENCES = [([2, 17, 5, 3, 9, 3], [0, 0, 0, 0, 1, 1]), ([2, 8, 3], [0, 0, 0])]


def save_random_model(directory: Path, head: HeadConfig) -> TaskModel:
    """Save a fine-tuned model with random weights and return it."""
    torch.manual_seed(5)
    config = make_prime_size_config(init_range=0.3)
    model = head.build_model(config).eval()
    save_fine_tuned(directory, model, make_tokenizer(config.vocab_size), head, {"task": "none"})
    return model


def get_output_dropout_rate(model: TaskModel) -> float:
    """Return the dropout rate before the output layer."""
    assert isinstance(model.dropout, Dropout)
    return model.dropout.rate


@pytest.mark.parametrize("rate", [None, 0.0, 0.37])
@pytest.mark.parametrize("kind", ["single", "regression", "choice", "tags"])
def test_classifier_dropout_is_that_of_transformers(
    tmp_path: Path, kind: str, rate: float | None
) -> None:
    """The output layer has the rate of transformers, before and after fine-tuning."""
    head = next(head for head in HEADS if head.kind == kind)
    save_random_model(tmp_path / "start", head)
    config_file = tmp_path / "start" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"classifier_dropout": rate}))
    auto_class = AUTO_CLASSES.get(kind, AutoModelForSequenceClassification)
    expected = auto_class.from_pretrained(tmp_path / "start")
    assert expected.dropout.p == (expected.config.hidden_dropout_prob if rate is None else rate)
    loaded = load_for_fine_tuning(tmp_path / "start", head)
    assert get_output_dropout_rate(loaded.model) == expected.dropout.p
    save_fine_tuned(tmp_path / "tuned", loaded.model, loaded.tokenizer, head, {"task": "none"})
    assert auto_class.from_pretrained(tmp_path / "tuned").config.classifier_dropout == rate
    tuned = load_fine_tuned(tmp_path / "tuned")
    assert get_output_dropout_rate(tuned.model) == expected.dropout.p


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_transformers_gives_equal_outputs(tmp_path: Path, head: HeadConfig) -> None:
    """A model loaded by transformers has the same labels and logits, and no missing keys."""
    model = save_random_model(tmp_path / "model", head)
    auto_class = AUTO_CLASSES.get(head.kind, AutoModelForSequenceClassification)
    hf_model, loading_info = auto_class.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    if head.labels:
        id2label = hf_model.config.id2label
        assert tuple(id2label[index] for index in range(head.num_outputs)) == head.labels
    with torch.no_grad():
        outputs = model(pack_sequences(SEQUENCES))
        is_per_sequence = len(outputs) == len(SEQUENCES)
        rows = outputs if is_per_sequence else outputs.split([len(ids) for ids, _ in SEQUENCES])
        for sequence, row in zip(SEQUENCES, rows, strict=True):
            # The shape is [1, S], or [1, 1, S] for multiple choice: one prompt with one choice.
            ids, segments = (torch.tensor(values)[None] for values in sequence)
            if head.kind == "choice":
                ids, segments = ids[None], segments[None]
            hf_outputs = hf_model.eval()(input_ids=ids, token_type_ids=segments)
            if head.kind == "span":
                expected = torch.stack([hf_outputs.start_logits, hf_outputs.end_logits], -1)
            else:
                expected = hf_outputs.logits
            torch.testing.assert_close(row[None], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_saved_model_is_loaded_unchanged(tmp_path: Path, head: HeadConfig) -> None:
    """A loaded model has the weights, the labels and the task kind of the saved model."""
    model = save_random_model(tmp_path / "model", head)
    loaded = load_fine_tuned(tmp_path / "model")
    assert loaded.head == head
    assert not loaded.model.training
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_fine_tuning_keeps_encoder_and_initializes_head(tmp_path: Path) -> None:
    """Only the output layer is newly initialized, even if the model has a head of another task."""
    save_random_model(tmp_path / "model", HEADS[0])
    stored = load_file(tmp_path / "model" / bundle.WEIGHTS_FILE)
    torch.manual_seed(1)
    loaded = load_for_fine_tuning(tmp_path / "model", HEADS[1])
    assert loaded.info["newly_initialized"] == ["output.bias", "output.weight"]
    assert len(loaded.model.state_dict()["output.bias"]) == 5
    state = bundle.to_hf_state_dict(loaded.model.state_dict())
    for name, value in stored.items():
        if not name.startswith("classifier"):
            assert torch.equal(state[name], value), name


def test_output_layer_of_a_bilstm_is_not_kept(tmp_path: Path) -> None:
    """It has other inputs, even if it has the same shape as that of a model without BiLSTM."""
    config = make_prime_size_config(width=22, heads=2)
    head = HeadConfig("single", ("a", "b"))
    model = head.build_model(config, BiLSTMSettings(width=11, layers="last"))
    save_fine_tuned(tmp_path / "model", model, make_tokenizer(config.vocab_size), head, {})
    loaded = load_for_fine_tuning(tmp_path / "model", head, keep_head=True)
    assert {"output.bias", "output.weight"} <= set(loaded.info["newly_initialized"])


@pytest.mark.parametrize("has_pooler", [True, False])
def test_bare_encoder_can_be_fine_tuned(tmp_path: Path, has_pooler: bool) -> None:
    """A transformers BertModel with or without pooler is loaded with the same hidden states."""
    config = make_prime_size_config()
    torch.manual_seed(2)
    hf_config = bundle.to_hf_config(config)
    del hf_config["architectures"]
    hf_model = BertModel(BertConfig(**hf_config), add_pooling_layer=has_pooler).eval()
    hf_model.save_pretrained(tmp_path)
    make_tokenizer(config.vocab_size).save(tmp_path)
    loaded = load_for_fine_tuning(tmp_path, HEADS[0])
    new_pooler_weights = {
        name for name in loaded.info["newly_initialized"] if name.startswith("pooler.")
    }
    assert new_pooler_weights == (
        set() if has_pooler else {"pooler.dense.bias", "pooler.dense.weight"}
    )
    ids, segments = (torch.tensor([values]) for values in SEQUENCES[0])
    with torch.no_grad():
        expected = hf_model(ids, token_type_ids=segments).last_hidden_state[0]
        hidden = loaded.model.eval().bert(pack_sequences(SEQUENCES[:1]))
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("task", "command"), [("classify", "bertsmith predict"), ("rerank", "bertsmith rerank")]
)
def test_model_card_of_a_bilstm_names_a_command(tmp_path: Path, task: str, command: str) -> None:
    """The card of a model that no class of transformers loads names a command of Bertsmith."""
    head = HeadConfig("single", ("a", "b"))
    model = head.build_model(make_prime_size_config(), BiLSTMSettings(width=4, layers="last"))
    save_fine_tuned(tmp_path / "model", model, make_tokenizer(), head, {"task": task})
    card = (tmp_path / "model" / "README.md").read_text()
    assert f'```sh\n{command} "path or hub id" ' in card
    assert not re.search("transformers|Hugging Face|library_name|pipeline_tag", card)


def test_pretrained_model_is_rejected(tmp_path: Path) -> None:
    """The error message contains the model's class and the command that fine-tunes a model."""
    save_random_model(tmp_path / "model", HEADS[0])
    config_file = tmp_path / "model" / "config.json"
    text = config_file.read_text()
    config_file.write_text(text.replace("BertForSequenceClassification", "BertForPreTraining"))
    with pytest.raises(
        ModelError,
        match=r"not fine-tuned on a task: its class is BertForPreTraining; .*bertsmith finetune",
    ):
        load_fine_tuned(tmp_path / "model")


def test_missing_encoder_weight_is_rejected(tmp_path: Path) -> None:
    """A model without the bias of a LayerNorm in its encoder is an error."""
    save_random_model(tmp_path / "model", HEADS[0])
    file = tmp_path / "model" / bundle.WEIGHTS_FILE
    weights = load_file(file)
    del weights["bert.embeddings.LayerNorm.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"bert\.embeddings\.LayerNorm\.bias' is missing"):
        load_for_fine_tuning(tmp_path / "model", HEADS[0])
