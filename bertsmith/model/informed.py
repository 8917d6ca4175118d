"""First weights that know what is known before the first step; all of them are learnt on.

It never knows of text: how often each word occurs is told to it.

A short run spends much of itself on finding out what needs no finding out: how often each word
occurs, and that neighbouring positions belong together. A masked LM that does not look beside the
mask knows what a text is about and no more, and stays there for millions of tokens: what the
neighbours say is heard only once attention finds them, and attention looks for them only once they
say something. ``look_beside`` begins behind that. Next-sentence prediction needs more, for
whether two segments share rare words is no linear function of their mean embeddings: a pooled [CLS]
cannot see it until some head compares words with words, and what that head finds must weigh
something beside what was there. What each is worth is measured in docs/measurements.md.
"""

import math

import torch
from torch import Tensor, nn

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.embeddings import Embeddings, sinusoids

#: The shortest wave of the positions of ``look_beside``, in tokens; the longest is as long as the
#: table.
_SHORTEST = 3.0
#: By how much the neighbour's score is above that of positions far away, and the size of what each
#: of the two heads adds, where the word itself has 1. With scores a quarter as high, or heads three
#: times as loud, much less was learnt; see docs/measurements.md.
_BESIDE, _ASIDE = 16.0, 0.5
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
def look_beside(model: PreTrainingModel) -> None:
    """Have two heads of the first layer look at the neighbours of a word; after ``inform``.

    Positions, where they are learned, become sinusoids in dimensions of their own, in which a shift
    is a rotation (Vaswani et al. 2017, section 3.5). One head looks a step back and one a step
    ahead; in a causal model, one and two steps back.
    """
    embeddings, config = model.bert.embeddings, model.config
    pairs = min(config.head_width, config.width // 4) // 2
    if not pairs or embeddings.fixed_positions:
        return
    attention = next(one for one in model.modules() if isinstance(one, SelfAttention))
    shifts = (-1, 1) if config.attention == "bidirectional" else (-1, -2)
    _look_away(embeddings, attention, _part(embeddings, pairs), shifts)


def _part(embeddings: Embeddings, pairs: int) -> Tensor:
    """Part words from positions; return the angle of a step in each pair of dimensions, [pairs].

    Positions get the last dimensions, words and segments the others. So what a head knows of where
    a word stands is not blurred by what it is.
    """
    words, positions = embeddings.words.weight, embeddings.positions.weight
    count, width = positions.shape
    first, spread = width - 2 * pairs, float(words.std())
    longest = max(count, _SHORTEST)
    rates = 2 * math.pi / torch.logspace(math.log10(_SHORTEST), math.log10(longest), pairs)
    angles = torch.arange(count)[:, None] * rates
    for table in (words, embeddings.segments.weight):
        table[:, first:] = 0.0
    positions.zero_()
    # A sinusoid's root mean square is 1 / sqrt 2.
    positions[:, first::2] = angles.sin() * spread * 2**0.5
    positions[:, first + 1 :: 2] = angles.cos() * spread * 2**0.5
    return rates


def _look_away(
    embeddings: Embeddings, attention: SelfAttention, rates: Tensor, shifts: tuple[int, ...]
) -> None:
    """Have a head for each of ``shifts`` look at the word so many steps away, after ``_part``.

    A query is the key of its own position, turned by the angles of these steps: their product is
    largest where the key stands just there. Values are the words alone.
    """
    size, width = attention.head_width, attention.output.in_features
    query, key, value = attention.query_key_value.weight.view(3, attention.heads, size, width)
    first, places = width - 2 * len(rates), torch.arange(0, 2 * len(rates), 2)
    sine, cosine = places + first, places + first + 1
    scale = (_BESIDE * size**0.5 / _energy(embeddings)) ** 0.5
    for head, shift in enumerate(shifts[: attention.heads]):
        for part in (query[head], key[head], value[head]):
            part.zero_()
        key[head][places, sine] = key[head][places + 1, cosine] = scale
        turned = rates * shift
        query[head][places, sine] = query[head][places + 1, cosine] = scale * turned.cos()
        query[head][places, cosine] = scale * turned.sin()
        query[head][places + 1, sine] = -scale * turned.sin()
        nn.init.orthogonal_(value[head][:, :first])
        output = attention.output.weight[:, head * size : (head + 1) * size]
        output.normal_(std=_ASIDE / size**0.5)


def _energy(embeddings: Embeddings) -> float:
    """Return the squared size that positions have in what the first layer reads."""
    tables = (embeddings.positions, embeddings.words, embeddings.segments)
    sizes = [float(own.weight.pow(2).sum(1).mean()) for own in tables]
    # A norm makes the sum of the three tables one of variance 1, here or in the layer.
    return sizes[0] / (sum(sizes) / embeddings.words.embedding_dim if embeddings.normed else 1.0)


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
