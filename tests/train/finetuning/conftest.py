"""The model that fine-tuning tests start from, and tables of examples."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from tests.model.examples import make_prime_size_config
from tests.train.conftest import make_tokenizer


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with random weights and the vocabulary WORDS."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = make_prime_size_config(
        vocab_size=tokenizer.vocab_size, width=32, heads=2, feed_forward=61, init_range=0.1
    )
    directory = tmp_path_factory.mktemp("start") / "model"
    bundle.save(directory, BertForPreTraining(config), tokenizer, {})
    return directory


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
