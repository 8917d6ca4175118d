"""Model configuration: sizes and the architecture choices of the paper's ablations."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bertsmith.errors import SettingsError
from bertsmith.settings import Settings

Activation = Literal["gelu", "gelu_tanh", "relu", "elu"]
#: How ``pool_tokens`` combines the hidden states of a text: pooling modes of sentence-transformers.
PoolingMode = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]

#: Layers, width and heads of each named size. The sizes base and large are from section 3 of the
#: paper, the others from Turc et al. 2019 (arXiv:1908.08962). The feed-forward width is 4 times the
#: width.
SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


class ModelConfig(Settings):
    """Sizes and architecture of the encoder and its pre-training heads."""

    #: Number of tokens in the vocabulary.
    vocab_size: Positive
    #: Number of Transformer layers.
    layers: Positive = 12
    #: Size of the hidden states (``hidden_size``).
    width: Positive = 768
    #: Attention heads per layer.
    heads: Positive = 12
    #: Inner size of the feed-forward layers (``intermediate_size``).
    feed_forward: Positive = 3072
    #: Number of position embeddings, which limits the sequence length.
    max_positions: Positive = 512
    #: Number of segment (token type) embeddings.
    segments: Positive = 2
    #: ``gelu`` is the erf form (Hugging Face's default), ``gelu_tanh`` the tanh approximation (the
    #: original code).
    activation: Activation = "gelu_tanh"
    #: Dropout rate of the hidden states.
    dropout: Probability = 0.1
    #: Dropout rate of the attention probabilities.
    attention_dropout: Probability = 0.1
    #: Dropout rate before the output layer of text classification, multiple choice and tagging. If
    #: it is not set, it is ``dropout``.
    classifier_dropout: Probability | None = None
    #: Epsilon of LayerNorm.
    norm_eps: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-12
    #: Standard deviation of the initial weights.
    init_range: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.02
    #: ``post``: LayerNorm after each residual sum, as in the paper. ``pre``: LayerNorm before each
    #: sub-layer, after the embeddings and after the last layer, as in RoBERTa-PreLayerNorm.
    #: ``batch``: as ``post``, with batch norm over the tokens. ``none``: no normalization.
    norm: Literal["post", "pre", "batch", "none"] = "post"
    #: ``causal`` restricts each token to itself and the tokens before it.
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    #: Whether position embeddings are learned, or fixed sinusoids.
    positions: Literal["learned", "sinusoidal"] = "learned"
    #: Whether the model has a pooler and a next-sentence head.
    nsp: bool = True

    @model_validator(mode="after")
    def _check_heads_divide_width(self) -> Self:
        """Reject a width that is not a multiple of the number of heads."""
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; change one of them"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Dimension of an attention head, H = D / N."""
        return self.width // self.heads

    def check_max_seqlen(self, setting: str, max_seqlen: int, owner: str = "the model") -> None:
        """Raise SettingsError if a setting exceeds ``max_positions``.

        Args:
            setting: Name of the setting, such as "task.max_seqlen".
            max_seqlen: Value of the setting.
            owner: Whose config this is.
        """
        if max_seqlen > self.max_positions:
            raise SettingsError(
                f"{setting} is {max_seqlen}, but {owner} takes at most {self.max_positions} "
                f"tokens; reduce {setting}"
            )

    def require_two_segments(self) -> None:
        """Raise SettingsError if the model cannot read pairs of texts."""
        if self.segments < 2:
            raise SettingsError(
                "the task has pairs of texts, but the model has a single segment "
                "(model.segments=1); use a model with two"
            )

    def get_dropout_rates(self) -> dict[str, float]:
        """Return the dropout rates that are set, to replace those of a stored config."""
        rates = {
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "classifier_dropout": self.classifier_dropout,
        }
        return {name: rate for name, rate in rates.items() if rate is not None}

    def macs_per_token(self, length: float) -> int:
        """Return the encoder's multiply-adds for one token of a sequence of ``length`` tokens.

        Each layer has 4 D² + 2 D F in its linear layers and 2 S D in the two matrix products of
        attention.
        """
        linear_macs = 4 * self.width * self.width + 2 * self.width * self.feed_forward
        attention_macs = 2 * length * self.width
        return int(self.layers * (linear_macs + attention_macs))

    def macs_saved_per_unused_output(self) -> int:
        """Return the multiply-adds saved by each token whose last hidden state is not needed.

        These are the multiply-adds of the last layer after attention, D² + 2 D F.
        """
        return self.width * self.width + 2 * self.width * self.feed_forward

    def macs_per_prediction(self) -> int:
        """Return the masked-LM head's multiply-adds for one predicted token (D² + D V)."""
        return self.width * self.width + self.width * self.vocab_size


class BiLSTMSettings(Settings):
    """Settings of a BiLSTM on top of the encoder, and of the hidden states that it reads.

    A BiLSTM on a frozen encoder is the feature-based approach of section 5.3 of the paper; on a
    trained encoder it is the "+ BiLSTM" ablation of section 5.1.
    """

    #: Hidden states that the BiLSTM reads, as in Table 7 of the paper.
    layers: Literal[
        "embeddings",
        "second-to-last",
        "last",
        "weighted-sum-last-four",
        "concat-last-four",
        "weighted-sum-all",
    ] = "concat-last-four"
    #: Hidden width of each LSTM direction; 768 in the paper.
    width: Positive = 768
    #: Dropout rate before and after the BiLSTM.
    dropout: Probability = 0.1
    #: Whether the encoder is frozen; otherwise it is trained too.
    frozen: bool = True


def get_size_preset(name: str) -> dict[str, int]:
    """Return the ``ModelConfig`` fields of a named size, such as "base".

    Raises:
        KeyError: If the name is not in ``SIZES``.
    """
    layers, width, heads = SIZES[name]
    return {"layers": layers, "width": width, "heads": heads, "feed_forward": 4 * width}
