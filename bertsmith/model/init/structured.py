"""First weights of attention: heads that begin by looking where there is something to find.

It never knows of text, nor how far training will take them; all of it is learnt on.

What trained BERTs are found to have, heads for the next and the last word and heads that stay at a
special token where they find nothing (Clark et al. 2019, arXiv:1906.04341), a short run does not
come to by itself. A masked LM that does not look beside the mask knows what a text is about and no
more, and stays there for millions of tokens: what the neighbours say is heard only once attention
finds them, and attention looks for them only once they say something. Next sentence has the same
trouble: whether two segments share words is no linear function of their mean embeddings, so that
[CLS] sees nothing of it until some head compares words with words, and another counts what that one
found. What each is worth is measured in docs/measurements.md.
"""

import math

import torch
from torch import Tensor, nn

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.embeddings import Embeddings

#: The shortest wave of the positions, in tokens; the longest is as long as the table.
_SHORTEST = 3.0
#: By how much the neighbour's score is above that of positions far away, and the size of what each
#: of the two heads adds, where what the layer reads has 1. With scores a quarter as high, or heads
#: three times as loud, much less was learnt; see docs/measurements.md.
_BESIDE, _ASIDE = 16.0, 0.5
#: Scores of the head that looks across: what a word gives itself wherever it stands, what the other
#: segment gets and the own one loses, and what [CLS] has. So a word that stands in the other
#: segment too scores 22 there, itself 10, and others 6 in the other segment and -6 in the own: give
#: or take 4 in a head of width 32, so that some are taken for it by chance.
_SAME, _OTHER, _NOWHERE = 16.0, 6.0, 16.0
#: The size of what that head adds where it stays at [CLS], where what the layer reads has 1.
_MARK = 1.0
#: What the head that counts them adds for each share of such words above the usual one, which is
#: the second: 2 x (share - 0.45), where what the layer reads has 1.
_COUNT, _USUAL = 2.0, 0.45
#: Dimensions that a head needs for it: one for the segment, one for [CLS], and some for words.
_LEAST = 4


@torch.no_grad()
def init_neighbor_heads(model: BertForPreTraining) -> None:
    """Have two heads of the first layer look at the neighbours of a word; after ``inform``.

    Positions, where they are learned, become sinusoids in dimensions of their own, in which a shift
    is a rotation (Vaswani et al. 2017, section 3.5). One head looks a step back and one a step
    ahead; in a causal model, one and two steps back. A model of one head has the first of them; one
    without room for positions of their own stays as it was drawn.
    """
    if (space := _Space.part(model)) is not None:
        attention = _attentions(model)[0]
        for head, shift in enumerate(_neighbours(model)[: attention.heads]):
            _look_away(space, _Head(attention, head), shift)


@torch.no_grad()
def init_cross_segment_heads(model: BertForPreTraining, cls_id: int) -> None:
    """``init_neighbor_heads``, and have a head look for the word in the other segment; after ``inform``.

    ``cls_id``: where that head stays if the word is not there.

    All three are in the first layer; a head of the second counts how many words were not found, and
    next sentence begins with no opinion, so that it does not shake what it reads before it can use
    it. A model of two heads looks ahead in the second layer, with the other one. In a causal model
    not [CLS] but the last token hears of it, as tasks do. One of a single layer, head or segment
    looks beside alone, and one without room for positions of their own stays as it was drawn.
    """
    first, *others = _attentions(model)
    if not others or 1 in (first.heads, model.config.segments) or first.head_width < _LEAST:
        init_neighbor_heads(model)
        return
    if (space := _Space.part(model)) is None:
        return
    (back, ahead), second, few = _neighbours(model), others[0], first.heads == 2
    _look_away(space, _Head(first, 0), back)
    _look_away(space, _Head(second, 0) if few else _Head(first, 1), ahead)
    seeker = _Head(first, 1 if few else 2)
    _look_for_words(space, seeker, cls_id)
    # The second layer's norm divides by what heads have read and added, about.
    normed = model.config.norm != "none"
    louder = (1 + 2 * _ASIDE**2 + _MARK**2) ** 0.5 if normed else 1.0
    _count(space, _Head(second, 1 if few else 0), seeker.output[:, 0] / louder)
    if model.nsp is not None:
        model.nsp.classifier.weight.zero_()


def _neighbours(model: BertForPreTraining) -> tuple[int, int]:
    """Return how many steps away the two heads look that look at neighbours."""
    return (-1, 1) if model.config.attention == "bidirectional" else (-1, -2)


def _attentions(model: BertForPreTraining) -> list[SelfAttention]:
    return [one for one in model.modules() if isinstance(one, SelfAttention)]


class _Head:
    """A head's own part of a layer's weights, to be written to: maps [H, D], biases [H]."""

    def __init__(self, attention: SelfAttention, number: int) -> None:
        self.size, width = attention.head_width, attention.output.in_features
        shape = (3, attention.heads, self.size)
        self.query, self.key, self.value = attention.query_key_value.weight.view(*shape, width)[
            :, number
        ]
        biases = attention.query_key_value.bias.view(shape)[:, number]
        self.query_bias, self.key_bias, self.value_bias = biases
        self.output = attention.output.weight[:, number * self.size : (number + 1) * self.size]


class _Space:
    """Embeddings parted in dimensions of words and segments, and of positions.

    words: how many the first are. rates: the angle of a step in each pair of the others. Other
    sizes are of what the first layer reads, where a norm makes variance 1 of the sum of the three
    tables. variance: of words, in their dimensions. energy: the squared size of a position. heard:
    the root mean square of all.
    """

    def __init__(self, embeddings: Embeddings, rates: Tensor) -> None:
        tables = (embeddings.words, embeddings.positions, embeddings.segments)
        width = embeddings.words.embedding_dim
        energy = [float(own.weight.pow(2).sum(1).mean()) for own in tables]
        drawn = (sum(energy) / width) ** 0.5
        scale = drawn if embeddings.normed else 1.0
        self.heard = drawn / scale
        self.embeddings, self.scale = embeddings, scale
        self.rates, self.words = rates, width - 2 * len(rates)
        self.variance, self.energy = energy[0] / self.words / scale**2, energy[1] / scale**2

    def segments(self) -> Tensor:
        """Return half of what tells the segments apart, and what they have in common: [2, D]."""
        one, other = self.embeddings.segments.weight[:2]
        return torch.stack([one - other, one + other]) / 2

    def segment(self) -> tuple[Tensor, float]:
        """Return what reads the segment: [D], and an offset; 1 in the first, -1 in the second."""
        half, middle = self.segments()
        square = half.pow(2).sum()
        return half * self.scale / square, -float(middle @ half / square)

    def word(self, number: int) -> Tensor:
        """Return what reads a word: [D]; 1 where it stands, near 0 at others, blind to segments."""
        own: Tensor = self.embeddings.words.weight[number]
        apart = torch.linalg.qr(self.segments().T).Q
        own = own - apart @ (apart.T @ own)
        return own * self.scale / own.pow(2).sum()

    @classmethod
    def part(cls, model: BertForPreTraining) -> "_Space | None":
        """Part words from positions, so that what stands where is not blurred; None without room.

        Positions get the last dimensions, words and segments the others.
        """
        embeddings, config = model.bert.embeddings, model.config
        pairs = min(config.head_width, config.width // 4) // 2
        if not pairs or embeddings.fixed_positions:
            return None
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
        return cls(embeddings, rates)


def _look_away(space: _Space, head: _Head, shift: int) -> None:
    """Have a head look at the word so many steps away.

    A query is the key of its own position, turned by the angles of these steps: their product is
    largest where the key stands just there. Values are the words alone.
    """
    places = torch.arange(0, 2 * len(space.rates), 2)
    sine, cosine = places + space.words, places + space.words + 1
    scale = (_BESIDE * head.size**0.5 / space.energy) ** 0.5
    for part in (head.query, head.key, head.value):
        part.zero_()
    head.key[places, sine] = head.key[places + 1, cosine] = scale
    turned = (space.rates * shift).to(head.query)
    head.query[places, sine] = head.query[places + 1, cosine] = scale * turned.cos()
    head.query[places, cosine] = scale * turned.sin()
    head.query[places + 1, sine] = -scale * turned.sin()
    nn.init.orthogonal_(head.value[:, : space.words])
    head.output.normal_(std=_ASIDE / head.size**0.5)


def _look_for_words(space: _Space, head: _Head, cls_id: int) -> None:
    """Have a head look for its word in the other segment, and stay at [CLS] where it is not there.

    The last dimension of its keys and queries is for the segment, the one before it for [CLS], the
    others are words, away from what segments have in common and apart.
    What it adds where it stays at [CLS] is always the same, so that its mean over a sequence says
    how many words the segments share.
    """
    score, last = head.size**0.5, head.size - 1
    head.query.zero_()
    head.key.zero_()
    # Directions at right angles, the first two of them those of the segments.
    drawn = torch.randn(space.words, space.words)
    drawn[:, :2] = space.segments()[:, : space.words].T
    words = torch.linalg.qr(drawn).Q[:, 2 : head.size].T
    words *= (_SAME * score / (len(words) * space.variance)) ** 0.5
    head.query[: last - 1, : space.words] = head.key[: last - 1, : space.words] = words
    (segment, offset), root = space.segment(), (_OTHER * score) ** 0.5
    head.query[last], head.query_bias[last] = segment * root, offset * root
    head.key[last], head.key_bias[last] = -segment * root, -offset * root
    # [CLS] is of the first segment, for which it must make up.
    head.key[last - 1] = head.value[0] = space.word(cls_id)
    head.query[last - 1] = segment * _OTHER * score
    head.query_bias[last - 1] = (_NOWHERE + offset * _OTHER) * score
    head.output[:, 0].normal_(std=_MARK * space.heard)


def _count(space: _Space, head: _Head, mark: Tensor) -> None:
    """Have a head say how many words carry a mark [D]: it looks everywhere alike, as drawn."""
    head.value[0] = mark / mark.pow(2).sum()
    head.value_bias[0] = -_USUAL
    head.output[:, 0].normal_(std=_COUNT * space.heard)
