"""Export for transformers: notes about models that transformers cannot load."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, BertForSequenceClassification, pipeline

from bertsmith.bundle import HeadConfig, load, load_fine_tuned, save, save_fine_tuned
from bertsmith.errors import SettingsError
from bertsmith.interop.huggingface import write_huggingface
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.text import wordpiece
from bertsmith.text.segmenter import SEGMENTER_NOTE
from tests.text.test_vocabulary_extension import HalvingSegmenter
from tests.train.conftest import make_tokenizer

SIZES = {"layers": 4, "width": 16, "heads": 2, "feed_forward": 8, "max_positions": 16}


@pytest.mark.parametrize(
    ("changes", "has_note"),
    [
        ({}, False),
        ({"activation": "relu"}, False),
        ({"activation": "elu"}, True),
        ({"norm": "pre"}, True),
        ({"attention": "causal"}, True),
    ],
)
def test_note_says_that_transformers_cannot_load_a_model(
    tmp_path: Path, changes: dict[str, Any], has_note: bool
) -> None:
    """There is a note for each model whose config has model_type bertsmith."""
    tokenizer = make_tokenizer()
    config = ModelConfig.parse({**SIZES, "vocab_size": tokenizer.vocab_size, **changes}, "test")
    save(tmp_path / "model", BertForPreTraining(config), tokenizer, {})
    notes = write_huggingface(tmp_path / "model", tmp_path / "hf")
    assert ["transformers cannot load this model" in note for note in notes] == [True] * has_note


def test_note_says_that_transformers_cannot_load_a_bilstm(tmp_path: Path) -> None:
    """A fine-tuned model with a BiLSTM has the note, too."""
    tokenizer = make_tokenizer()
    config = ModelConfig.parse({**SIZES, "vocab_size": tokenizer.vocab_size}, "test")
    head = HeadConfig("single", ("a", "b"))
    torch.manual_seed(0)
    model = head.build_model(config, BiLSTMSettings(width=4))
    save_fine_tuned(tmp_path / "model", model, tokenizer, head, {})
    notes = write_huggingface(tmp_path / "model", tmp_path / "hf")
    assert "BiLSTM" in notes[0]


def test_note_says_that_texts_must_be_segmented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a note, because transformers does not run the segmenter of a model."""
    monkeypatch.setattr(wordpiece, "load_segmenter", lambda *_: HalvingSegmenter())
    spec = replace(make_tokenizer().spec, segmenter=("halves", "1.0"))
    config = ModelConfig.parse({**SIZES, "vocab_size": len(spec.vocab)}, "test")
    save(tmp_path / "model", BertForPreTraining(config), wordpiece.Tokenizer(spec), {})
    assert write_huggingface(tmp_path / "model", tmp_path / "hf") == [SEGMENTER_NOTE]


def test_dropped_weights_are_reported(tmp_path: Path) -> None:
    """Weights of the source that the new directory does not have are in the notes."""
    tokenizer = make_tokenizer()
    config = ModelConfig.parse({**SIZES, "vocab_size": tokenizer.vocab_size}, "test")
    head = HeadConfig("single", ("a", "b"))
    save_fine_tuned(tmp_path / "model", head.build_model(config), tokenizer, head, {})
    weights = tmp_path / "model" / "model.safetensors"
    save_file(load_file(weights) | {"projection.weight": torch.zeros(2)}, weights)
    (note,) = write_huggingface(tmp_path / "model", tmp_path / "hf")
    assert "unused weights: projection.weight" in note


def test_number_of_labels_without_names(tmp_path: Path) -> None:
    """A config.json with num_labels but no id2label has the labels of transformers."""
    tokenizer = make_tokenizer()
    config = ModelConfig.parse({**SIZES, "vocab_size": tokenizer.vocab_size}, "test")
    head = HeadConfig("single", ("a", "b", "c"))
    save_fine_tuned(tmp_path / "model", head.build_model(config), tokenizer, head, {})
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    del values["id2label"], values["label2id"]
    path.write_text(json.dumps(values | {"num_labels": 3}))
    labels = load_fine_tuned(tmp_path / "model").head.labels
    hf_labels = BertForSequenceClassification.from_pretrained(tmp_path / "model").config.id2label
    assert labels == tuple(hf_labels.values()) == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("problem_type", [None, "regression"])
def test_label_of_a_single_score_is_kept(tmp_path: Path, problem_type: str | None) -> None:
    """A copy has the label and problem type, which decide whether transformers uses a sigmoid."""
    tokenizer = make_tokenizer()
    config = ModelConfig.parse({**SIZES, "vocab_size": tokenizer.vocab_size}, "test")
    head = HeadConfig("regression")
    save_fine_tuned(tmp_path / "model", head.build_model(config), tokenizer, head, {})
    path = tmp_path / "model" / "config.json"
    outputs = {"id2label": {"0": "TOXIC"}, "label2id": {"TOXIC": 0}, "problem_type": problem_type}
    path.write_text(json.dumps(json.loads(path.read_text()) | outputs))
    write_huggingface(tmp_path / "model", tmp_path / "hf")
    hf_config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key: hf_config[key] for key in outputs} == outputs
    predict = pipeline("text-classification", str(tmp_path / "hf"))
    expected = pipeline("text-classification", str(tmp_path / "model"))("a text")
    assert predict("a text") == expected


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_weights_stored_in_16_bits_load_as_their_rounded_values(tmp_path: Path, name: str) -> None:
    """The file has half the size; Bertsmith and transformers load the same fp32 weights."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    tokenizer = make_tokenizer()
    config = ModelConfig.parse({**SIZES, "vocab_size": tokenizer.vocab_size, "nsp": False}, "test")
    torch.manual_seed(0)
    model = BertForPreTraining(config)
    save(tmp_path / "model", model, tokenizer, {})
    assert write_huggingface(tmp_path / "model", tmp_path / "hf", dtype=name) == []
    loaded = load(tmp_path / "hf").model
    rounded = {key: value.to(dtype).float() for key, value in model.state_dict().items()}
    torch.testing.assert_close(dict(loaded.state_dict()), rounded, rtol=0, atol=0)
    assert not torch.equal(loaded.bert.embeddings.words.weight, model.bert.embeddings.words.weight)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    hf_model = BertForMaskedLM.from_pretrained(tmp_path / "hf")
    assert hf_model.dtype == torch.float32
    weight = hf_model.get_input_embeddings().weight
    torch.testing.assert_close(weight, loaded.bert.embeddings.words.weight, rtol=0, atol=0)


def test_unknown_dtype_is_an_error(tmp_path: Path) -> None:
    """The error lists the valid values, and nothing is written."""
    with pytest.raises(SettingsError, match="--dtype int4: expected one of fp32, bf16, fp16"):
        write_huggingface(tmp_path / "model", tmp_path / "hf", dtype="int4")
    assert not (tmp_path / "hf").exists()
