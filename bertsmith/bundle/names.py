"""The names of weights: ours, and those of Hugging Face's BERT on disk.

It never knows files.
"""

from collections.abc import Iterator, Mapping

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
_QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))


def names(model_names: Iterator[str] | list[str]) -> dict[str, tuple[str, ...]]:
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


def to_disk(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state under the names of the directory, float32 on the CPU."""
    result = {}
    for ours, theirs in names(list(state)).items():
        pieces = state[ours].detach().float().cpu().chunk(len(theirs))
        result.update(
            {name: piece.contiguous() for name, piece in zip(theirs, pieces, strict=True)}
        )
    return result
