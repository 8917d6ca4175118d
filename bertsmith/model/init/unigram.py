"""First weights that know what is known of a text before the first step; they are learnt on.

It never knows of text: how often each word occurs is told to it. A short run spends much of itself
on finding out what needs no finding out: how often each word occurs, and that neighbouring
positions belong together. What it is worth is measured in docs/measurements.md.
"""

import torch
from torch import Tensor

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.embeddings import sinusoidal_positions


@torch.no_grad()
def init_from_unigrams(model: BertForPreTraining, counts: Tensor) -> None:
    """Set first weights from ``counts``, int64 [V], how often each word occurs; see the module.

    The output bias becomes the log of the words' shares, and learned positions become sinusoids
    of the size of all embeddings, in which a shift by some positions is one linear map (Vaswani
    et al. 2017, section 3.5).
    """
    model.mlm.start_at(counts)
    table = model.bert.embeddings.positions.weight
    if not model.bert.embeddings.fixed_positions:
        # A sinusoid's root mean square is 1 / sqrt 2.
        table.copy_(sinusoidal_positions(*table.shape) * model.config.init_range * 2**0.5)
