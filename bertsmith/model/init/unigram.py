"""Initialization of the output bias from token counts, and of position embeddings as sinusoids.

A short run then spends no steps on learning token frequencies and the order of positions.
"""

import torch
from torch import Tensor

from bertsmith.model.bert import BertForPreTraining


@torch.no_grad()
def init_from_unigrams(model: BertForPreTraining, counts: Tensor) -> None:
    """Initialize the MLM bias with log token frequencies, and learned positions with sinusoids.

    With sinusoids, a shift by n positions is one linear map (Vaswani et al. 2017, section 3.5).
    All weights remain trainable.

    Args:
        model: Changed in place.
        counts: int64 [V], number of occurrences of each token.
    """
    model.mlm.init_bias_from_counts(counts)
    if not model.bert.embeddings.has_fixed_positions:
        model.bert.embeddings.set_sinusoidal_positions(model.config.init_range)
