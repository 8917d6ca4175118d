"""Export for transformers: notes about models that transformers cannot load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForMaskedLM

from bertsmith.bundle import HeadConfig, load, save, save_fine_tuned
from bertsmith.errors import SettingsError
from bertsmith.interop.huggingface import write_huggingface
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings, ModelConfig
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
