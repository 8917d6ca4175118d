"""Model directories with random weights."""

import json
from pathlib import Path
from typing import Any

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from tests.model.examples import make_prime_size_config, make_tokenizer, randomize_weights


def save_random_model(directory: Path, **config_changes: Any) -> BertForPreTraining:
    """Save a model with random weights and return it."""
    config = make_prime_size_config(**config_changes)
    model = randomize_weights(BertForPreTraining(config)).eval()
    bundle.save(directory, model, make_tokenizer(config.vocab_size), {"recipe": "none"})
    return model


def edit_config(directory: Path, **values: Any) -> None:
    """Change values of config.json; None is written as null."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
