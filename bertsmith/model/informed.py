"""First weights that know what is known before the first step; all of them are learnt on.

It never knows of text: how often each word occurs is told to it.

A short run spends much of itself on finding out what needs no finding out: how often each word
occurs, and that neighbouring positions belong together. Next-sentence prediction needs more, for
whether two segments share rare words is no linear function of their mean embeddings: a pooled [CLS]
cannot see it until some head compares words with words, and what that head finds must weigh
something beside what was there. What each is worth is measured in docs/measurements.md.
"""

import torch
from torch import Tensor

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.embeddings import Embeddings, sinusoids

#: The score that a word gives another occurrence of itself, while others get 0 on average. It is
#: above log 128, so that one repeated word outweighs a whole sequence of others.
_SAME_WORD = 8.0
#: How many times larger values and attention outputs start than chance would have them. With 1,
#: next sentence stayed where it was; see docs/measurements.md.
_VOICE = 2.0


@torch.no_grad()
def inform(model: PreTrainingModel, counts: Tensor) -> None:
    """Set first weights from ``counts``, int64 [V], how often each word occurs; see the module.

    The output bias becomes the log of the words' shares, and learned positions become sinusoids
    of the size of all embeddings, in which a shift by some positions is one linear map (Vaswani
    et al. 2017, section 3.5).
    """
    model.mlm.start_at(counts)
    table = model.bert.embeddings.positions.weight
    if not model.bert.embeddings.fixed_positions:
        # A sinusoid's root mean square is 1 / sqrt 2.
        table.copy_(sinusoids(*table.shape) * model.config.init_range * 2**0.5)


@torch.no_grad()
def match_words(model: PreTrainingModel) -> None:
    """Have the first head of the first layer look for the same word elsewhere; after ``inform``.

    Values and attention outputs start larger, too. It is for models of two layers: in deeper ones
    the larger outputs add up, and at four layers they kept the masked LM from learning.
    """
    attentions = [one for one in model.modules() if isinstance(one, SelfAttention)]
    _look_for_words(model.bert.embeddings, attentions[0])
    for attention in attentions:
        attention.query_key_value.weight[2 * model.config.width :].mul_(_VOICE)
        attention.output.weight.mul_(_VOICE)


def _look_for_words(embeddings: Embeddings, attention: SelfAttention) -> None:
    """Make queries and keys of the first head the same map, one that sees words only.

    It projects on the H directions in which positions and segments vary least. There a word
    scores ``_SAME_WORD`` with itself wherever it stands, and any other word 0 give or take.
    """
    words, positions = embeddings.words.weight, embeddings.positions.weight
    segments = embeddings.segments.weight
    # Segments are few and must not be seen at all; both tables as sums of outer products.
    seen = positions.T @ positions / len(positions) + segments.T @ segments
    size = attention.head_width
    quiet = torch.linalg.eigh(seen.double()).eigenvectors[:, :size].to(words)
    # LayerNorm makes the sum of the three tables one of variance 1; the words' share of it:
    parts = [table.var(0, correction=0).sum() for table in (words, positions, segments)]
    energy = size * parts[0] / torch.stack(parts).sum()
    rows = quiet.T * (_SAME_WORD * size**0.5 / energy) ** 0.5
    width = len(seen)
    attention.query_key_value.weight[:size] = rows
    attention.query_key_value.weight[width : width + size] = rows
