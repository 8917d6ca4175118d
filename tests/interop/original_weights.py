"""Conversion of the original BERT's variables, independent of Bertsmith's tables of names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def convert_from_original(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert the original BERT's variables to the state dict of Bertsmith's BertForPreTraining."""
    result = {
        "bert.embeddings.words.weight": values["bert/embeddings/word_embeddings"],
        "bert.embeddings.positions.weight": values["bert/embeddings/position_embeddings"],
        "bert.embeddings.segments.weight": values["bert/embeddings/token_type_embeddings"],
        "mlm.decoder.weight": values["bert/embeddings/word_embeddings"],
        "mlm.decoder.bias": values["cls/predictions/output_bias"],
        "nsp.classifier.weight": values["cls/seq_relationship/output_weights"],
        "nsp.classifier.bias": values["cls/seq_relationship/output_bias"],
    }
    linears = {
        "pooler.dense": "bert/pooler/dense",
        "mlm.transform": "cls/predictions/transform/dense",
    }
    norms = {
        "bert.embeddings.norm": "bert/embeddings/LayerNorm",
        "mlm.norm": "cls/predictions/transform/LayerNorm",
    }
    layer = 0
    while f"bert/encoder/layer_{layer}/output/dense/bias" in values:
        name, original_name = f"bert.encoder.layers.{layer}", f"bert/encoder/layer_{layer}"
        projections = [
            f"{original_name}/attention/self/{part}" for part in ("query", "key", "value")
        ]
        fused = f"{name}.attention.query_key_value"
        result[f"{fused}.weight"] = np.concatenate(
            [values[f"{projection}/kernel"].T for projection in projections]
        )
        result[f"{fused}.bias"] = np.concatenate(
            [values[f"{projection}/bias"] for projection in projections]
        )
        linears[f"{name}.attention.output"] = f"{original_name}/attention/output/dense"
        linears[f"{name}.up"] = f"{original_name}/intermediate/dense"
        linears[f"{name}.down"] = f"{original_name}/output/dense"
        norms[f"{name}.attention_norm"] = f"{original_name}/attention/output/LayerNorm"
        norms[f"{name}.feed_forward_norm"] = f"{original_name}/output/LayerNorm"
        layer += 1
    for name, original_name in linears.items():
        result[f"{name}.weight"] = values[f"{original_name}/kernel"].T
        result[f"{name}.bias"] = values[f"{original_name}/bias"]
    for name, original_name in norms.items():
        result[f"{name}.weight"] = values[f"{original_name}/gamma"]
        result[f"{name}.bias"] = values[f"{original_name}/beta"]
    return {name: torch.tensor(value) for name, value in result.items()}


def convert_to_original(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert a state dict of transformers' BertForPreTraining to the original BERT's variables."""
    result = {}
    for name, weight in state.items():
        if name.startswith("cls.predictions.decoder") or name.endswith("position_ids"):
            continue  # The decoder is tied to the word embeddings; position_ids is a buffer.
        stem, _, parameter = name.rpartition(".")
        path = stem.replace("layer.", "layer_").replace(".", "/")
        array = weight.numpy()
        if path == "cls/seq_relationship":
            result[f"{path}/output_{'weights' if parameter == 'weight' else 'bias'}"] = array
        elif path == "cls/predictions":
            result[f"{path}/output_bias"] = array
        elif path.endswith("LayerNorm"):
            result[f"{path}/{'gamma' if parameter == 'weight' else 'beta'}"] = array
        elif path.endswith("embeddings"):
            result[path] = array
        else:
            result[f"{path}/{'kernel' if parameter == 'weight' else 'bias'}"] = array.T
    return result
