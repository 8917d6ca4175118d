"""Attention probabilities of each head, for one text or a pair of texts."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bertsmith.bundle import EncoderBundle, load_encoder
from bertsmith.bundle.directory import describe_original_model
from bertsmith.errors import InputError, ModelError
from bertsmith.interop.openvino import EmbeddingBundle, OpenVINOBundle
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.attention_layout import build_attention_layout
from bertsmith.model.packed import pack_sequences
from bertsmith.tasks.text_pairs import add_special_tokens
from bertsmith.use.pair import truncate_pair
from bertsmith.use.token_vectors import Floats


@dataclass(frozen=True)
class AttentionMaps:
    """The tokens of a text or a pair of texts, and the attention between these tokens.

    Attributes:
        tokens: The tokens of [CLS] A [SEP], or of [CLS] A [SEP] B [SEP] for a pair.
        segments: The segment id of each token: 0 for [CLS], A and its [SEP], and 1 for B and its
            [SEP].
        probabilities: float32 [L, N, S, S], indexed by layer, head, query token and key token;
            each row sums to 1.
        num_removed_tokens: Number of tokens removed by truncation.
    """

    tokens: list[str]
    segments: list[int]
    probabilities: Floats
    num_removed_tokens: int


class EncodedTexts(NamedTuple):
    """Token ids and segment ids of a text or pair, and the number of removed tokens."""

    ids: list[int]
    segments: list[int]
    num_removed: int


def attention(
    model: EmbeddingBundle | Path | str,
    text: str,
    pair: str | None = None,
    *,
    max_seqlen: int | None = None,
) -> AttentionMaps:
    """Return the attention probabilities of all heads, float32 [L, N, S, S].

    Args:
        model: A loaded model, or a path or name as in ``load``.
        text: The text, or the first text of a pair. A single text is truncated at its end.
        pair: The second text of a pair. Pairs are truncated as in ``bertsmith.pair``.
        max_seqlen: Maximum number of tokens, including [CLS] and [SEP]; defaults to the model's
            maximum.

    Raises:
        InputError: A text is empty, or ``max_seqlen`` is too small.
        ModelError: The model is an OpenVINO graph.
    """
    bundle = load_encoder(model) if isinstance(model, Path | str) else model
    return compute_attention(bundle, encode_text_or_pair(bundle, text, pair, max_seqlen))


@torch.inference_mode()
def compute_attention(bundle: EmbeddingBundle, encoded: EncodedTexts) -> AttentionMaps:
    """Return the attention probabilities of an input of ``encode_text_or_pair``."""
    assert not isinstance(bundle, OpenVINOBundle)
    encoder = bundle.model if isinstance(bundle, EncoderBundle) else bundle.model.bert
    batch = pack_sequences([(encoded.ids, encoded.segments)])
    batch = batch.to(next(encoder.parameters()).device)
    is_causal = encoder.config.attention == "causal"
    probabilities = []
    # ``hidden_states`` yields the input of each layer and the output of the last layer. zip() stops
    # before it computes that output, which is not needed.
    hidden_states = encoder.iter_hidden_states(batch)
    for layer, x in zip(encoder.encoder.layers, hidden_states, strict=False):
        assert isinstance(layer, EncoderLayer)
        layout = build_attention_layout(batch, "reference", is_causal=is_causal, dtype=x.dtype)
        probabilities.append(layer.compute_probabilities(x, layout)[0].float().cpu().numpy())
    tokens = bundle.tokenizer.ids_to_tokens(encoded.ids)
    return AttentionMaps(tokens, encoded.segments, np.stack(probabilities), encoded.num_removed)


def encode_text_or_pair(
    bundle: EmbeddingBundle, text: str, pair: str | None, max_seqlen: int | None
) -> EncodedTexts:
    """Return the tokens of an input; arguments and errors are those of ``attention``."""
    if isinstance(bundle, OpenVINOBundle):
        raise ModelError(
            f"attention: the OpenVINO graph in {bundle.path} has no attention probabilities; use "
            f"{describe_original_model(bundle.path)}"
        )
    tokenizer = bundle.tokenizer
    encoded = [tokenizer.encode(part) for part in (text, pair) if part is not None]
    for name, part_ids in zip(("text", "second text"), encoded, strict=False):
        if not part_ids:
            raise InputError(f"the {name} is empty; expected at least one word")
    max_positions = bundle.config.max_positions
    num_special_tokens = 1 + len(encoded)  # [CLS], and [SEP] after each text
    if max_seqlen is None:
        max_seqlen = max_positions
    max_tokens = min(max_seqlen, max_positions) - num_special_tokens
    if max_tokens < len(encoded):
        raise InputError(
            f"max_seqlen {max_seqlen} is too small for one token of each text; increase max_seqlen"
        )
    if pair is None:
        truncated = [encoded[0][:max_tokens]]
    else:
        truncated = list(truncate_pair(encoded[0], encoded[1], max_tokens))
    ids, segments = add_special_tokens(truncated, tokenizer)
    num_removed = sum(map(len, encoded)) - sum(map(len, truncated))
    return EncodedTexts(ids, segments, num_removed)
