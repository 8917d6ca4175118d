"""The model directory of a pre-trained model: written whole, read with every name checked.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.bundle.config import CONFIG, config_json, read_config, read_json
from bertsmith.bundle.names import names, to_disk
from bertsmith.errors import ModelError
from bertsmith.files import whole_directory, write_json
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

WEIGHTS, INFO = "model.safetensors", "bertsmith.json"


@dataclass(frozen=True)
class Bundle:
    """A model directory in memory.

    info: what ``bertsmith.json`` says: recipe, provenance, and what config.json cannot hold.
    """

    model: PreTrainingModel
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)


def save(
    directory: Path, model: PreTrainingModel, tokenizer: Tokenizer, info: Mapping[str, Any]
) -> None:
    """Write a model directory, whole or not at all; an older one is replaced at the end."""
    config = model.config
    with whole_directory(directory) as new:
        save_file(to_disk(model.state_dict()), new / WEIGHTS, metadata={"format": "pt"})
        write_json(new / CONFIG, config_json(config) | {"pad_token_id": tokenizer.pad_id})
        write_json(new / INFO, {**info, "positions": config.positions, "nsp": config.nsp})
        tokenizer.save(new, config.max_positions)


def load(path: Path | str, *, device: torch.device | str = "cpu") -> Bundle:
    """Read a model directory, or the one inside a RUN, ready for use (eval mode).

    Raises ModelError if something is missing, broken or does not fit.
    """
    directory = locate(Path(path))
    info, config, tokenizer = read_parts(directory)
    state = read_weights(directory / WEIGHTS, config)
    model = PreTrainingModel(config)
    model.load_state_dict(state)
    return Bundle(model.to(device).eval(), tokenizer, config, directory, info)


def read_parts(directory: Path) -> tuple[dict[str, Any], ModelConfig, Tokenizer]:
    """Read all but the weights: what ``bertsmith.json`` says, config and tokenizer, if they fit."""
    info = read_json(directory / INFO) if (directory / INFO).exists() else {}
    config = read_config(directory, info)
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} words, but the model only "
            f"{config.vocab_size}; use the tokenizer that the model was trained with"
        )
    return info, config, tokenizer


def locate(path: Path) -> Path:
    """Return the model directory at ``path``: itself, or ``path/model`` of a RUN.

    Or, in a directory of sentence-transformers, the folder of its Transformer.
    """
    for directory in (path, path / "model", path / "0_Transformer"):
        if (directory / CONFIG).is_file() and (directory / WEIGHTS).is_file():
            return directory
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; expected a model directory or a RUN")
    if (path / "checkpoints").is_dir():
        raise ModelError(
            f"{path}: this run has not written its model yet; run the same `bertsmith pretrain` "
            "command again to finish it"
        )
    raise ModelError(
        f"{path}: not a model directory (no {CONFIG} with {WEIGHTS} in it) and not a RUN"
    )


def read_weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Read a pre-trained model's weights, after checking names and shapes against ``config``."""
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in PreTrainingModel(config).state_dict().items()}
    state = read_tensors(path, shapes)
    state["mlm.decoder.weight"] = state["bert.embeddings.words.weight"]
    return state


def read_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """Read weights under our names, float32, after checking every name and shape.

    ``shapes``: those of our names. A bare encoder's names begin without "bert.". Of ``optional``
    names, those that are not in the file are left out. Raises ModelError.
    """
    state: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            bare = not any(name.startswith("bert.") for name in stored)
            for ours, wanted in names(list(shapes)).items():
                theirs = [name.removeprefix("bert.") if bare else name for name in wanted]
                absent = [name for name in theirs if name not in stored]
                if absent and ours in optional:
                    continue
                if absent:
                    raise ModelError(f"{path}: the tensor {absent[0]!r} is missing")
                first, *rest = shapes[ours]
                expected = (first // len(theirs), *rest)
                for name in theirs:
                    found = tuple(file.get_slice(name).get_shape())
                    if found != expected:
                        raise ModelError(
                            f"{path}: {name} has shape {found}; {CONFIG} asks for {expected}"
                        )
                state[ours] = torch.cat([file.get_tensor(name) for name in theirs]).float()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
    return state
