"""Random models of transformers, written in every form that its users have left behind.

It never asks Bertsmith to read them.
"""

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

from tests.model.examples import make_tokenizer

#: Every class of BERT, by its name; the config's fields that a class needs beside the sizes.
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
    """Return a random model of a class, in eval mode; no two of its weights are alike."""
    kind, needs = MODEL_CLASSES[name]
    sizes = {
        "vocab_size": 101,
        "hidden_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 37,
        "max_position_embeddings": 43,
    }
    torch.manual_seed(0)
    model = kind(BertConfig(**(sizes | needs | changes))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def state_of(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a release of transformers stored, each a copy."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as releases before 2019 named it, with the buffers of those of 2021."""
    result = {}
    for name, value in state.items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")  # noqa: PLW2901
        result[name] = value
    prefix = "bert." if any(name.startswith("bert.") for name in state) else ""
    result[f"{prefix}embeddings.position_ids"] = torch.arange(43)[None]
    if "cls.predictions.bias" in result:
        # Some stored the decoder's bias under this name alone.
        result["cls.predictions.decoder.bias"] = result.pop("cls.predictions.bias")
    return result


def doubled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state that was wrapped once too often: "bert.bert.", and "module." before it."""
    bare = not any(name.startswith("bert.") for name in state)
    return {
        f"module.{'bert.bert.' + name if bare else re.sub(r'^bert', 'bert.bert', name)}": value
        for name, value in state.items()
    }


def _safetensors(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)


def _sharded(model: Any, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size="10KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 1


def _bin(model: Any, directory: Path) -> None:
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def _old_bin(model: Any, directory: Path) -> None:
    state = old_names(state_of(model))
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _sharded_bin(model: Any, directory: Path) -> None:
    state = model.state_dict()
    names = list(state)
    places: dict[str, str] = {}
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{part:05}-of-00002.bin"
        torch.save({name: state[name] for name in chosen}, directory / file)
        places |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _old_names(model: Any, directory: Path) -> None:
    save_file(old_names(state_of(model)), directory / "model.safetensors")


def _doubled(model: Any, directory: Path) -> None:
    save_file(doubled(state_of(model)), directory / "model.safetensors")


WEIGHT_FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "safetensors": _safetensors,
    "sharded": _sharded,
    "bin": _bin,
    "old bin": _old_bin,
    "sharded bin": _sharded_bin,
    "old names": _old_names,
    "doubled prefix": _doubled,
}


def write_model_directory(model: Any, directory: Path, form: str = "safetensors") -> Path:
    """Write a model directory in a form of weights, with a plain vocab.txt only."""
    directory.mkdir(parents=True, exist_ok=True)
    WEIGHT_FORMATS[form](model, directory)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config))
    words = make_tokenizer(model.config.vocab_size).vocab
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return directory
