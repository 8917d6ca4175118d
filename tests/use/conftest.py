"""A small random model with a small vocabulary, and the same directory read by the peer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertForPreTraining

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining as PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece

TEXT = [
    "The forge stood where the two roads met, and the smith worked there until dark.",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "When the iron was white he lifted it, turned it once, and struck.",
    "A boy from the village carried water to the smith and asked many questions.",
    "Some questions had answers; others were answered by the hammer alone.",
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A vocabulary learnt from five sentences, lowered."""
    return train_wordpiece(iter(TEXT * 3), 227)


def make(directory: Path, tokenizer: Tokenizer, *, nsp: bool = True, spread: float = 0.3) -> Path:
    """Save a random model whose numbers differ clearly from place to place; return its path."""
    torch.manual_seed(7)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=26,
        heads=2,
        feed_forward=37,
        max_positions=61,
        init_range=spread,
        nsp=nsp,
    )
    model = PreTrainingModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    bundle.save(directory, model, tokenizer, {})
    return directory


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The model directory of a random model with a next-sentence head."""
    return make(tmp_path_factory.mktemp("models") / "paired", tokenizer)


@pytest.fixture(scope="session")
def directory_without_pairs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The model directory of a random model without a next-sentence head."""
    return make(tmp_path_factory.mktemp("models") / "single", tokenizer, nsp=False)


@pytest.fixture(scope="session")
def loaded(directory: Path) -> bundle.PretrainedBundle:
    """The model with a next-sentence head, loaded."""
    return bundle.load(directory)


@pytest.fixture(scope="session")
def peer(directory: Path) -> tuple[Any, Any]:
    """The same directory as `transformers` reads it: (tokenizer, BertForPreTraining)."""
    model = BertForPreTraining.from_pretrained(directory, attn_implementation="eager").eval()
    return AutoTokenizer.from_pretrained(directory), model
