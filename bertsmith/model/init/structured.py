"""Structured initialization: attention heads that start with patterns found in trained BERTs.

Trained BERTs have heads that attend to the next or previous token, and heads that attend to [CLS]
or [SEP] when they find no match (Clark et al. 2019, arXiv:1906.04341). Short runs do not learn
these patterns by themselves: a masked LM first behaves like a bag of words and stays on this
plateau for millions of tokens, because neighbor heads and the features they need improve only
together. Next-sentence prediction has the same problem: whether two segments share words is not a
linear function of their mean embeddings, so one head must match words across segments and another
must count the matches. All weights remain trainable.
"""

import math

import torch
from torch import Tensor, nn

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.embeddings import Embeddings

#: Shortest wavelength of the sinusoidal positions, in tokens; the longest is the table's length.
_MIN_WAVELENGTH = 3.0
#: Neighbor heads: attention score of the neighbor minus that of distant positions. A quarter of
#: this value was measured to be worse.
_NEIGHBOR_SCORE = 16.0
#: Neighbor heads: RMS of the output relative to the layer's input. Three times this value was
#: measured to be worse.
_NEIGHBOR_RMS = 0.5
#: Match head: attention score of a key with the query's word.
_SAME_WORD_SCORE = 16.0
#: Match head: score added for keys in the other segment and subtracted for keys in the
#: query's segment. The same word then scores 22 in the other segment and 10 in the query's segment;
#: other words score 6 and -6, with a standard deviation of about 4 for a head width of 32.
_SEGMENT_SCORE = 6.0
#: Match head: score of [CLS].
_CLS_SCORE = 16.0
#: Match head: RMS of the output relative to the layer's input, for tokens that attend to
#: [CLS].
_CLS_RMS = 1.0
#: Count head: the output is _COUNT_SCALE * (share - _TYPICAL_SHARE), relative to the layer's input,
#: for the share of tokens that attend to [CLS].
_COUNT_SCALE = 2.0
_TYPICAL_SHARE = 0.45
#: The match head needs one dimension for the segment, one for [CLS] and some for words.
_MIN_HEAD_WIDTH = 4


@torch.no_grad()
def init_neighbor_heads(model: BertForPreTraining) -> None:
    """Make two heads of the first layer attend to neighboring tokens.

    Call it after ``init_from_unigrams``. Learned positions become sinusoids in dimensions of their
    own, where a shift is a rotation (Vaswani et al. 2017, section 3.5). One head attends to the
    previous token and one to the next; in a causal model, the second attends to the token before
    the previous one. A model with one head gets only the first. A model without room for separate
    position dimensions is not changed.
    """
    if (subspaces := _Subspaces.split(model)) is not None:
        attention = _attention_layers(model)[0]
        for head, shift in enumerate(_neighbor_shifts(model)[: attention.num_heads]):
            _init_shift_head(subspaces, _HeadWeights(attention, head), shift)


@torch.no_grad()
def init_cross_segment_heads(model: BertForPreTraining, cls_id: int) -> None:
    """Initialize neighbor heads, and heads that match and count words across segments.

    Call it after ``init_from_unigrams``. The neighbor heads and the match head, which finds each
    word in the other segment, are in the first layer. The count head in the second layer counts
    the words that were not found. The next-sentence classifier starts at 0, because random logits
    would disturb the encoder before the classifier is useful.

    In a model with two heads, the one for the next token moves to the second layer. In a causal
    model the count is available at the last token instead of [CLS], as fine-tuning expects. A model
    with only one layer, head or segment gets only neighbor heads; one without room for separate
    position dimensions is not changed.

    Args:
        model: Changed in place.
        cls_id: Id of [CLS], to which words without a match attend.
    """
    first, *others = _attention_layers(model)
    if (
        not others
        or 1 in (first.num_heads, model.config.segments)
        or first.head_width < _MIN_HEAD_WIDTH
    ):
        init_neighbor_heads(model)
        return
    if (subspaces := _Subspaces.split(model)) is None:
        return
    (previous, following), second, has_two_heads = (
        _neighbor_shifts(model), others[0], first.num_heads == 2
    )  # fmt: skip
    _init_shift_head(subspaces, _HeadWeights(first, 0), previous)
    _init_shift_head(
        subspaces, _HeadWeights(second, 0) if has_two_heads else _HeadWeights(first, 1), following
    )
    match_head = _HeadWeights(first, 1 if has_two_heads else 2)
    _init_match_head(subspaces, match_head, cls_id)
    # Approximate RMS by which the norm before the second layer divides: input plus head outputs.
    has_norm = model.config.norm != "none"
    second_input_rms = (1 + 2 * _NEIGHBOR_RMS**2 + _CLS_RMS**2) ** 0.5 if has_norm else 1.0
    _init_count_head(
        subspaces,
        _HeadWeights(second, 1 if has_two_heads else 0),
        match_head.output[:, 0] / second_input_rms,
    )
    if model.nsp is not None:
        model.nsp.classifier.weight.zero_()


def _neighbor_shifts(model: BertForPreTraining) -> tuple[int, int]:
    """Return the relative positions that the two neighbor heads attend to."""
    return (-1, 1) if model.config.attention == "bidirectional" else (-1, -2)


def _attention_layers(model: BertForPreTraining) -> list[SelfAttention]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


class _HeadWeights:
    """Views of one attention head's weights, for writing: matrices [H, D] and biases [H]."""

    def __init__(self, attention: SelfAttention, head: int) -> None:
        self.head_width, width = attention.head_width, attention.output.in_features
        shape = (3, attention.num_heads, self.head_width)
        self.query, self.key, self.value = attention.query_key_value.weight.view(*shape, width)[
            :, head
        ]
        biases = attention.query_key_value.bias.view(shape)[:, head]
        self.query_bias, self.key_bias, self.value_bias = biases
        self.output = attention.output.weight[
            :, head * self.head_width : (head + 1) * self.head_width
        ]


class _Subspaces:
    """Embeddings split into dimensions for words and segments, and dimensions for positions.

    Attributes:
        embeddings: The model's embeddings.
        frequencies: Angle per token of each pair of position dimensions.
        num_word_dims: Number of dimensions for words and segments, which come first.
        scale: RMS of the sum of the three embeddings, by which the norm divides; 1 without norm.
        input_rms: RMS of the first layer's input.
        word_variance: Variance of word embeddings in their dimensions, in the first layer's input.
        position_energy: Mean squared norm of position embeddings in the first layer's input.
    """

    def __init__(self, embeddings: Embeddings, frequencies: Tensor) -> None:
        tables = (embeddings.words, embeddings.positions, embeddings.segments)
        width = embeddings.words.embedding_dim
        energies = [float(table.weight.pow(2).sum(1).mean()) for table in tables]
        rms = (sum(energies) / width) ** 0.5
        scale = rms if embeddings.has_norm else 1.0
        self.input_rms = rms / scale
        self.embeddings, self.scale = embeddings, scale
        self.frequencies, self.num_word_dims = frequencies, width - 2 * len(frequencies)
        self.word_variance, self.position_energy = (
            energies[0] / self.num_word_dims / scale**2, energies[1] / scale**2
        )  # fmt: skip

    def segment_half_difference_and_mean(self) -> Tensor:
        """Return half the difference of the two segment embeddings, and their mean: [2, D]."""
        first, second = self.embeddings.segments.weight[:2]
        return torch.stack([first - second, first + second]) / 2

    def segment_readout(self) -> tuple[Tensor, float]:
        """Return a weight [D] and a bias that map a token to 1 in segment A and -1 in segment B."""
        half_difference, mean = self.segment_half_difference_and_mean()
        squared_norm = half_difference.pow(2).sum()
        return (
            half_difference * self.scale / squared_norm,
            -float(mean @ half_difference / squared_norm),
        )

    def word_readout(self, word_id: int) -> Tensor:
        """Return a weight [D] that maps this word to 1 and others to about 0 in both segments."""
        embedding: Tensor = self.embeddings.words.weight[word_id]
        segment_basis = torch.linalg.qr(self.segment_half_difference_and_mean().T).Q
        embedding = embedding - segment_basis @ (segment_basis.T @ embedding)
        return embedding * self.scale / embedding.pow(2).sum()

    @classmethod
    def split(cls, model: BertForPreTraining) -> "_Subspaces | None":
        """Move positions to the last dimensions of the embeddings, words and segments to the rest.

        Returns None, and changes nothing, if there are too few dimensions or fixed positions.
        """
        embeddings, config = model.bert.embeddings, model.config
        num_pairs = min(config.head_width, config.width // 4) // 2
        if not num_pairs or embeddings.has_fixed_positions:
            return None
        words, positions = embeddings.words.weight, embeddings.positions.weight
        num_positions, width = positions.shape
        first, std = width - 2 * num_pairs, float(words.std())
        max_wavelength = max(num_positions, _MIN_WAVELENGTH)
        frequencies = 2 * math.pi / torch.logspace(
            math.log10(_MIN_WAVELENGTH), math.log10(max_wavelength), num_pairs
        )  # fmt: skip
        angles = torch.arange(num_positions)[:, None] * frequencies
        for table in (words, embeddings.segments.weight):
            table[:, first:] = 0.0
        positions.zero_()
        # Scaled to the standard deviation of the word embeddings (a sinusoid has RMS 1/sqrt 2).
        positions[:, first::2] = angles.sin() * std * 2**0.5
        positions[:, first + 1 :: 2] = angles.cos() * std * 2**0.5
        return cls(embeddings, frequencies)


def _init_shift_head(subspaces: _Subspaces, head: _HeadWeights, shift: int) -> None:
    """Make a head attend to the token at the relative position ``shift``.

    The query is the key of the same position, rotated by ``shift``, so that the score is largest
    at the shifted position. The values contain only words, no positions.
    """
    rows = torch.arange(0, 2 * len(subspaces.frequencies), 2)
    sine, cosine = rows + subspaces.num_word_dims, rows + subspaces.num_word_dims + 1
    scale = (_NEIGHBOR_SCORE * head.head_width**0.5 / subspaces.position_energy) ** 0.5
    for weight in (head.query, head.key, head.value):
        weight.zero_()
    head.key[rows, sine] = head.key[rows + 1, cosine] = scale
    rotation = (subspaces.frequencies * shift).to(head.query)
    head.query[rows, sine] = head.query[rows + 1, cosine] = scale * rotation.cos()
    head.query[rows, cosine] = scale * rotation.sin()
    head.query[rows + 1, sine] = -scale * rotation.sin()
    nn.init.orthogonal_(head.value[:, : subspaces.num_word_dims])
    head.output.normal_(std=_NEIGHBOR_RMS / head.head_width**0.5)


def _init_match_head(subspaces: _Subspaces, head: _HeadWeights, cls_id: int) -> None:
    """Make a head attend to the same word in the other segment, or to [CLS] if there is none.

    The last dimension of queries and keys encodes the segment, the one before it [CLS], and the
    others the word. Attending to [CLS] always adds the same vector, so that the mean of the outputs
    over a sequence tells how many words the segments share.
    """
    score, last = head.head_width**0.5, head.head_width - 1
    head.query.zero_()
    head.key.zero_()
    # Random orthogonal directions; the first two span the segment embeddings and are skipped.
    directions = torch.randn(subspaces.num_word_dims, subspaces.num_word_dims)
    directions[:, :2] = subspaces.segment_half_difference_and_mean()[:, : subspaces.num_word_dims].T
    words = torch.linalg.qr(directions).Q[:, 2 : head.head_width].T
    words *= (_SAME_WORD_SCORE * score / (len(words) * subspaces.word_variance)) ** 0.5
    head.query[: last - 1, : subspaces.num_word_dims] = head.key[
        : last - 1, : subspaces.num_word_dims
    ] = words
    (segment, bias), root = subspaces.segment_readout(), (_SEGMENT_SCORE * score) ** 0.5
    head.query[last], head.query_bias[last] = segment * root, bias * root
    head.key[last], head.key_bias[last] = -segment * root, -bias * root
    # [CLS] belongs to segment A: cancel the segment's contribution to its score.
    head.key[last - 1] = head.value[0] = subspaces.word_readout(cls_id)
    head.query[last - 1] = segment * _SEGMENT_SCORE * score
    head.query_bias[last - 1] = (_CLS_SCORE + bias * _SEGMENT_SCORE) * score
    head.output[:, 0].normal_(std=_CLS_RMS * subspaces.input_rms)


def _init_count_head(subspaces: _Subspaces, head: _HeadWeights, mark: Tensor) -> None:
    """Make a head compute the share of tokens that carry the vector ``mark`` [D].

    Queries and keys keep their random initialization, which attends almost uniformly.
    """
    head.value[0] = mark / mark.pow(2).sum()
    head.value_bias[0] = -_TYPICAL_SHARE
    head.output[:, 0].normal_(std=_COUNT_SCALE * subspaces.input_rms)
