"""Reading of the config of a sparse model (SPLADE) in a sentence-transformers directory."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from bertsmith.bundle.config import read_json
from bertsmith.errors import ModelError
from bertsmith.interop.sentence_transformers.pooling import (
    MODULE_CONFIG,
    SPLADE_POOLING,
    PoolingConfig,
    find_root,
    read_model_config,
    read_modules,
    read_transformer_config,
)

SpladeMode = Literal["max", "sum"]
SpladeActivation = Literal["relu", "log1p_relu"]


@dataclass(frozen=True, kw_only=True)
class SpladeConfig:
    """Settings for combining the masked-LM logits of a text into one weight per vocabulary entry.

    Attributes:
        mode: How the tokens of a text are combined.
        activation: Activation of the logits before log(1 + x).
        text_config: Prompts, lowercasing and maximum length; its pooling has no effect.
    """

    mode: SpladeMode = "max"
    activation: SpladeActivation = "relu"
    text_config: PoolingConfig = field(default_factory=PoolingConfig)


def read_splade(directory: Path) -> SpladeConfig | None:
    """Read the config of a sparse model.

    Returns:
        The config; None if this is not a sentence-transformers directory of a sparse model.

    Raises:
        ModelError: A file cannot be read, or a setting is not supported.
    """
    root = find_root(directory)
    if root is None:
        return None
    (_, transformer_folder), (pooling_type, pooling_folder), *_ = read_modules(root)
    if pooling_type != SPLADE_POOLING:
        return None
    raw = read_json(pooling_folder / MODULE_CONFIG)
    mode = raw.get("pooling_strategy", "max")
    activation = raw.get("activation_function", "relu")
    for value, supported in ((mode, SpladeMode), (activation, SpladeActivation)):
        if value not in get_args(supported):
            raise ModelError(
                f"{pooling_folder / MODULE_CONFIG}: {value!r} is not supported; supported: "
                f"{', '.join(get_args(supported))}"
            )
    max_seq_length, lowercase = read_transformer_config(transformer_folder)
    text_config = replace(
        read_model_config(root), max_seq_length=max_seq_length, lowercase=lowercase
    )
    return SpladeConfig(mode=mode, activation=activation, text_config=text_config)
