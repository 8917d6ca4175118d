"""The model directory: config, weights, tokenizer and provenance, in Hugging Face's own layout.

It never knows how a model was trained, nor the forms of other makers' directories.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.errors import ModelError, SettingsError
from bertsmith.files import whole_directory, write_json
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

WEIGHTS, CONFIG, INFO = "model.safetensors", "config.json", "bertsmith.json"

#: Our config fields -> the directory's names for them.
_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "init_range": "initializer_range",
}
#: `gelu` there is the erf form, `gelu_new` and `gelu_pytorch_tanh` the tanh form.
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "elu": "elu"}
_ACTIVATIONS_READ = {v: k for k, v in _ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
#: What the plain format cannot say, and what a plain BERT has: these need ``model_type bertsmith``.
_PLAIN: dict[str, Any] = {"norm": "post", "attention": "bidirectional"}
#: What this model always does; a directory that asks for something else is refused.
_ALWAYS: dict[str, Any] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}

_PARTS = {
    "bert.embeddings.words.weight": "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.positions.weight": "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.segments.weight": "bert.embeddings.token_type_embeddings.weight",
    "bert.embeddings.norm": "bert.embeddings.LayerNorm",
    "bert.encoder.norm": "bert.encoder.LayerNorm",
    "pooler.dense": "bert.pooler.dense",
    "mlm.transform": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm.decoder.bias": "cls.predictions.bias",
    "nsp.classifier": "cls.seq_relationship",
}
_LAYER_PARTS = {
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))


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


def names(model_names: Iterator[str] | list[str]) -> dict[str, tuple[str, ...]]:
    """Map each of our parameter names to its names on disk: three for queries, keys and values."""
    result: dict[str, tuple[str, ...]] = {}
    for name in model_names:
        if name == "mlm.decoder.weight":
            continue  # It is the word embedding table, stored once.
        if name in _PARTS:
            result[name] = (_PARTS[name],)
            continue
        module, _, kind = name.rpartition(".")
        if module in _PARTS:
            result[name] = (f"{_PARTS[module]}.{kind}",)
            continue
        _, _, _, index, part = module.split(".", 4)
        stem = f"bert.encoder.layer.{index}"
        parts = _QKV if part == "attention.query_key_value" else (_LAYER_PARTS[part],)
        result[name] = tuple(f"{stem}.{part}.{kind}" for part in parts)
    return result


def to_disk(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state under the names of the directory, float32 on the CPU."""
    result = {}
    for ours, theirs in names(list(state)).items():
        pieces = state[ours].detach().float().cpu().chunk(len(theirs))
        result.update(
            {name: piece.contiguous() for name, piece in zip(theirs, pieces, strict=True)}
        )
    return result


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return config.json's content; ``model_type`` is ``bertsmith`` for what plain BERT is not."""
    ours = config.model_dump()
    result: dict[str, Any] = {theirs: ours[name] for name, theirs in _CONFIG_NAMES.items()}
    result["hidden_act"] = _ACTIVATIONS[config.activation]
    result["architectures"] = ["BertForPreTraining" if config.nsp else "BertForMaskedLM"]
    result |= {"model_type": "bert", "pad_token_id": 0, "tie_word_embeddings": True}
    result["dtype"] = "float32"
    beyond = {key: ours[key] for key, plain in _PLAIN.items() if ours[key] != plain}
    if beyond or config.activation == "elu":
        result |= {"model_type": "bertsmith", "bertsmith": beyond}
        result["architectures"] = ["BertsmithForPreTraining"]
    return result


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
    info = _read_json(directory / INFO) if (directory / INFO).exists() else {}
    config = read_config(directory, info)
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} words, but the model only "
            f"{config.vocab_size}; use the tokenizer that the model was trained with"
        )
    state = read_weights(directory / WEIGHTS, config)
    model = PreTrainingModel(config)
    model.load_state_dict(state)
    return Bundle(model.to(device).eval(), tokenizer, config, directory, info)


def locate(path: Path) -> Path:
    """Return the model directory at ``path``: itself, or ``path/model`` of a RUN."""
    for directory in (path, path / "model"):
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


def read_config(directory: Path, info: Mapping[str, Any]) -> ModelConfig:
    """Read config.json, and from ``info`` what it cannot say."""
    path = directory / CONFIG
    raw = _read_json(path)
    kind = raw.get("model_type")
    if kind not in ("bert", "bertsmith"):
        raise ModelError(f"{path}: model_type is {kind!r}; expected 'bert' (or 'bertsmith')")
    missing = [name for name in ("vocab_size", "hidden_size") if name not in raw]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} is missing")
    strange = {key: raw[key] for key, own in _ALWAYS.items() if raw.get(key, own) != own}
    for key, found in strange.items():
        raise ModelError(f"{path}: {key} is {found!r}; only {_ALWAYS[key]!r} is known here")
    values = {ours: raw[theirs] for ours, theirs in _CONFIG_NAMES.items() if theirs in raw}
    activation = raw.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS_READ:
        known = ", ".join(_ACTIVATIONS_READ)
        raise ModelError(f"{path}: hidden_act is {activation!r}; known here: {known}")
    values["activation"] = _ACTIVATIONS_READ[activation]
    values["positions"] = info.get("positions", "learned")
    classes = raw.get("architectures") or []
    values["nsp"] = "BertForPreTraining" in classes or info.get("nsp", False)
    try:
        return ModelConfig.parse(values | raw.get("bertsmith", {}), str(path))
    except SettingsError as error:
        raise ModelError(str(error)) from None


def read_weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Read the weights under our names, after checking every name and shape against ``config``."""
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in PreTrainingModel(config).state_dict().items()}
    state: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            for ours, theirs in names(list(shapes)).items():
                absent = [name for name in theirs if name not in stored]
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
    state["mlm.decoder.weight"] = state["bert.embeddings.words.weight"]
    return state


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value
