"""Fixtures: a small random model and its vocabulary, loaded by Bertsmith and by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers import BertForPreTraining as HfBertForPreTraining

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.use import embed_chunks
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import build_vector_settings

SENTENCES = [
    "The forge stood where the two roads met, and the smith worked there until dark.",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "When the iron was white he lifted it, turned it once, and struck.",
    "A boy from the village carried water to the smith and asked many questions.",
    "Some questions had answers; others were answered by the hammer alone.",
]
#: Lines with unusual separators, control characters or Hangul, and lines without words.
UNUSUAL_LINES = [
    "one\u2028line",
    "a\ttab",
    "a\0zero",
    "",
    "  ",
    "\x85next",
    "\ufeffmark",
    "대장간의 망치",
    "\r",
]
#: The lines that tests of ``embed_lines`` embed.
LINES = [
    *SENTENCES,
    *UNUSUAL_LINES,
    "the smith " * 60,
    *reversed(SENTENCES),
    *(f"{number} hammers" for number in range(20)),
]
#: Settings for one vector per text.
TEXT_SETTINGS = build_vector_settings()
#: Number of lines per chunk with the fixture ``small_chunks``, so that LINES need several chunks.
LINES_PER_CHUNK = 7

#: Hidden width and maximum number of tokens of the random model.
WIDTH = 26
MAX_POSITIONS = 61


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer with 227 lowercase tokens learned from the five sentences."""
    return train_wordpiece(iter(SENTENCES * 3), 227)


def save_random_model(
    directory: Path, tokenizer: Tokenizer, *, nsp: bool = True, init_range: float = 0.3
) -> Path:
    """Save a random model and return its directory.

    The weights are larger than usual, so that different inputs have clearly different outputs.
    """
    torch.manual_seed(7)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=WIDTH,
        heads=2,
        feed_forward=37,
        max_positions=MAX_POSITIONS,
        init_range=init_range,
        nsp=nsp,
    )
    model = BertForPreTraining(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    bundle.save(directory, model, tokenizer, {})
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Directory of a random model with masked-LM and next-sentence heads."""
    return save_random_model(tmp_path_factory.mktemp("models") / "paired", tokenizer)


@pytest.fixture(scope="session")
def model_dir_without_nsp(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Directory of a random model with a masked-LM head only."""
    return save_random_model(tmp_path_factory.mktemp("models") / "single", tokenizer, nsp=False)


@pytest.fixture(scope="session")
def pretrained(model_dir: Path) -> bundle.PretrainedBundle:
    """The random model with both heads, loaded by Bertsmith."""
    return bundle.load(model_dir)


@pytest.fixture(scope="session")
def embedder(model_dir: Path) -> Embedder:
    """The random model with both heads, loaded for embedding."""
    return Embedder.load(model_dir)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed at most ``LINES_PER_CHUNK`` lines per chunk."""
    monkeypatch.setattr(embed_chunks, "_MAX_LINES", LINES_PER_CHUNK)


@pytest.fixture(scope="session")
def hf_tokenizer_and_model(model_dir: Path) -> tuple[Any, Any]:
    """The random model with both heads, loaded by transformers: (tokenizer, model)."""
    model = HfBertForPreTraining.from_pretrained(model_dir, attn_implementation="eager").eval()
    return AutoTokenizer.from_pretrained(model_dir), model
