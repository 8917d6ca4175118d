"""Embed texts: a vector for each, from the last layer of an encoder.

It never knows what the vectors are compared with.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import Bundle, EncoderBundle, TaskBundle, load_encoder
from bertsmith.interop.sentence_transformers import Mode, Pooling, read_pooling
from bertsmith.model.packed import groups, pack


def _weighted(own: Tensor) -> Tensor:
    """[S, D] -> [D]: the mean in which the n-th token counts n times."""
    weights = torch.arange(1, len(own) + 1, device=own.device, dtype=own.dtype)
    return (weights / weights.sum()) @ own


#: What each mode makes of the hidden states of one text: [S, D] -> [D].
_POOLED: dict[Mode, Callable[[Tensor], Tensor]] = {
    "cls": lambda own: own[0],
    "max": lambda own: own.amax(0),
    "mean": lambda own: own.mean(0),
    "mean_sqrt_len_tokens": lambda own: own.sum(0) / len(own) ** 0.5,
    "weightedmean": _weighted,
    "lasttoken": lambda own: own[-1],
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}


@torch.inference_mode()
def embed(
    model: Bundle | TaskBundle | EncoderBundle | Path | str,
    texts: Sequence[str],
    pooling: Pooling | None = None,
) -> NDArray[np.float32]:
    """Return float32 [n, D], a vector for each of n texts, in their order.

    ``model`` is loaded, or any model directory or RUN. ``pooling``: unless it is given, what the
    model's directory says if it is one of sentence-transformers, else the mean of all tokens, as
    they make of a plain BERT. A text longer than the model takes is cut off.
    """
    bundle = load_encoder(model) if isinstance(model, Path | str) else model
    pooling = pooling or read_pooling(bundle.path) or Pooling()
    encoder = bundle.model if isinstance(bundle, EncoderBundle) else bundle.model.bert
    device = next(encoder.parameters()).device
    sequences = _sequences(bundle, texts, pooling)
    vectors = torch.empty(len(texts), pooling.width(bundle.config.width))
    for group in groups([len(ids) for ids in sequences]):
        packed = pack([(sequences[number], [0] * len(sequences[number])) for number in group])
        hidden = encoder(packed.to(device)).float()
        parts = hidden.split(packed.boundaries.diff().tolist())
        vectors[group] = _vectors(parts, pooling).cpu()
    return vectors.numpy()


def _sequences(
    bundle: Bundle | TaskBundle | EncoderBundle, texts: Sequence[str], pooling: Pooling
) -> list[list[int]]:
    """Return [CLS] text [SEP] for each text, as ids."""
    tokenizer = bundle.tokenizer
    longest = min(pooling.longest or bundle.config.max_positions, bundle.config.max_positions)
    texts = [pooling.prompt + text for text in texts]
    if pooling.lowercase and not tokenizer.lowercase:
        # Character by character, as their tokenizers do it.
        texts = ["".join(character.lower() for character in text) for text in texts]
    return [
        [tokenizer.cls_id, *ids[: longest - 2], tokenizer.sep_id]
        for ids in tokenizer.encode_batch(texts)
    ]


def _vectors(parts: Sequence[Tensor], pooling: Pooling) -> Tensor:
    """Return [B, D] from the hidden states of each text, [S, D]."""
    x = torch.stack([torch.cat([_POOLED[mode](own) for mode in pooling.modes]) for own in parts])
    for after in pooling.after:
        if after == "normalize":
            x = F.normalize(x, dim=-1)
        else:
            bias = None if after.bias is None else after.bias.to(x)
            x = _ACTIVATIONS[after.activation](F.linear(x, after.weight.to(x), bias))
    return x
