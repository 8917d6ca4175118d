"""Conversion between Bertsmith's parameter names and those of Hugging Face's BERT."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

#: Name of a parameter or module outside the encoder layers -> its Hugging Face name.
_HF_NAMES = {
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
    "output": "classifier",
    "spans": "qa_outputs",
}
#: Name of a module in an encoder layer -> its Hugging Face name.
_HF_LAYER_NAMES = {
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
#: Prefixes of the names of weights that transformers does not have.
_NAMES_WITHOUT_HF_EQUIVALENT = ("layer_weights", "layer_scale", "lstm.")
#: Prefixes of names in a checkpoint of a BertModel without heads, which lack "bert.".
_BARE_ENCODER_PREFIXES: Final = ("embeddings.", "encoder.", "pooler.")
#: Index buffers that old releases of transformers stored with the weights.
_BUFFERS: Final = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
#: Names under which some checkpoints contain copies of the word embeddings and the decoder bias.
DECODER_WEIGHT, DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
MLM_BIAS: Final = "cls.predictions.bias"
#: Prefix of weight names -> the architecture that uses the prefix; none of them is BERT.
_OTHER_ARCHITECTURES: Final = {
    "roberta.": "RoBERTa", "distilbert.": "DistilBERT", "albert.": "ALBERT",
    "electra.": "ELECTRA", "generator_predictions.": "ELECTRA",
    "discriminator_predictions.": "ELECTRA", "embeddings_project.": "ELECTRA",
    "transformer.layer.": "DistilBERT", "encoder.albert_layer_groups.": "ALBERT",
    "encoder.embedding_hidden_mapping_in.": "ALBERT", "deberta.": "DeBERTa",
    "mobilebert.": "MobileBERT", "lm_head.": "RoBERTa",
}  # fmt: skip
_HF_QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))


def map_to_hf_names(parameter_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Map each parameter name to its Hugging Face names.

    The fused weight of queries, keys and values has three Hugging Face names. Other parameters have
    one. The decoder weight is omitted, because it is tied to the word embeddings.
    """
    return {name: _get_hf_names(name) for name in parameter_names if name != "mlm.decoder.weight"}


def _get_hf_names(name: str) -> tuple[str, ...]:
    """Return the Hugging Face names of a parameter."""
    if name.startswith(_NAMES_WITHOUT_HF_EQUIVALENT):
        return (name,)
    if name in _HF_NAMES:
        return (_HF_NAMES[name],)
    module, _, parameter = name.rpartition(".")
    if module in _HF_NAMES:
        return (f"{_HF_NAMES[module]}.{parameter}",)
    # All other modules are in an encoder layer.
    layer, layer_module = module.removeprefix("bert.encoder.layers.").split(".", 1)
    is_qkv = layer_module == "attention.query_key_value"
    hf_modules = _HF_QKV if is_qkv else (_HF_LAYER_NAMES[layer_module],)
    return tuple(f"bert.encoder.layer.{layer}.{hf_module}.{parameter}" for hf_module in hf_modules)


def to_hf_state_dict(
    state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return a state dict with Hugging Face's names, as tensors of a dtype on the CPU."""
    hf_state = {}
    for name, hf_names in map_to_hf_names(state).items():
        chunks = state[name].detach().to("cpu", dtype).chunk(len(hf_names))
        for hf_name, chunk in zip(hf_names, chunks, strict=True):
            hf_state[hf_name] = chunk.contiguous()
    return hf_state


def to_hf_encoder_state_dict(
    encoder: Mapping[str, Tensor],
    pooler: Mapping[str, Tensor] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the state dict of transformers' BertModel, as tensors of a dtype on the CPU.

    Args:
        encoder: The state dict of an encoder.
        pooler: The weights of a pooler, with the prefix "pooler."; empty for no pooler.
        dtype: The dtype of the tensors.
    """
    # Unlike the names of a model with heads, those of a BertModel do not start with "bert.".
    state = {**{f"bert.{name}": value for name, value in encoder.items()}, **pooler}
    hf_state = to_hf_state_dict(state, dtype)
    return {name.removeprefix("bert."): value for name, value in hf_state.items()}


def normalize_names(stored_names: Iterable[str]) -> dict[str, str]:
    """Map current Hugging Face names to the names in a file.

    Older checkpoints use ``gamma`` and ``beta`` for LayerNorm's weight and bias. The prefix "bert."
    may be missing or repeated, and may follow the prefix "module." of DataParallel. Index buffers
    are omitted. If two tensors in the file have the same current name, the one that is stored under
    this name is used.
    """
    names: dict[str, str] = {}
    for stored_name in stored_names:
        name = re.sub(r"^module\.", "", stored_name)
        name = re.sub(r"^(bert\.)+", "bert.", name)
        if name.startswith(_BARE_ENCODER_PREFIXES):
            name = f"bert.{name}"
        name = re.sub(r"\.gamma$", ".weight", name)
        name = re.sub(r"\.beta$", ".bias", name)
        if name not in _BUFFERS and (name not in names or name == stored_name):
            names[name] = stored_name
    if MLM_BIAS not in names and DECODER_BIAS in names:
        names[MLM_BIAS] = names.pop(DECODER_BIAS)
    names.pop(DECODER_BIAS, None)
    return names


def detect_non_bert_architecture(stored_names: Iterable[str]) -> str | None:
    """Return the architecture that the names of the weights indicate; None for BERT."""
    names = [re.sub(r"^module\.", "", name) for name in stored_names]
    for prefix, architecture in _OTHER_ARCHITECTURES.items():
        if any(name.startswith(prefix) for name in names):
            return architecture
    return None


def is_redundant(name: str) -> bool:
    """Return whether a stored tensor is an index buffer or a copy of the decoder bias."""
    return name.endswith(("embeddings.position_ids", "embeddings.token_type_ids", DECODER_BIAS))
