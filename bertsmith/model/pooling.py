"""Pooling: combine the hidden states of each text into one vector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from bertsmith.model.packed import PackedBatch


def pool_tokens(
    states: Tensor,
    batch: PackedBatch,
    modes: Sequence[str],
    *,
    include_special_tokens: bool = True,
) -> Tensor:
    """Combine the hidden states of each text into one vector per mode, and concatenate these.

    Args:
        states: Hidden states, float32 or float64 [T, D].
        batch: The packed texts.
        modes: Pooling modes of sentence-transformers.
        include_special_tokens: Whether to pool [CLS] and [SEP]. An empty text keeps them, because
            the mean of no tokens is undefined.

    Returns:
        [B, D * number of modes], in the dtype of ``states``.
    """
    pooling = _Pooling.build(batch, states, include_special_tokens=include_special_tokens)
    return torch.cat([_POOLING[mode](pooling) for mode in modes], -1)


@dataclass(frozen=True)
class _Pooling:
    """The pooled tokens of all texts of a batch, for operations without a loop over the texts.

    On a GPU, such a loop would start several kernels for each text.

    Attributes:
        states: float32 [T, D], hidden states.
        text_indices: int64 [T], the index of each token's text.
        first_indices: int64 [B], the index of each text's first pooled token.
        counts: int64 [B], the number of pooled tokens of each text.
    """

    states: Tensor
    text_indices: Tensor
    first_indices: Tensor
    counts: Tensor

    @classmethod
    def build(cls, batch: PackedBatch, states: Tensor, *, include_special_tokens: bool) -> Self:
        """Select the tokens to pool: all, or all but [CLS] and [SEP].

        An empty text keeps [CLS] and [SEP], because the mean of no tokens is undefined.

        Args:
            batch: The packed texts.
            states: float32 [T, D], hidden states of the batch.
            include_special_tokens: Whether to pool [CLS] and [SEP].
        """
        lengths = batch.cu_seqlens.diff().long()
        first_indices = batch.first_token_indices
        num_excluded = torch.zeros_like(lengths)
        if not include_special_tokens:
            num_excluded = (lengths > 2).long()
        return cls(
            states,
            batch.sequence_indices,
            first_indices + num_excluded,
            lengths - 2 * num_excluded,
        )

    @property
    def ordinals(self) -> Tensor:
        """int64 [T], each token's number among the pooled tokens of its text, from 0.

        The number of a token that is not pooled is negative or at least the number of pooled
        tokens.
        """
        indices = torch.arange(len(self.states), device=self.states.device)
        return indices - self.first_indices[self.text_indices]

    @property
    def is_pooled(self) -> Tensor:
        """Whether each token is pooled, bool [T]."""
        ordinals = self.ordinals
        return (ordinals >= 0) & (ordinals < self.counts[self.text_indices])

    def sum(self, weights: Tensor | None = None) -> Tensor:
        """Return the sum over the pooled tokens of each text, [B, D].

        Args:
            weights: [T], factor of each token; None for 1.
        """
        scales = self.is_pooled.to(self.states)
        if weights is not None:
            scales = scales * weights
        sums = self.states.new_zeros(len(self.counts), self.states.shape[1])
        return sums.index_add_(0, self.text_indices, self.states * scales[:, None])

    def max(self) -> Tensor:
        """Return the maximum over the pooled tokens of each text, [B, D]."""
        states = self.states.masked_fill(~self.is_pooled[:, None], -torch.inf)
        maxima = states.new_full((len(self.counts), states.shape[1]), -torch.inf)
        text_indices = self.text_indices[:, None].expand_as(states)
        return maxima.scatter_reduce_(0, text_indices, states, "amax")

    def weighted_mean(self) -> Tensor:
        """Return the mean in which the n-th pooled token of a text has the weight n, [B, D]."""
        total_weights = self.counts * (self.counts + 1) // 2
        return self.sum(self.ordinals + 1) / total_weights[:, None]


#: Pooling mode of sentence-transformers -> function that returns the pooled hidden states, [B, D].
_POOLING: Final[dict[str, Callable[[_Pooling], Tensor]]] = {
    "cls": lambda pooling: pooling.states[pooling.first_indices],
    "max": _Pooling.max,
    "mean": lambda pooling: pooling.sum() / pooling.counts[:, None],
    "mean_sqrt_len_tokens": lambda pooling: pooling.sum() / pooling.counts[:, None].sqrt(),
    "weightedmean": _Pooling.weighted_mean,
    "lasttoken": lambda pooling: pooling.states[pooling.first_indices + pooling.counts - 1],
}
