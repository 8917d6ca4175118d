"""Conversion between ``ModelConfig`` and Hugging Face's config.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import ModelError, SettingsError
from bertsmith.files import parse_json
from bertsmith.model.config import ModelConfig

CONFIG_FILE = "config.json"
#: Text classification with one label, text classification with any number of labels, regression,
#: multiple choice, extractive question answering, named entity recognition, and token tagging.
TaskKind = Literal["single", "multi", "regression", "choice", "span", "entities", "tags"]
#: Task kind -> name of the class in transformers, without "BertFor".
HF_CLASS_SUFFIXES: dict[TaskKind, str] = {
    "single": "SequenceClassification",
    "multi": "SequenceClassification",
    "regression": "SequenceClassification",
    "choice": "MultipleChoice",
    "span": "QuestionAnswering",
    "entities": "TokenClassification",
    "tags": "TokenClassification",
}

#: ``ModelConfig`` field -> config.json key.
HF_FIELD_NAMES = {
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
#: Field of ``ModelConfig`` and optional key of config.json, which the original BERT does not have.
_CLASSIFIER_DROPOUT = "classifier_dropout"
#: ``ModelConfig.activation`` -> ``hidden_act`` in config.json. In both, `gelu` is the erf form of
#: GELU. The tanh form is `gelu_new` in config.json. Both have other names in other releases.
_HF_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "elu": "elu"}
_ACTIVATION_BY_HF_NAME = {hf_name: name for name, hf_name in _HF_ACTIVATIONS.items()} | {
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
#: Fields that a config.json with ``model_type: bert`` cannot express, and their values in the
#: original BERT. A model with another value is written with ``model_type: bertsmith``.
_PLAIN_BERT_VALUES: dict[str, Any] = {"norm": "post", "attention": "bidirectional"}
#: config.json keys with only one supported value; models with another value are rejected. Whether
#: the masked-LM decoder is tied follows from the weights, see ``copy_weights``.
_SUPPORTED_VALUES: dict[str, Any] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
#: ``model_type`` of other architectures -> name of the architecture. In lower case, the names of
#: their classes start with the ``model_type``.
_OTHER_ARCHITECTURES = {
    "roberta": "RoBERTa", "xlmroberta": "XLM-RoBERTa", "xlm-roberta": "XLM-RoBERTa",
    "camembert": "CamemBERT", "distilbert": "DistilBERT", "albert": "ALBERT",
    "electra": "ELECTRA", "deberta": "DeBERTa", "deberta-v2": "DeBERTa",
    "mobilebert": "MobileBERT", "modernbert": "ModernBERT", "nomic_bert": "NomicBERT",
    "megatron-bert": "Megatron-BERT", "squeezebert": "SqueezeBERT", "convbert": "ConvBERT",
}  # fmt: skip
#: Maximum size of config.json or a weight index, enough for several hundred thousand labels.
_MAX_JSON_BYTES = 16 * 2**20
#: Maximum nesting depth. Python's JSON encoder fails at about 1,000 levels.
_MAX_JSON_DEPTH = 64


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json.

    ``model_type`` is ``bertsmith`` for models that transformers' BERT cannot compute.
    """
    values = config.model_dump()
    hf_config: dict[str, Any] = {
        hf_name: values[field] for field, hf_name in HF_FIELD_NAMES.items()
    }
    if config.classifier_dropout is not None:
        hf_config[_CLASSIFIER_DROPOUT] = config.classifier_dropout
    hf_config["hidden_act"] = _HF_ACTIVATIONS[config.activation]
    hf_config["architectures"] = ["BertForPreTraining" if config.nsp else "BertForMaskedLM"]
    hf_config |= {"model_type": "bert", "pad_token_id": 0, "tie_word_embeddings": True}
    hf_config["dtype"] = "float32"
    extra_fields = {
        field: values[field]
        for field, plain in _PLAIN_BERT_VALUES.items()
        if values[field] != plain
    }
    if extra_fields or config.activation == "elu":
        hf_config |= {"model_type": "bertsmith", "bertsmith": extra_fields}
        hf_config["architectures"] = ["BertsmithForPreTraining"]
    return hf_config


def read_config(directory: Path, info: Mapping[str, Any]) -> ModelConfig:
    """Read config.json.

    Args:
        directory: The model directory.
        info: Content of bertsmith.json, with the fields that config.json cannot express.

    Raises:
        ModelError: config.json is unreadable or incomplete, or describes another architecture.
    """
    path = directory / CONFIG_FILE
    hf_config = read_json(path)
    _check_architecture(hf_config, path)
    check_required_keys(hf_config, path)
    _check_supported_values(hf_config, path)
    values = {
        field: hf_config[hf_name]
        for field, hf_name in HF_FIELD_NAMES.items()
        if hf_name in hf_config
    }
    values[_CLASSIFIER_DROPOUT] = hf_config.get(_CLASSIFIER_DROPOUT)
    values["activation"] = _read_activation(hf_config, path)
    values["positions"] = info.get("positions", "learned")
    nsp_classes = {"BertForPreTraining", "BertForNextSentencePrediction"}
    values["nsp"] = bool(nsp_classes & set(get_architectures(hf_config))) or info.get("nsp", False)
    extra_fields = hf_config.get("bertsmith", {})
    if not isinstance(extra_fields, dict):
        raise ModelError(
            f"{path}: the value of the key bertsmith is {extra_fields!r}; expected an object"
        )
    try:
        return ModelConfig.parse(values | extra_fields, str(path))
    except SettingsError as error:
        raise ModelError(str(error)) from None


def check_required_keys(hf_config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError if a config has no vocabulary size or width, which have no default."""
    missing = [key for key in ("vocab_size", "hidden_size") if key not in hf_config]
    if missing:
        raise ModelError(
            f"{path}: these keys are missing: {', '.join(missing)}; add the model's values"
        )


def _check_supported_values(hf_config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError if a key of ``_SUPPORTED_VALUES`` has another value."""
    for key, supported in _SUPPORTED_VALUES.items():
        value = hf_config.get(key, supported)
        if value != supported:
            raise ModelError(
                f"{path}: {key} is {value!r}, but only {supported!r} is supported; use another "
                "model"
            )


def _read_activation(hf_config: Mapping[str, Any], path: Path) -> str:
    """Return ``ModelConfig.activation`` for ``hidden_act`` in config.json."""
    hf_name = hf_config.get("hidden_act", "gelu")
    if not isinstance(hf_name, str) or hf_name not in _ACTIVATION_BY_HF_NAME:
        supported_names = ", ".join(_ACTIVATION_BY_HF_NAME)
        raise ModelError(f"{path}: hidden_act is {hf_name!r}; supported: {supported_names}")
    return _ACTIVATION_BY_HF_NAME[hf_name]


def get_architectures(hf_config: Mapping[str, Any]) -> list[str]:
    """Return the class names in ``architectures`` of config.json; empty if it is not a list."""
    names = hf_config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def is_fine_tuned(directory: Path) -> bool:
    """Return whether config.json of a model directory contains a class with a task head."""
    return _find_task_kind(get_architectures(read_json(directory / CONFIG_FILE))) is not None


def require_task_kind(directory: Path) -> TaskKind:
    """Return the task kind of a fine-tuned model from the class names in its config.

    If the class belongs to several kinds, the first of them in ``HF_CLASS_SUFFIXES`` is returned.

    Raises:
        ModelError: The config is not readable, or the model is not fine-tuned.
    """
    class_names = get_architectures(read_json(directory / CONFIG_FILE))
    kind = _find_task_kind(class_names)
    if kind is None:
        raise ModelError(
            f"{directory}: this model is not fine-tuned on a task: its class is "
            f"{', '.join(class_names) or 'not specified'}; fine-tune it with `bertsmith finetune`",
        )
    return kind


def _find_task_kind(class_names: Sequence[str]) -> TaskKind | None:
    """Return the first task kind that one of the classes belongs to; None if there is none."""
    for kind, suffix in HF_CLASS_SUFFIXES.items():
        if any(name.endswith(f"For{suffix}") for name in class_names):
            return kind
    return None


def _check_architecture(hf_config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError unless the model is a BERT."""
    # Configs written before 2020 have no model_type.
    model_type = hf_config.get("model_type", "bert")
    if model_type not in ("bert", "bertsmith"):
        name = _OTHER_ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
        type_text = f"{model_type!r} ({name})" if name else repr(model_type)
        raise ModelError(
            f"{path}: model_type is {type_text}; expected 'bert' or 'bertsmith'; use a BERT model",
        )
    for class_name in get_architectures(hf_config):
        has_other_prefix = class_name.lower().startswith(tuple(_OTHER_ARCHITECTURES))
        if has_other_prefix and not class_name.startswith("Bert"):
            raise ModelError(
                f"{path}: architectures contains {class_name}, which is not a BERT class; use a "
                "BERT model"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: The file is missing, too large, too deeply nested, or not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(
                f"{path}: the file is too large: {path.stat().st_size:,} bytes; the maximum is "
                f"{_MAX_JSON_BYTES:,} bytes",
            )
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    if _is_too_deep(value):
        raise ModelError(f"{path}: the JSON is nested more than {_MAX_JSON_DEPTH} levels deep")
    return value


def _is_too_deep(value: dict[str, Any]) -> bool:
    """Return whether objects and arrays are nested more than ``_MAX_JSON_DEPTH`` levels deep."""
    # This is a loop, because recursion could overflow the stack.
    containers: list[Any] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        children: list[Any] = []
        for container in containers:
            children += container.values() if isinstance(container, dict) else container
        containers = [child for child in children if isinstance(child, dict | list)]
        if not containers:
            return False
    return True
