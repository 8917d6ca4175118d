"""The names of weights: ours, and those of Hugging Face's BERT on disk.

It never knows files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from torch import Tensor

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
    "output": "classifier",
    "spans": "qa_outputs",
}
_LAYER_PARTS = {
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
#: What no class of Hugging Face's has.
_OURS = ("layer_weights", "layer_scale", "lstm.")
#: Where the encoder's names begin in a bare one, a BertModel saved by itself.
_BARE: Final = ("embeddings.", "encoder.", "pooler.")
#: Counters that old releases stored among the weights.
_BUFFERS: Final = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
#: The decoder, stored again: its weight is the word embeddings', its bias stands beside it.
DECODER, DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
BIAS: Final = "cls.predictions.bias"
#: How names of other makers' models begin, and of older and newer relatives by the same makers.
_FOREIGN: Final = {
    "roberta.": "RoBERTa", "distilbert.": "DistilBERT", "albert.": "ALBERT",
    "electra.": "ELECTRA", "generator_predictions.": "ELECTRA",
    "discriminator_predictions.": "ELECTRA", "embeddings_project.": "ELECTRA",
    "transformer.layer.": "DistilBERT", "encoder.albert_layer_groups.": "ALBERT",
    "encoder.embedding_hidden_mapping_in.": "ALBERT", "deberta.": "DeBERTa",
    "mobilebert.": "MobileBERT", "lm_head.": "RoBERTa",
}  # fmt: skip
_QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))


def hf_names(model_names: Iterator[str] | list[str]) -> dict[str, tuple[str, ...]]:
    """Map each of our parameter names to its names on disk: three for queries, keys and values."""
    result: dict[str, tuple[str, ...]] = {}
    for name in model_names:
        if name == "mlm.decoder.weight":
            continue  # It is the word embedding table, stored once.
        if name.startswith(_OURS):
            result[name] = (name,)
            continue
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


def to_hf_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state under the names of the directory, float32 on the CPU."""
    result = {}
    for ours, theirs in hf_names(list(state)).items():
        pieces = state[ours].detach().float().cpu().chunk(len(theirs))
        result.update(
            {name: piece.contiguous() for name, piece in zip(theirs, pieces, strict=True)}
        )
    return result


def normalize_names(stored: Iterable[str]) -> dict[str, str]:
    """Map today's names of tensors to those that a file has: an old or a bare one's differ.

    ``gamma`` and ``beta`` are LayerNorm's weight and bias; "bert." may be missing, doubled, or
    stand behind the "module." of a parallel wrapper. Buffers are left out. Where two names mean
    the same tensor, the one that is today's counts.
    """
    result: dict[str, str] = {}
    for name in stored:
        today = re.sub(r"^module\.", "", name)
        today = re.sub(r"^(bert\.)+", "bert.", today)
        if today.startswith(_BARE):
            today = f"bert.{today}"
        today = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", today))
        if today not in _BUFFERS and (today not in result or today == name):
            result[today] = name
    if BIAS not in result and DECODER_BIAS in result:
        result[BIAS] = result.pop(DECODER_BIAS)
    result.pop(DECODER_BIAS, None)
    return result


def detect_other_architecture(stored: Iterable[str]) -> str | None:
    """Return whose weights these names are, if they are not a BERT's."""
    plain = [re.sub(r"^module\.", "", name) for name in stored]
    found = (own for start, own in _FOREIGN.items() if any(n.startswith(start) for n in plain))
    return next(found, None)


def is_redundant(name: str) -> bool:
    """Tell whether a tensor is one that nobody needs to read: a counter, or a bias stored again."""
    return name.endswith(("embeddings.position_ids", "embeddings.token_type_ids", DECODER_BIAS))
