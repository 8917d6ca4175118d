"""Multi-head self-attention over packed sequences, with interchangeable kernels.

It never knows of the rest of the layer; it alone knows where one sequence ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.bucketing import bucket_seqlen, bucket_sequences
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.linear import Linear
from bertsmith.model.ops.padding import pad, unpad
from bertsmith.model.ops.varlen import varlen_attention
from bertsmith.model.packed import PackedBatch

Kernel = Literal["reference", "padded", "varlen"]
#: What dropout multiplies probabilities with, drawn for a tensor of their shape.
Keep = Callable[[Tensor], Tensor]
#: Tokens of a sequence up to which its probabilities are kept for the gradient, in bf16 on a CPU.
MATH_ATTENTION_MAX_SEQLEN = 512


@dataclass(frozen=True)
class Bucket:
    """Sequences that are padded together, to the longest of them.

    num_sequences: B. longest: S, ``bucket_seqlen`` on the CPU if lengths differ. mask: what `padded` adds to the
    scores, 0 or -inf, broadcast to [B, N, S, S], or None. sequences: their numbers in the batch;
    None: all of it.
    """

    num_sequences: int
    max_seqlen: int
    mask: Tensor | None = None
    sequence_indices: list[int] | None = None


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a batch lie, worked out once for all layers.

    cu_seqlens: int32 [B + 1]. longest: S. groups: of like lengths, for `reference` and `padded`.
    unpad_indices: int64 [T], each token's place in the padded rows of all groups, one after another, or
    None where all lengths are equal and padding is a plain view. sources: int64, the token of each
    of those rows; what fills a sequence up is its own last token.
    """

    kernel: Kernel
    cu_seqlens: Tensor
    max_seqlen: int
    causal: bool
    buckets: tuple[Bucket, ...] = ()
    unpad_indices: Tensor | None = None
    pad_indices: Tensor | None = None


def build_layout(
    packed: PackedBatch, kernel: Kernel, *, causal: bool, dtype: torch.dtype
) -> Layout:
    """Prepare a batch for one of the kernels."""
    boundaries, longest = packed.cu_seqlens, packed.max_seqlen
    base = Layout(kernel, boundaries, longest, causal)
    if kernel == "varlen":
        return base
    sequences, lengths = boundaries.shape[0] - 1, boundaries.diff()
    # A compiled graph takes the same way for all batches: what differs from batch to batch would
    # be asked of each, and answered by a graph of its own.
    fixed = torch.compiler.is_compiling()
    if not fixed and packed.ids.shape[0] == sequences * longest:
        mask = _mask(lengths, longest, causal=causal, dtype=dtype, ragged=False)
        return replace(base, buckets=(Bucket(sequences, longest, mask),))
    eager = boundaries.is_cpu and not fixed
    parts = bucket_sequences(lengths.tolist()) if eager else None
    if parts is None:
        longest = bucket_seqlen(longest) if eager else longest
        mask = _mask(lengths, longest, causal=causal, dtype=dtype, ragged=True)
        groups: tuple[Bucket, ...] = (Bucket(sequences, longest, mask),)
    else:
        groups = tuple(_group(own, lengths, causal=causal, dtype=dtype) for own in parts)
    firsts, sources, first = torch.empty_like(lengths), [], 0
    for own in groups:
        which = slice(None) if own.sequence_indices is None else own.sequence_indices
        each = torch.arange(own.num_sequences, device=boundaries.device)
        firsts[which] = (first + each * own.max_seqlen).to(firsts.dtype)
        sources.append(_sources(boundaries[:-1][which], lengths[which], own.max_seqlen))
        first += own.num_sequences * own.max_seqlen
    slots = packed.positions + firsts.repeat_interleave(lengths, output_size=packed.ids.shape[0])
    return replace(base, buckets=groups, unpad_indices=slots, pad_indices=torch.cat(sources))


def _sources(starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Return the token of each padded row of some sequences, filled up with their last tokens.

    Nothing is told from a filler: no query looks at it. With another sequence's token, a number
    that is not finite would still come across.
    """
    places = torch.arange(longest, device=starts.device)
    rows: Tensor = torch.minimum(places, lengths[:, None] - 1) + starts[:, None]
    return rows.flatten()


def _group(sequences: list[int], lengths: Tensor, *, causal: bool, dtype: torch.dtype) -> Bucket:
    own = lengths[sequences]
    longest = bucket_seqlen(int(own.max()))
    ragged = bool((own != longest).any())
    mask = _mask(own, longest, causal=causal, dtype=dtype, ragged=ragged)
    return Bucket(len(sequences), longest, mask, sequences)


def _mask(
    lengths: Tensor, longest: int, *, causal: bool, dtype: torch.dtype, ragged: bool
) -> Tensor | None:
    """Return what keeps queries from fillers and, if causal, from what follows them."""
    mask = None
    if causal:
        ones = torch.ones(longest, longest, dtype=torch.bool, device=lengths.device)
        mask = torch.zeros_like(ones, dtype=dtype).masked_fill(ones.triu(1), -math.inf)
    if not ragged:
        return mask
    beyond = torch.arange(longest, device=lengths.device) >= lengths[:, None]
    keys = torch.zeros(len(lengths), longest, dtype=dtype, device=lengths.device)
    keys = keys.masked_fill(beyond, -math.inf)[:, None, None, :]
    # A filler query of a causal row still sees its first token, so no row is all -inf.
    return keys if mask is None else keys + mask


def _kept(where: Layout, heads: int, keep: Keep, like: Tensor) -> list[Tensor]:
    """Draw dropout's decisions for each group, [B, N, S, S], in one go.

    Drawn for each group anew, all would get the same decisions.
    """
    shapes = [(own.num_sequences, heads, own.max_seqlen, own.max_seqlen) for own in where.buckets]
    one = like.new_empty(1)
    if len(shapes) == 1:
        return [keep(one.expand(shapes[0]))]
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.split(keep(one.expand(sum(sizes))), sizes)
    return [own.view(shape) for own, shape in zip(flat, shapes, strict=True)]


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, where: Layout, keep: Keep | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Attend as equation 1 of Vaswani et al. 2017 says, one sequence after another.

    query, key, value: [T, N, H]. Returns [T, N, H] and the probabilities of each sequence
    [N, S_b, S_b], before dropout.
    """
    outputs, probabilities = [], []
    ends = where.cu_seqlens.tolist()
    kept: dict[int, Tensor] = {}
    if keep is not None:
        for own, drawn in zip(
            where.buckets, _kept(where, query.shape[1], keep, query), strict=True
        ):
            kept |= dict(zip(own.sequence_indices or range(own.num_sequences), drawn, strict=True))
    for index, (first, last) in enumerate(pairwise(ends)):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if where.causal:
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        p = scores.softmax(-1)
        probabilities.append(p)
        if keep is not None:
            p = p * kept[index][:, : last - first, : last - first]
        outputs.append((p @ v).transpose(0, 1))
    return torch.cat(outputs), probabilities


def padded_attention(qkv: Tensor, where: Layout, keep: Keep | None, rate: float) -> Tensor:
    """Attend in [B, N, S, H], the sequences of each group padded to its longest.

    qkv: [T, 3, N, H]. ``keep`` draws the decisions of dropout on the CPU; on CUDA, PyTorch's
    kernels draw their own at ``rate``. Returns [T, N, H].
    """
    heads, head_width = qkv.shape[2:]
    sizes = [own.num_sequences * own.max_seqlen for own in where.buckets]
    full = qkv
    if where.unpad_indices is not None and where.pad_indices is not None:
        full = pad(qkv, where.pad_indices, where.unpad_indices)
    kept: list[Any] = [None] * len(sizes)
    if keep is not None:
        kept = _kept(where, heads, keep, qkv)
    parts = [full] if len(sizes) == 1 else torch.split(full, sizes)
    mixed = [
        _attend(
            part.view(own.num_sequences, own.max_seqlen, 3, heads, head_width), own, drawn, rate
        )
        for part, own, drawn in zip(parts, where.buckets, kept, strict=True)
    ]
    whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return whole if where.unpad_indices is None else unpad(whole, where.unpad_indices)


def _attend(qkv: Tensor, group: Bucket, kept: Tensor | None, rate: float) -> Tensor:
    """Attend in one group: [B, S, 3, N, H] -> [B * S, N, H]."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if kept is None and not _is_sooner_multiplied(qkv):
        mixed = F.scaled_dot_product_attention(q, k, v, group.mask, dropout_p=rate)
    else:
        mixed = _multiplied(q, k, v, group.mask, kept)
    return mixed.transpose(1, 2).reshape(-1, *qkv.shape[3:])


def _is_sooner_multiplied(qkv: Tensor) -> bool:
    """Tell whether PyTorch's attention takes longer than its products and softmax one by one.

    In bf16 on a CPU its gradient does (benchmarks/attention.py). Without one little is gained, and
    what oneDNN prepares for each number of sequences would pile up; a compiled graph is left as
    it is.
    """
    plain = qkv.is_cpu and qkv.dtype == torch.bfloat16 and not torch.compiler.is_compiling()
    return plain and qkv.requires_grad and qkv.shape[1] <= MATH_ATTENTION_MAX_SEQLEN


def _multiplied(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor | None
) -> Tensor:
    """Attend by two products and a softmax, all in the dtype of q, k and v [B, N, S, H]."""
    with torch.autocast("cpu", enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if mask is not None:
            scores.add_(mask)
        p = scores.softmax(-1)
        mixed: Tensor = (p if kept is None else p * kept) @ v
    return mixed


class SelfAttention(nn.Module):
    """Multi-head self-attention, section 3.2 of Vaswani et al. 2017, written with nn.Linear.

    One Linear makes queries, keys and values together: [T, D] -> [T, 3 D], in that order.
    """

    def __init__(self, config: ModelConfig, dropout_index: int) -> None:
        """``dropout_index`` numbers the dropout on the probabilities."""
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        self.query_key_value = Linear(config.width, 3 * config.width)
        self.output = Linear(config.width, config.width)
        self.dropout = Dropout(config.attention_dropout, dropout_index)

    def forward(
        self, hidden: Tensor, where: Layout, noise: DropoutSeed | None, places: Tensor | None = None
    ) -> Tensor:
        """[T, D] -> [T, D], or [M, D] for ``places``, int64 [M] of the T tokens."""
        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_width)
        active = self.dropout.active(noise)
        if where.kernel == "varlen":
            if active:
                raise ValueError("the varlen kernel has no dropout; set attention_dropout to 0")
            mixed = varlen_attention(qkv, where.cu_seqlens, where.max_seqlen, causal=where.causal)
        elif where.kernel == "padded":
            own = active and hidden.is_cpu
            rate = self.dropout.rate if active and not own else 0.0
            mixed = padded_attention(qkv, where, self._keep(noise) if own else None, rate)
        else:
            query, key, value = qkv.unbind(1)
            keep = self._keep(noise) if active else None
            mixed, _ = reference_attention(query, key, value, where, keep)
        mixed = mixed.flatten(1)
        projected: Tensor = self.output(mixed if places is None else mixed.index_select(0, places))
        return projected

    def probabilities(self, hidden: Tensor, where: Layout) -> list[Tensor]:
        """Return how much each token looks at each, [N, S_b, S_b] of each sequence."""
        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_width)
        query, key, value = qkv.unbind(1)
        return reference_attention(query, key, value, where)[1]

    def _keep(self, noise: DropoutSeed | None) -> Keep:
        assert noise is not None
        return lambda like: self.dropout.scale(like, noise)
