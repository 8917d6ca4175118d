"""Multi-head self-attention over packed sequences, with three interchangeable kernels.

`reference` is an explicit softmax per sequence, `padded` uses PyTorch's scaled-dot-product
attention on padded sequences, and `varlen` uses flash attention on CUDA.
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
#: Returns a dropout mask (0 or 1 / (1 - rate)) of the shape, dtype and device of its argument.
DrawMask = Callable[[Tensor], Tensor]
#: Longest sequence for which bf16 training on a CPU materializes the attention probabilities.
MATH_ATTENTION_MAX_SEQLEN = 512


@dataclass(frozen=True)
class Bucket:
    """Sequences that are padded to the same length.

    Attributes:
        num_sequences: B.
        max_seqlen: S, the padded length. On a CPU it is rounded up if the lengths differ.
        mask: Added to the attention scores: 0 or -inf, broadcastable to [B, N, S, S]. None if
            every query may attend to every key.
        sequence_indices: The sequences' indices in the batch; None for all sequences.
    """

    num_sequences: int
    max_seqlen: int
    mask: Tensor | None = None
    sequence_indices: list[int] | None = None


@dataclass(frozen=True)
class Layout:
    """Sequence boundaries, padding indices and masks of a batch, shared by all layers.

    Attributes:
        kernel: The attention kernel that the layout was built for.
        cu_seqlens: int32 [B + 1], cumulative sequence lengths.
        max_seqlen: S.
        causal: Whether a token attends only to itself and earlier tokens.
        buckets: Sequences of similar length; empty for `varlen`.
        unpad_indices: int64 [T], the padded row of each token, where the rows of all buckets are
            concatenated. None if all sequences have the same length, because padding is then a
            view.
        pad_indices: int64 [padded rows], the token copied to each padded row. Padding repeats the
            sequence's last token.
    """

    kernel: Kernel
    cu_seqlens: Tensor
    max_seqlen: int
    causal: bool
    buckets: tuple[Bucket, ...] = ()
    unpad_indices: Tensor | None = None
    pad_indices: Tensor | None = None


def build_layout(batch: PackedBatch, kernel: Kernel, *, causal: bool, dtype: torch.dtype) -> Layout:
    """Compute the layout of a batch; ``dtype`` is the dtype of the attention masks."""
    cu_seqlens, max_seqlen = batch.cu_seqlens, batch.max_seqlen
    layout = Layout(kernel, cu_seqlens, max_seqlen, causal)
    if kernel == "varlen":
        return layout
    num_sequences, lengths = cu_seqlens.shape[0] - 1, cu_seqlens.diff()
    # A compiled graph always takes the general path: branching on lengths would add a guard and
    # recompile for every new batch.
    compiling = torch.compiler.is_compiling()
    if not compiling and batch.ids.shape[0] == num_sequences * max_seqlen:
        mask = _build_mask(lengths, max_seqlen, causal=causal, dtype=dtype, ragged=False)
        return replace(layout, buckets=(Bucket(num_sequences, max_seqlen, mask),))
    use_buckets = cu_seqlens.is_cpu and not compiling
    index_groups = bucket_sequences(lengths.tolist()) if use_buckets else None
    if index_groups is None:
        max_seqlen = bucket_seqlen(max_seqlen) if use_buckets else max_seqlen
        mask = _build_mask(lengths, max_seqlen, causal=causal, dtype=dtype, ragged=True)
        buckets: tuple[Bucket, ...] = (Bucket(num_sequences, max_seqlen, mask),)
    else:
        buckets = tuple(
            _build_bucket(indices, lengths, causal=causal, dtype=dtype) for indices in index_groups
        )
    first_rows, pad_indices, offset = torch.empty_like(lengths), [], 0
    for bucket in buckets:
        indices = slice(None) if bucket.sequence_indices is None else bucket.sequence_indices
        ordinals = torch.arange(bucket.num_sequences, device=cu_seqlens.device)
        first_rows[indices] = (offset + ordinals * bucket.max_seqlen).to(first_rows.dtype)
        pad_indices.append(
            _build_pad_indices(cu_seqlens[:-1][indices], lengths[indices], bucket.max_seqlen)
        )
        offset += bucket.num_sequences * bucket.max_seqlen
    unpad_indices = batch.positions + first_rows.repeat_interleave(
        lengths, output_size=batch.ids.shape[0]
    )
    return replace(
        layout, buckets=buckets, unpad_indices=unpad_indices, pad_indices=torch.cat(pad_indices)
    )


def _build_pad_indices(starts: Tensor, lengths: Tensor, max_seqlen: int) -> Tensor:
    """Return the token to copy to each padded row of some sequences: int64 [B * S].

    The mask hides padding from the queries, but 0 * inf is NaN: padding with another sequence's
    token would spread its non-finite values. Therefore each sequence repeats its own last token.
    """
    positions = torch.arange(max_seqlen, device=starts.device)
    indices: Tensor = torch.minimum(positions, lengths[:, None] - 1) + starts[:, None]
    return indices.flatten()


def _build_bucket(
    sequence_indices: list[int], lengths: Tensor, *, causal: bool, dtype: torch.dtype
) -> Bucket:
    bucket_lengths = lengths[sequence_indices]
    max_seqlen = bucket_seqlen(int(bucket_lengths.max()))
    ragged = bool((bucket_lengths != max_seqlen).any())
    mask = _build_mask(bucket_lengths, max_seqlen, causal=causal, dtype=dtype, ragged=ragged)
    return Bucket(len(sequence_indices), max_seqlen, mask, sequence_indices)


def _build_mask(
    lengths: Tensor, max_seqlen: int, *, causal: bool, dtype: torch.dtype, ragged: bool
) -> Tensor | None:
    """Return a mask that hides padding and, if causal, later tokens; None if nothing is hidden."""
    mask = None
    if causal:
        ones = torch.ones(max_seqlen, max_seqlen, dtype=torch.bool, device=lengths.device)
        mask = torch.zeros_like(ones, dtype=dtype).masked_fill(ones.triu(1), -math.inf)
    if not ragged:
        return mask
    is_padding = torch.arange(max_seqlen, device=lengths.device) >= lengths[:, None]
    key_mask = torch.zeros(len(lengths), max_seqlen, dtype=dtype, device=lengths.device)
    key_mask = key_mask.masked_fill(is_padding, -math.inf)[:, None, None, :]
    # With a causal mask a padding query still sees the first token, so no row is all -inf.
    return key_mask if mask is None else key_mask + mask


def _draw_bucket_masks(
    layout: Layout, heads: int, draw_mask: DrawMask, like: Tensor
) -> list[Tensor]:
    """Draw the dropout masks of all buckets, each [B, N, S, S].

    One call of ``draw_mask`` serves all buckets: separate calls would return the same bits.
    """
    shapes = [
        (bucket.num_sequences, heads, bucket.max_seqlen, bucket.max_seqlen)
        for bucket in layout.buckets
    ]
    scalar = like.new_empty(1)
    if len(shapes) == 1:
        return [draw_mask(scalar.expand(shapes[0]))]
    sizes = [math.prod(shape) for shape in shapes]
    flat_masks = torch.split(draw_mask(scalar.expand(sum(sizes))), sizes)
    return [mask.view(shape) for mask, shape in zip(flat_masks, shapes, strict=True)]


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, draw_mask: DrawMask | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Compute scaled dot-product attention one sequence at a time (Vaswani et al. 2017, eq. 1).

    Args:
        query: [T, N, H].
        key: [T, N, H].
        value: [T, N, H].
        layout: Sequence boundaries of the batch.
        draw_mask: Draws the dropout masks of the probabilities; None for no dropout.

    Returns:
        The output [T, N, H], and each sequence's probabilities [N, S_b, S_b] before dropout.
    """
    outputs, probabilities = [], []
    boundaries = layout.cu_seqlens.tolist()
    masks: dict[int, Tensor] = {}
    if draw_mask is not None:
        for bucket, bucket_masks in zip(
            layout.buckets,
            _draw_bucket_masks(layout, query.shape[1], draw_mask, query),
            strict=True,
        ):
            masks |= dict(
                zip(
                    bucket.sequence_indices or range(bucket.num_sequences),
                    bucket_masks,
                    strict=True,
                )
            )
    for index, (start, end) in enumerate(pairwise(boundaries)):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if layout.causal:
            is_future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(is_future, -math.inf)
        p = scores.softmax(-1)
        probabilities.append(p)
        if draw_mask is not None:
            p = p * masks[index][:, : end - start, : end - start]
        outputs.append((p @ v).transpose(0, 1))
    return torch.cat(outputs), probabilities


def padded_attention(
    qkv: Tensor, layout: Layout, draw_mask: DrawMask | None, dropout_rate: float
) -> Tensor:
    """Compute attention with the sequences of each bucket padded to the same length.

    Args:
        qkv: [T, 3, N, H].
        layout: Buckets and padding indices of the batch.
        draw_mask: Draws the dropout masks on the CPU; None on CUDA or without dropout.
        dropout_rate: Rate of PyTorch's own dropout, used on CUDA.

    Returns:
        [T, N, H].
    """
    heads, head_width = qkv.shape[2:]
    sizes = [bucket.num_sequences * bucket.max_seqlen for bucket in layout.buckets]
    padded = qkv
    if layout.unpad_indices is not None and layout.pad_indices is not None:
        padded = pad(qkv, layout.pad_indices, layout.unpad_indices)
    masks: list[Any] = [None] * len(sizes)
    if draw_mask is not None:
        masks = _draw_bucket_masks(layout, heads, draw_mask, qkv)
    bucket_qkvs = [padded] if len(sizes) == 1 else torch.split(padded, sizes)
    outputs = [
        _attend_bucket(
            bucket_qkv.view(bucket.num_sequences, bucket.max_seqlen, 3, heads, head_width),
            bucket,
            dropout_mask,
            dropout_rate,
        )
        for bucket_qkv, bucket, dropout_mask in zip(bucket_qkvs, layout.buckets, masks, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if layout.unpad_indices is None else unpad(output, layout.unpad_indices)


def _attend_bucket(
    qkv: Tensor, bucket: Bucket, dropout_mask: Tensor | None, dropout_rate: float
) -> Tensor:
    """Compute attention within a bucket: [B, S, 3, N, H] -> [B * S, N, H]."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if dropout_mask is None and not _prefers_math_attention(qkv):
        output = F.scaled_dot_product_attention(q, k, v, bucket.mask, dropout_p=dropout_rate)
    else:
        output = _math_attention(q, k, v, bucket.mask, dropout_mask)
    return output.transpose(1, 2).reshape(-1, *qkv.shape[3:])


def _prefers_math_attention(qkv: Tensor) -> bool:
    """Return whether explicit matrix products and softmax beat PyTorch's fused attention.

    They do in bf16 training on a CPU, where the fused backward pass is slow
    (benchmarks/attention.py). In inference the gain is small, and oneDNN's code cache would grow
    with each new batch shape.
    """
    is_eager_bf16 = qkv.is_cpu and qkv.dtype == torch.bfloat16 and not torch.compiler.is_compiling()
    return is_eager_bf16 and qkv.requires_grad and qkv.shape[1] <= MATH_ATTENTION_MAX_SEQLEN


def _math_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_mask: Tensor | None
) -> Tensor:
    """Compute attention as two matrix products and a softmax, in the dtype of the inputs.

    q, k and v are [B, N, S, H].
    """
    with torch.autocast("cpu", enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if mask is not None:
            scores.add_(mask)
        p = scores.softmax(-1)
        output: Tensor = (p if dropout_mask is None else p * dropout_mask) @ v
    return output


class SelfAttention(nn.Module):
    """Multi-head self-attention (section 3.2 of Vaswani et al. 2017).

    One linear layer computes queries, keys and values, in this order: [T, D] -> [T, 3 D].
    """

    def __init__(self, config: ModelConfig, dropout_index: int) -> None:
        """Create the layer; ``dropout_index`` identifies the dropout of the probabilities."""
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        self.query_key_value = Linear(config.width, 3 * config.width)
        self.output = Linear(config.width, config.width)
        self.dropout = Dropout(config.attention_dropout, dropout_index)

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        dropout_seed: DropoutSeed | None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention output of all tokens, or only of some.

        Args:
            hidden: [T, D].
            layout: Layout of the batch.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to compute the output for; None for all T.

        Returns:
            [T, D] or [M, D].

        Raises:
            ValueError: If the kernel is `varlen` and dropout is active.
        """
        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_width)
        has_dropout = self.dropout.is_active(dropout_seed)
        if layout.kernel == "varlen":
            if has_dropout:
                raise ValueError(
                    "the varlen kernel has no attention dropout; set attention_dropout to 0 or use "
                    "the padded kernel"
                )
            mixed = varlen_attention(
                qkv, layout.cu_seqlens, layout.max_seqlen, causal=layout.causal
            )
        elif layout.kernel == "padded":
            draws_mask = has_dropout and hidden.is_cpu
            dropout_rate = self.dropout.rate if has_dropout and not draws_mask else 0.0
            mixed = padded_attention(
                qkv, layout, self._mask_drawer(dropout_seed) if draws_mask else None, dropout_rate
            )
        else:
            query, key, value = qkv.unbind(1)
            draw_mask = self._mask_drawer(dropout_seed) if has_dropout else None
            mixed, _ = reference_attention(query, key, value, layout, draw_mask)
        mixed = mixed.flatten(1)
        output: Tensor = self.output(
            mixed if token_indices is None else mixed.index_select(0, token_indices)
        )
        return output

    def compute_probabilities(self, hidden: Tensor, layout: Layout) -> list[Tensor]:
        """Return each sequence's attention probabilities, [N, S_b, S_b], without dropout."""
        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_width)
        query, key, value = qkv.unbind(1)
        return reference_attention(query, key, value, layout)[1]

    def _mask_drawer(self, dropout_seed: DropoutSeed | None) -> DrawMask:
        assert dropout_seed is not None
        return lambda like: self.dropout.draw_mask(like, dropout_seed)
