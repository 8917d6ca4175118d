"""The parts of a model directory that are read without torch: config, tokenizer, bertsmith.json."""

from pathlib import Path
from typing import Any

from bertsmith.bundle.config import read_config, read_json
from bertsmith.errors import ModelError
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

INFO_FILE = "bertsmith.json"


def read_metadata(directory: Path) -> tuple[dict[str, Any], ModelConfig, Tokenizer]:
    """Read all but the weights: what ``bertsmith.json`` says, config and tokenizer, if they fit."""
    info = read_json(directory / INFO_FILE) if (directory / INFO_FILE).exists() else {}
    config = read_config(directory, info)
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} words, but the model only "
            f"{config.vocab_size}; use the tokenizer that the model was trained with"
        )
    return info, config, tokenizer
