"""Structured initialization: attention heads that start with patterns found in trained BERTs.

Trained BERTs have heads that attend to the next or previous token, and heads that attend to [CLS]
or [SEP] when they find no match (Clark et al. 2019, arXiv:1906.04341). Short runs do not learn
these patterns. For millions of tokens a masked LM remains a bag of words, because attention to
neighbors and the features that use it improve only together. Next-sentence prediction has a
similar problem: whether two segments share words is not a linear function of their mean
embeddings, so one head must match words across segments and another must count the matches.
All weights remain trainable.
"""

import math

import torch
from torch import Tensor, nn

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.ops.neighbor_bias import find_widest_head

#: Shortest wavelength of the sinusoidal positions, in tokens. The longest wavelength is the number
#: of positions.
_MIN_WAVELENGTH = 3.0
#: Neighbor heads: attention score of the neighbor minus the score of distant positions. A quarter
#: of this value gave worse models.
_NEIGHBOR_SCORE = 16.0
#: Neighbor heads: RMS of the output divided by the RMS of the layer's input. Three times this value
#: gave worse models.
_NEIGHBOR_RMS = 0.5
#: Match head: attention score of a key whose token is the query's token.
_SAME_TOKEN_SCORE = 16.0
#: Match head: added to the score of keys in the other segment, and subtracted from the score of
#: keys in the query's segment. The query's token then scores 22 in the other segment and 10 in its
#: own segment. Other tokens score 6 and -6, with a standard deviation of about 4 at a head
#: dimension of 32.
_SEGMENT_SCORE = 6.0
#: Match head: score of [CLS].
_CLS_SCORE = 16.0
#: Match head: RMS of the output, for tokens that attend to [CLS], divided by the RMS of the layer's
#: input.
_CLS_RMS = 1.0
#: Count head: the output divided by the RMS of the layer's input is
#: _COUNT_SCALE * (unmatched - _TYPICAL_FRACTION), where unmatched is the fraction of tokens
#: whose match head attends to [CLS].
_COUNT_SCALE = 2.0
_TYPICAL_FRACTION = 0.45
#: The match head needs one dimension for the segment, one for [CLS] and the others for tokens.
_MIN_HEAD_DIM = 4


@torch.no_grad()
def init_separate_positions(model: BertForPreTraining) -> None:
    """Give words and segments some dimensions of the embeddings, and positions the others.

    Call this after ``init_from_unigrams``. Learned position embeddings become sinusoids in as many
    dimensions as a head has, at most a quarter of the width. Attention can then compare tokens
    regardless of their positions. A model that is too narrow, or whose position embeddings are
    fixed, is not changed.
    """
    _Subspaces.separate_positions(model)


@torch.no_grad()
def init_neighbor_heads(model: BertForPreTraining) -> None:
    """Make two heads of the first layer attend to neighboring tokens.

    Call this after ``init_from_unigrams``. Positions get separate dimensions, see
    ``init_separate_positions``, where a shift is a rotation (Vaswani et al. 2017, section 3.5). One
    head attends to the previous token and one to the next token. In a causal model, the second head
    attends to the token before the previous one. In a model with a single head, this head attends
    to the previous token. A model that is too narrow for separate position dimensions, or whose
    position embeddings are fixed, is not changed.
    """
    subspaces = _Subspaces.separate_positions(model)
    if subspaces is None:
        return
    first_layer = _attention_layers(model)[0]
    for head, shift in enumerate(_neighbor_shifts(model)[: first_layer.num_heads]):
        _init_shift_head(subspaces, _HeadWeights(first_layer, head), shift)


@torch.no_grad()
def init_cross_segment_heads(
    model: BertForPreTraining, cls_id: int, *, neighbor_heads: bool = True
) -> None:
    """Initialize heads that match and count tokens across segments, and neighbor heads.

    Call this after ``init_from_unigrams``. The first layer contains the neighbor heads and the
    match head, which finds each token in the other segment. The second layer contains the count
    head, which counts the tokens without a match. The next-sentence classifier starts at 0,
    because random logits would disturb the encoder before the classifier is useful.

    In a model with two heads per layer, the neighbor head for the next token is in the second
    layer. Where the bias of ``build_neighbor_bias`` applies, the match head and the count head are
    those that it changes least, so that it does not destroy them. In a causal model
    the last token receives the count instead of [CLS], because fine-tuning reads the last token. A
    model with only one layer, head or segment gets only neighbor heads. A model that is too narrow
    for separate position dimensions, or whose position embeddings are fixed, is not changed.

    Args:
        model: Changed in place.
        cls_id: Id of the [CLS] token, to which tokens without a match attend.
        neighbor_heads: Whether to initialize neighbor heads; without them, a model with only one
            layer, head or segment is not changed.
    """
    layers = _attention_layers(model)
    config = model.config
    if not _has_room_for_match_heads(config):
        if neighbor_heads:
            init_neighbor_heads(model)
        return
    subspaces = _Subspaces.separate_positions(model)
    if subspaces is None:
        return
    first_layer, second_layer = layers[:2]
    shift_heads: tuple[_HeadWeights, ...] = ()
    widest_head = find_widest_head(config.heads)
    if not neighbor_heads:
        match_head = _HeadWeights(first_layer, widest_head)
        count_head = _HeadWeights(second_layer, widest_head)
    elif config.heads == 2:
        shift_heads = _HeadWeights(first_layer, 0), _HeadWeights(second_layer, 0)
        match_head, count_head = _HeadWeights(first_layer, 1), _HeadWeights(second_layer, 1)
    else:
        shift_heads = _HeadWeights(first_layer, 0), _HeadWeights(first_layer, 1)
        match_head, count_head = (
            _HeadWeights(first_layer, 2),
            _HeadWeights(second_layer, widest_head),
        )
    for head, shift in zip(shift_heads, _neighbor_shifts(model), strict=False):
        _init_shift_head(subspaces, head, shift)
    _init_match_head(subspaces, match_head, cls_id)
    # The norm before the second layer divides by about the RMS of the input plus the head outputs.
    second_input_rms = 1.0
    if config.norm != "none":
        neighbor_energy = 2 * _NEIGHBOR_RMS**2 if neighbor_heads else 0.0
        second_input_rms = (1 + neighbor_energy + _CLS_RMS**2) ** 0.5
    _init_count_head(subspaces, count_head, match_head.output[:, 0] / second_input_rms)
    if model.nsp is not None:
        model.nsp.classifier.weight.zero_()


def _has_room_for_match_heads(config: ModelConfig) -> bool:
    """Return whether a model is large enough for heads that match tokens across segments."""
    is_large_enough = config.layers > 1 and config.heads > 1 and config.segments > 1
    return is_large_enough and config.head_dim >= _MIN_HEAD_DIM


def _count_position_pairs(config: ModelConfig) -> int:
    """Return the number of pairs of separate position dimensions; 0 if there is no room for them.

    Fixed positions cannot be separated.
    """
    if config.positions == "sinusoidal":
        return 0
    return min(config.head_dim, config.width // 4) // 2


def count_layers_with_neighbor_heads(initialization: str, config: ModelConfig) -> int:
    """Return in how many layers, from the first one, an initialization sets neighbor heads.

    Args:
        initialization: Value of the setting `run.initialization`.
        config: Config of the model.
    """
    sets_neighbor_heads = initialization in ("neighbor-heads", "cross-segment-heads")
    if not sets_neighbor_heads or not _count_position_pairs(config):
        return 0
    sets_match_heads = initialization == "cross-segment-heads" and _has_room_for_match_heads(config)
    return 2 if sets_match_heads and config.heads == 2 else 1


def _neighbor_shifts(model: BertForPreTraining) -> tuple[int, int]:
    """Return the relative positions to which the two neighbor heads attend."""
    return (-1, 1) if model.config.attention == "bidirectional" else (-1, -2)


def _attention_layers(model: BertForPreTraining) -> list[SelfAttention]:
    """Return the self-attention module of each encoder layer, in order."""
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


class _HeadWeights:
    """Writable views of the weights of one attention head.

    Attributes:
        head_dim: H.
        query: [H, D]; ``key`` and ``value`` likewise.
        query_bias: [H]; ``key_bias`` and ``value_bias`` likewise.
        output: [D, H], the head's columns of the output layer.
    """

    def __init__(self, attention: SelfAttention, head: int) -> None:
        self.head_dim = attention.head_dim
        width = attention.output.in_features
        # The first axis stands for query, key and value.
        shape = (3, attention.num_heads, self.head_dim)
        weights = attention.query_key_value.weight.view(*shape, width)[:, head]
        biases = attention.query_key_value.bias.view(shape)[:, head]
        self.query, self.key, self.value = weights
        self.query_bias, self.key_bias, self.value_bias = biases
        start = head * self.head_dim
        self.output = attention.output.weight[:, start : start + self.head_dim]


class _Subspaces:
    """Embeddings with separate dimensions for positions.

    The first dimensions contain words and segments, and the last dimensions contain positions. The
    first layer's input is the sum of the three embeddings, divided by ``scale``.

    Attributes:
        embeddings: The model's embeddings.
        frequencies: For each pair of position dimensions, the angle between adjacent positions.
        num_word_dims: Number of dimensions for words and segments.
        scale: RMS of the sum of the three embeddings, by which the norm divides; 1 without norm.
        input_rms: RMS of the first layer's input.
        word_variance: Variance of the word embeddings in the first layer's input.
        position_energy: Mean squared norm of the position embeddings in the first layer's input.
    """

    def __init__(self, embeddings: Embeddings, frequencies: Tensor) -> None:
        tables = (embeddings.words, embeddings.positions, embeddings.segments)
        width = embeddings.words.embedding_dim
        energies = [float(table.weight.pow(2).sum(1).mean()) for table in tables]
        rms = (sum(energies) / width) ** 0.5
        scale = rms if embeddings.has_norm else 1.0
        self.input_rms = rms / scale
        self.embeddings = embeddings
        self.scale = scale
        self.frequencies = frequencies
        self.num_word_dims = width - 2 * len(frequencies)
        self.word_variance = energies[0] / self.num_word_dims / scale**2
        self.position_energy = energies[1] / scale**2

    def segment_half_difference_and_mean(self) -> Tensor:
        """Return half the difference of the two segment embeddings, and their mean: [2, D]."""
        first, second = self.embeddings.segments.weight[:2]
        return torch.stack([first - second, first + second]) / 2

    def segment_readout(self) -> tuple[Tensor, float]:
        """Return a weight [D] and a bias that map segment A to 1 and segment B to -1."""
        half_difference, mean = self.segment_half_difference_and_mean()
        squared_norm = half_difference.pow(2).sum()
        return (
            half_difference * self.scale / squared_norm,
            -float(mean @ half_difference / squared_norm),
        )

    def token_readout(self, token_id: int) -> Tensor:
        """Return a weight [D] that maps a token to 1 and other tokens to about 0."""
        embedding: Tensor = self.embeddings.words.weight[token_id]
        segment_basis = torch.linalg.qr(self.segment_half_difference_and_mean().T).Q
        embedding = embedding - segment_basis @ (segment_basis.T @ embedding)
        return embedding * self.scale / embedding.pow(2).sum()

    @classmethod
    def separate_positions(cls, model: BertForPreTraining) -> "_Subspaces | None":
        """Change the model's embeddings in place: the last dimensions then contain only positions.

        Returns:
            The subspaces of the changed embeddings; None if the embeddings are not changed, because
            they have too few dimensions or fixed positions.
        """
        embeddings, config = model.bert.embeddings, model.config
        num_pairs = _count_position_pairs(config)
        if not num_pairs:
            return None
        words, positions = embeddings.words.weight, embeddings.positions.weight
        num_positions, width = positions.shape
        num_word_dims = width - 2 * num_pairs
        std = float(words.std())
        max_wavelength = max(num_positions, _MIN_WAVELENGTH)
        frequencies = (
            2
            * math.pi
            / torch.logspace(math.log10(_MIN_WAVELENGTH), math.log10(max_wavelength), num_pairs)
        )
        angles = torch.arange(num_positions)[:, None] * frequencies
        for table in (words, embeddings.segments.weight):
            table[:, num_word_dims:] = 0.0
        positions.zero_()
        # Scaled to the standard deviation of the word embeddings (a sinusoid has RMS 1/sqrt 2).
        positions[:, num_word_dims::2] = angles.sin() * std * 2**0.5
        positions[:, num_word_dims + 1 :: 2] = angles.cos() * std * 2**0.5
        return cls(embeddings, frequencies)


def _init_shift_head(subspaces: _Subspaces, head: _HeadWeights, shift: int) -> None:
    """Make a head attend to the token at the relative position ``shift``.

    The query of a position is the key of this position, rotated by the angles of ``shift``, so that
    the score is largest at the shifted position. The values contain only words and segments.
    """
    rows = torch.arange(0, 2 * len(subspaces.frequencies), 2)
    sine_dims = subspaces.num_word_dims + rows
    cosine_dims = sine_dims + 1
    scale = (_NEIGHBOR_SCORE * head.head_dim**0.5 / subspaces.position_energy) ** 0.5
    for weight in (head.query, head.key, head.value):
        weight.zero_()
    head.key[rows, sine_dims] = scale
    head.key[rows + 1, cosine_dims] = scale
    angles = (subspaces.frequencies * shift).to(head.query)
    head.query[rows, sine_dims] = scale * angles.cos()
    head.query[rows + 1, cosine_dims] = scale * angles.cos()
    head.query[rows, cosine_dims] = scale * angles.sin()
    head.query[rows + 1, sine_dims] = -scale * angles.sin()
    nn.init.orthogonal_(head.value[:, : subspaces.num_word_dims])
    head.output.normal_(std=_NEIGHBOR_RMS / head.head_dim**0.5)


def _init_match_head(subspaces: _Subspaces, head: _HeadWeights, cls_id: int) -> None:
    """Make a head attend to the query's token in the other segment, or else to [CLS].

    The last dimension of queries and keys encodes the segment, the second to last dimension encodes
    [CLS], and the other dimensions encode the token. Attention to [CLS] always adds the same vector
    to the output. The mean of the outputs over a sequence therefore determines how many tokens
    the segments share.
    """
    score_scale = head.head_dim**0.5
    cls_dim, segment_dim = head.head_dim - 2, head.head_dim - 1
    head.query.zero_()
    head.key.zero_()
    # Draw random orthogonal directions. The first two span the segment embeddings and are not used.
    directions = torch.randn(subspaces.num_word_dims, subspaces.num_word_dims)
    directions[:, :2] = subspaces.segment_half_difference_and_mean()[:, : subspaces.num_word_dims].T
    directions = torch.linalg.qr(directions).Q[:, 2 : head.head_dim].T
    directions *= (
        _SAME_TOKEN_SCORE * score_scale / (len(directions) * subspaces.word_variance)
    ) ** 0.5
    head.query[:cls_dim, : subspaces.num_word_dims] = directions
    head.key[:cls_dim, : subspaces.num_word_dims] = directions
    weight, bias = subspaces.segment_readout()
    segment_scale = (_SEGMENT_SCORE * score_scale) ** 0.5
    head.query[segment_dim] = weight * segment_scale
    head.query_bias[segment_dim] = bias * segment_scale
    head.key[segment_dim] = -weight * segment_scale
    head.key_bias[segment_dim] = -bias * segment_scale
    # The query bias and the key of [CLS] are equally large. If the bias is much larger, small
    # changes of the keys during training can make all tokens attend to [CLS].
    cls_scale = (_CLS_SCORE * score_scale) ** 0.5
    head.value[0] = subspaces.token_readout(cls_id)
    head.key[cls_dim] = head.value[0] * cls_scale
    # [CLS] belongs to segment A. The query cancels the contribution of this segment to the score.
    head.query[cls_dim] = weight * _SEGMENT_SCORE * score_scale / cls_scale
    head.query_bias[cls_dim] = (_CLS_SCORE + bias * _SEGMENT_SCORE) * score_scale / cls_scale
    head.output[:, 0].normal_(std=_CLS_RMS * subspaces.input_rms)


def _init_count_head(subspaces: _Subspaces, head: _HeadWeights, feature: Tensor) -> None:
    """Make a head compute the fraction of tokens whose hidden state contains ``feature`` [D].

    Queries and keys keep their random initialization, with which attention is almost uniform.
    """
    head.value[0] = feature / feature.pow(2).sum()
    head.value_bias[0] = -_TYPICAL_FRACTION
    head.output[:, 0].normal_(std=_COUNT_SCALE * subspaces.input_rms)
