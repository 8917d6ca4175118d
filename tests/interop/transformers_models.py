"""Random BERT models of transformers, saved in all weight formats of its releases."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

from tests.model.examples import (
    FEED_FORWARD,
    MAX_POSITIONS,
    NUM_HEADS,
    VOCAB_SIZE,
    WIDTH,
    make_tokenizer,
)

#: Name of a model in the tests -> its class in transformers and its config fields besides sizes.
MODEL_CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "BertModel": (BertModel, {}),
    "BertForPreTraining": (BertForPreTraining, {}),
    "BertForMaskedLM": (BertForMaskedLM, {}),
    "BertForNextSentencePrediction": (BertForNextSentencePrediction, {}),
    "one label": (BertForSequenceClassification, {"id2label": {0: "bad", 1: "fair", 2: "good"}}),
    "many labels": (
        BertForSequenceClassification,
        {"num_labels": 5, "problem_type": "multi_label_classification"},
    ),
    "regression": (BertForSequenceClassification, {"num_labels": 1}),
    "BertForTokenClassification": (
        BertForTokenClassification,
        {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}},
    ),
    "BertForQuestionAnswering": (BertForQuestionAnswering, {}),
    "BertForMultipleChoice": (BertForMultipleChoice, {}),
}


def make_transformers_model(name: str, **changes: Any) -> Any:
    """Return a model in eval mode with random weights, including biases and LayerNorm.

    Args:
        name: A key of ``MODEL_CLASSES``.
        changes: Config fields to change.
    """
    model_class, config_fields = MODEL_CLASSES[name]
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "intermediate_size": FEED_FORWARD,
        "max_position_embeddings": MAX_POSITIONS,
    }
    torch.manual_seed(0)
    model = model_class(BertConfig(**(sizes | config_fields | changes))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def copy_state(model: Any) -> dict[str, Tensor]:
    """Return a copy of a model's state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def rename_as_in_old_releases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the weight names and buffers of old releases of transformers.

    Releases before 2019 called LayerNorm's parameters gamma and beta. Releases until 2021 stored
    the buffer position_ids.
    """
    result = {}
    for name, value in state.items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")  # noqa: PLW2901
        result[name] = value
    prefix = "bert." if any(name.startswith("bert.") for name in state) else ""
    result[f"{prefix}embeddings.position_ids"] = torch.arange(MAX_POSITIONS)[None]
    if "cls.predictions.bias" in result:
        # Some releases stored the bias of the decoder only under this name.
        result["cls.predictions.decoder.bias"] = result.pop("cls.predictions.bias")
    return result


def double_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict whose names start with "module.bert.bert." instead of "bert."."""
    has_heads = any(name.startswith("bert.") for name in state)
    result = {}
    for name, value in state.items():
        new_name = re.sub("^bert", "bert.bert", name) if has_heads else f"bert.bert.{name}"
        result[f"module.{new_name}"] = value
    return result


def _write_safetensors(model: Any, directory: Path) -> None:
    """Write one safetensors file."""
    model.save_pretrained(directory)


def _write_sharded_safetensors(model: Any, directory: Path) -> None:
    """Write several safetensors files and their index."""
    model.save_pretrained(directory, max_shard_size="10KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 1


def _write_bin(model: Any, directory: Path) -> None:
    """Write a pickled checkpoint."""
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def _write_old_bin(model: Any, directory: Path) -> None:
    """Write a pickled checkpoint in the format before PyTorch 1.6, with old names."""
    state = rename_as_in_old_releases(copy_state(model))
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _write_sharded_bin(model: Any, directory: Path) -> None:
    """Write two pickled checkpoints and their index."""
    state = model.state_dict()
    names = list(state)
    file_of_tensor: dict[str, str] = {}
    for part, shard_names in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-{part:05}-of-00002.bin"
        torch.save({name: state[name] for name in shard_names}, directory / file)
        file_of_tensor |= dict.fromkeys(shard_names, file)
    index = {"metadata": {}, "weight_map": file_of_tensor}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _write_old_names(model: Any, directory: Path) -> None:
    """Write a safetensors file with the weight names of old releases."""
    save_file(rename_as_in_old_releases(copy_state(model)), directory / "model.safetensors")


def _write_doubled_prefixes(model: Any, directory: Path) -> None:
    """Write a safetensors file whose weight names have doubled prefixes."""
    save_file(double_prefixes(copy_state(model)), directory / "model.safetensors")


#: Name of a weight format -> function that writes a model's weights in this format.
WEIGHT_FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "safetensors": _write_safetensors,
    "sharded": _write_sharded_safetensors,
    "bin": _write_bin,
    "old bin": _write_old_bin,
    "sharded bin": _write_sharded_bin,
    "old names": _write_old_names,
    "doubled prefix": _write_doubled_prefixes,
}


def write_model_directory(model: Any, directory: Path, weight_format: str = "safetensors") -> Path:
    """Write a model directory in a weight format, with vocab.txt as its only tokenizer file."""
    directory.mkdir(parents=True, exist_ok=True)
    WEIGHT_FORMATS[weight_format](model, directory)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config))
    words = make_tokenizer(model.config.vocab_size).vocab
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return directory
