"""Reading of bertsmith.json, the config and the tokenizer of a model directory, without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.bundle.config import read_config, read_json
from bertsmith.compatibility import upgrade_model_info
from bertsmith.errors import ModelError
from bertsmith.model.config import ModelConfig
from bertsmith.settings import get_table
from bertsmith.text.tokenizer_files import TOKENIZER_CONFIG_FILE
from bertsmith.text.wordpiece import Tokenizer

INFO_FILE = "bertsmith.json"


def read_info(directory: Path) -> dict[str, Any]:
    """Return the content of bertsmith.json, empty if there is none.

    Raises:
        ModelError: The file is damaged.
    """
    path = directory / INFO_FILE
    return upgrade_model_info(read_json(path)) if path.exists() else {}


def get_recorded_task(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task settings with which a model was fine-tuned; empty if not recorded.

    Args:
        info: The content of bertsmith.json.
    """
    return get_table(get_table(info, "provenance"), "task")


def read_max_seqlen(directory: Path, config: ModelConfig) -> int | None:
    """Return the number of tokens to which other libraries truncate inputs, if it is stored."""
    path = directory / TOKENIZER_CONFIG_FILE
    max_seqlen = read_json(path).get("model_max_length") if path.is_file() else None
    is_valid = type(max_seqlen) is int and 1 < max_seqlen <= config.max_positions
    return max_seqlen if is_valid else None


def read_metadata(directory: Path) -> tuple[dict[str, Any], ModelConfig, Tokenizer]:
    """Return the content of bertsmith.json, the model config and the tokenizer.

    Raises:
        ModelError: A file is missing or damaged, or the tokenizer has more tokens than the model.
    """
    info = read_info(directory)
    config = read_config(directory, info)
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size:,} tokens, but the model only "
            f"{config.vocab_size:,}; use the tokenizer with which the model was trained",
        )
    return info, config, tokenizer
