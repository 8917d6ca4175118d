"""config.json: our config in Hugging Face's terms, both ways.

It never knows weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import ModelError, SettingsError
from bertsmith.files import parse_json
from bertsmith.model.config import ModelConfig

CONFIG_FILE = "config.json"
#: What a model says: one label of several, any number of several, or a number for a text; the right
#: one of several endings; a span of a text; names in a text, or a tag for each of its words.
TaskKind = Literal["single", "multi", "regression", "choice", "span", "entities", "tags"]

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
#: Relatives that are refused, by their model_type; their classes begin with the same letters.
_OTHERS = {
    "roberta": "RoBERTa", "xlmroberta": "XLM-RoBERTa", "xlm-roberta": "XLM-RoBERTa",
    "camembert": "CamemBERT", "distilbert": "DistilBERT", "albert": "ALBERT",
    "electra": "ELECTRA", "deberta": "DeBERTa", "deberta-v2": "DeBERTa",
    "mobilebert": "MobileBERT", "modernbert": "ModernBERT", "nomic_bert": "NomicBERT",
    "megatron-bert": "Megatron-BERT", "squeezebert": "SqueezeBERT", "convbert": "ConvBERT",
}  # fmt: skip
#: Bytes of a config.json or an index: each of some hundred thousand labels or tensors has a line.
_MOST = 16 * 2**20
#: Levels of nesting that are read. Python cannot write what is nested a thousand deep.
_DEPTH = 64


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
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


def read_config(directory: Path, info: Mapping[str, Any]) -> ModelConfig:
    """Read config.json, and from ``info`` what it cannot say."""
    path = directory / CONFIG_FILE
    raw = read_json(path)
    _check_kind(raw, path)
    missing = [name for name in ("vocab_size", "hidden_size") if name not in raw]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} is missing")
    strange = {key: raw[key] for key, own in _ALWAYS.items() if raw.get(key, own) != own}
    for key, found in strange.items():
        raise ModelError(f"{path}: {key} is {found!r}; only {_ALWAYS[key]!r} is known here")
    values = {ours: raw[theirs] for ours, theirs in _CONFIG_NAMES.items() if theirs in raw}
    activation = raw.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS_READ:
        known = ", ".join(_ACTIVATIONS_READ)
        raise ModelError(f"{path}: hidden_act is {activation!r}; known here: {known}")
    values["activation"] = _ACTIVATIONS_READ[activation]
    values["positions"] = info.get("positions", "learned")
    pairs = {"BertForPreTraining", "BertForNextSentencePrediction"}
    values["nsp"] = bool(pairs & set(get_architectures(raw))) or info.get("nsp", False)
    beyond = raw.get("bertsmith", {})
    if not isinstance(beyond, dict):
        raise ModelError(f"{path}: bertsmith is {beyond!r}; expected an object")
    try:
        return ModelConfig.parse(values | beyond, str(path))
    except SettingsError as error:
        raise ModelError(str(error)) from None


def get_architectures(raw: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config.json speaks of, none for what is no list of names."""
    found = raw.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


def _check_kind(raw: Mapping[str, Any], path: Path) -> None:
    """Refuse what is not a BERT, by name. A config.json from before 2020 has no model_type."""
    kind = raw.get("model_type", "bert")
    name = _OTHERS.get(kind) if isinstance(kind, str) else None
    if kind not in ("bert", "bertsmith"):
        found = f" ({name}, another model)" if name else ""
        raise ModelError(f"{path}: model_type is {kind!r}; expected 'bert' (or 'bertsmith'){found}")
    for own in get_architectures(raw):
        if own.lower().startswith(tuple(_OTHERS)) and not own.startswith("Bert"):
            raise ModelError(f"{path}: architectures names {own}, which is not a BERT")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ModelError if there is none."""
    try:
        if path.stat().st_size > _MOST:
            raise ModelError(f"{path}: {path.stat().st_size:,} bytes; too many for such a file")
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    if _is_deep(value):
        raise ModelError(f"{path}: nested more than {_DEPTH} levels deep; no model needs that")
    return value


def _is_deep(value: dict[str, Any]) -> bool:
    """Tell whether containers are nested deeper than ``_DEPTH``, without recursion."""
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        children = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in children for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
