"""Show where a model looks: the attention probabilities of each head, for one text or pair.

It never knows how they are drawn, and explains nothing by itself: a weight is no reason.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle, load_encoder
from bertsmith.errors import InputError
from bertsmith.model.attention import build_layout
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.packed import pack_sequences
from bertsmith.use.embed import Floats
from bertsmith.use.pair import truncate_pair


@dataclass(frozen=True)
class AttentionMaps:
    """The tokens of a text or pair, and how much each looks at each.

    tokens: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]; segments: 0 of A, 1 of B.
    probabilities: float32 [L, N, S, S], of layer, head, the token that looks, the token looked at;
    each row sums to 1. left_out: tokens cut off to fit.
    """

    tokens: list[str]
    segments: list[int]
    probabilities: Floats
    left_out: int


@torch.inference_mode()
def attention(
    model: PretrainedBundle | FineTunedBundle | EncoderBundle | Path | str,
    text: str,
    pair: str | None = None,
    *,
    max_seqlen: int | None = None,
) -> AttentionMaps:
    """Return the attention probabilities of all heads, float32 [L, N, S, S].

    ``max_seqlen``: tokens at most, [CLS] and [SEP] counted; None: as many as the model takes. A text
    loses its end, a pair as in ``bertsmith.pair``. Raises QuestionError for a text without a word.
    """
    bundle = load_encoder(model) if isinstance(model, Path | str) else model
    encoder = bundle.model if isinstance(bundle, EncoderBundle) else bundle.model.bert
    ids, segments, left_out = _sequence(bundle, text, pair, max_seqlen)
    packed = pack_sequences([(ids, segments)]).to(next(encoder.parameters()).device)
    causal = encoder.config.attention == "causal"
    found = []
    # Layers first: no state is computed that no layer is given.
    for layer, x in zip(encoder.encoder.layers, encoder.hidden_states(packed), strict=False):
        assert isinstance(layer, EncoderLayer)
        where = build_layout(packed, "reference", causal=causal, dtype=x.dtype)
        found.append(layer.compute_probabilities(x, where)[0].float().cpu().numpy())
    return AttentionMaps(bundle.tokenizer.ids_to_tokens(ids), segments, np.stack(found), left_out)


def _sequence(
    bundle: PretrainedBundle | FineTunedBundle | EncoderBundle,
    text: str,
    pair: str | None,
    longest: int | None,
) -> tuple[list[int], list[int], int]:
    """Return ids and segment ids with [CLS] and [SEP], and how many tokens were cut off."""
    tokenizer = bundle.tokenizer
    parts = [tokenizer.encode(own) for own in (text, pair) if own is not None]
    for name, own in zip(("text", "second text"), parts, strict=False):
        if not own:
            raise InputError(f"the {name} is empty; expected at least one word")
    most = bundle.config.max_positions
    room = min(longest or most, most) - len(parts) - 1
    if room < len(parts):
        raise InputError(f"longest is {longest}: too short for one token of each text")
    kept = [parts[0][:room]] if pair is None else list(truncate_pair(parts[0], parts[1], room))
    ids, segments = [tokenizer.cls_id], [0]
    for number, own in enumerate(kept):
        ids += [*own, tokenizer.sep_id]
        segments += [number] * (len(own) + 1)
    return ids, segments, sum(map(len, parts)) - sum(map(len, kept))
