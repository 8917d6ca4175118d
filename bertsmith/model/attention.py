"""Multi-head self-attention over packed sequences, with three interchangeable kernels.

`reference` is an explicit softmax per sequence, `padded` uses PyTorch's scaled-dot-product
attention on padded sequences, and `varlen` uses flash attention on CUDA.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.attention_layout import AttentionLayout
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.linear import Linear
from bertsmith.model.ops.padded_attention import (
    DrawMask,
    draw_sequence_dropout_masks,
    padded_attention,
)
from bertsmith.model.ops.padding import append_zero_rows
from bertsmith.model.ops.varlen import varlen_attention


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    draw_mask: DrawMask | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Compute scaled dot-product attention one sequence at a time (Vaswani et al. 2017, eq. 1).

    Args:
        query: [T, N, H].
        key: [T, N, H].
        value: [T, N, H].
        layout: Sequence boundaries of the batch.
        draw_mask: Function that draws the dropout masks of the probabilities; None for no dropout.

    Returns:
        The output [T, N, H], and the probabilities of each sequence before dropout, [N, S_b, S_b],
        where S_b is the length of the sequence.
    """
    dropout_masks: list[Tensor] | None = None
    if draw_mask is not None:
        dropout_masks = draw_sequence_dropout_masks(layout, query.shape[1], draw_mask, query)
    outputs, all_probabilities = [], []
    for index, (start, end) in enumerate(pairwise(layout.cu_seqlens.tolist())):
        length = end - start
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if layout.score_bias is not None:
            scores = scores + layout.score_bias[:, :length, :length]
        if layout.is_causal:
            is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(is_later, -math.inf)
        probabilities = scores.softmax(-1)
        all_probabilities.append(probabilities)
        if dropout_masks is not None:
            probabilities = probabilities * dropout_masks[index][:, :length, :length]
        outputs.append((probabilities @ v).transpose(0, 1))
    return torch.cat(outputs), all_probabilities


class SelfAttention(nn.Module):
    """Multi-head self-attention (section 3.2 of Vaswani et al. 2017).

    One linear layer computes queries, keys and values, in this order: [T, D] -> [T, 3 D].
    """

    def __init__(self, config: ModelConfig, dropout_index: int) -> None:
        """Create the layer.

        Args:
            config: Sizes and architecture.
            dropout_index: Index of the dropout on the attention probabilities.
        """
        super().__init__()
        self.num_heads, self.head_dim = config.heads, config.head_dim
        self.query_key_value = Linear(config.width, 3 * config.width)
        self.output = Linear(config.width, config.width)
        self.dropout = Dropout(config.attention_dropout, dropout_index)

    def forward(
        self,
        hidden: Tensor,
        layout: AttentionLayout,
        dropout_seed: DropoutSeed | None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention output of all tokens, or of the tokens in ``token_indices``.

        Args:
            hidden: [T, D], or more rows, of which the last ones belong to no sequence.
            layout: Sequence boundaries, padding indices and masks of the batch.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to compute the output for; None for all T.

        Returns:
            The shape of ``hidden``, or [M, D].

        Raises:
            ValueError: If the kernel is `varlen` and dropout is active.
        """
        context = self._attend(self.project(hidden), layout, dropout_seed).flatten(1)
        if token_indices is not None:
            context = context.index_select(0, token_indices)
        output: Tensor = self.output(context)
        return output

    def compute_probabilities(self, hidden: Tensor, layout: AttentionLayout) -> list[Tensor]:
        """Return the attention probabilities of each sequence, without dropout.

        Their shape is [N, S_b, S_b], where S_b is the length of the sequence.
        """
        query, key, value = self.project(hidden).unbind(1)
        return reference_attention(query, key, value, layout)[1]

    def project(self, hidden: Tensor) -> Tensor:
        """Return queries, keys and values: [T, D] -> [T, 3, N, H]."""
        qkv: Tensor = self.query_key_value(hidden)
        return qkv.view(-1, 3, self.num_heads, self.head_dim)

    def _attend(
        self, qkv: Tensor, layout: AttentionLayout, dropout_seed: DropoutSeed | None
    ) -> Tensor:
        """Compute attention with the layout's kernel: [T, 3, N, H] -> [T, N, H].

        ``qkv`` can have more rows, for which the output is 0.
        """
        has_dropout = self.dropout.is_active(dropout_seed)
        if layout.kernel == "varlen":
            if has_dropout:
                raise ValueError(
                    "the varlen kernel has no attention dropout; set attention_dropout to 0 or use "
                    "the padded kernel"
                )
            return varlen_attention(
                qkv, layout.cu_seqlens, layout.max_seqlen, is_causal=layout.is_causal
            )
        draw_mask = self._make_mask_drawer(dropout_seed)
        if layout.kernel == "padded":
            if qkv.is_cpu:
                return padded_attention(qkv, layout, draw_mask, dropout_rate=0.0)
            # On CUDA, PyTorch's fused attention draws the dropout masks.
            dropout_rate = self.dropout.rate if has_dropout else 0.0
            return padded_attention(qkv, layout, draw_mask=None, dropout_rate=dropout_rate)
        query, key, value = qkv.unbind(1)
        output = reference_attention(query, key, value, layout, draw_mask)[0]
        return append_zero_rows(output, len(qkv))

    def _make_mask_drawer(self, dropout_seed: DropoutSeed | None) -> DrawMask | None:
        """Return a function that draws dropout masks; None if dropout is not active."""
        if dropout_seed is None or not self.dropout.is_active(dropout_seed):
            return None
        return lambda like: self.dropout.draw_mask(like, dropout_seed)
