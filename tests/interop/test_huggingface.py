"""Export for transformers: notes about models that transformers cannot load."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.bundle import HeadConfig, save, save_fine_tuned
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
