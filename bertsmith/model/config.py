"""What a BERT is made of: its sizes and the choices that the paper's ablations turn.

It never knows of tensors, and importing it never loads torch.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import Settings

Activation = Literal["gelu", "gelu_tanh", "relu", "elu"]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]

#: Layers, width, heads. base and large: section 3 of the paper; the smaller ones: Turc et al.
#: 2019 (arXiv:1908.08962). The feed-forward width is four times the width in all of them.
SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


class ModelConfig(Settings):
    """The shape of an encoder and of its pre-training heads."""

    vocab_size: Positive
    layers: Positive = 12
    width: Positive = 768
    heads: Positive = 12
    feed_forward: Positive = 3072
    max_positions: Positive = 512
    #: Kinds of segment ids: A and B.
    segments: Positive = 2
    #: ``gelu`` is the erf form (Hugging Face's default), ``gelu_tanh`` the original code's.
    activation: Activation = "gelu_tanh"
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    norm_eps: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-12
    init_range: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.02
    #: Where LayerNorm stands: after each sum (the paper); or before each sub-layer, after the
    #: embeddings and at the end, as in RoBERTa-PreLayerNorm; or, after each sum, batch norm over
    #: the tokens in its place, or nothing.
    norm: Literal["post", "pre", "batch", "none"] = "post"
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    positions: Literal["learned", "sinusoidal"] = "learned"
    #: Whether the model has a pooler and a next-sentence head.
    nsp: bool = True

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self

    @property
    def head_width(self) -> int:
        """The width H of one attention head."""
        return self.width // self.heads

    def macs_per_token(self, length: float) -> int:
        """Return the multiply-adds of the encoder for one token in a sequence of ``length``.

        The linear layers (4 D² + 2 D F a layer) and both attention products (2 S D a layer).
        """
        linear = 4 * self.width * self.width + 2 * self.width * self.feed_forward
        return int(self.layers * (linear + 2 * length * self.width))

    def macs_saved_per_unused_output(self) -> int:
        """Return the multiply-adds of the last layer that a token is spared if nobody asks for it.

        What follows attention: its output and the feed-forward network (D² + 2 D F).
        """
        return self.width * self.width + 2 * self.width * self.feed_forward

    def macs_per_prediction(self) -> int:
        """Return the multiply-adds of the masked-LM head for one predicted token (D² + D V)."""
        return self.width * self.width + self.width * self.vocab_size


class FeatureSettings(Settings):
    """A BiLSTM on the encoder: which layers it reads.

    Frozen, the encoder gives features (section 5.3); else both learn (section 5.1, "+ BiLSTM").
    """

    layers: Literal[
        "embeddings",
        "second-to-last",
        "last",
        "weighted-sum-last-four",
        "concat-last-four",
        "weighted-sum-all",
    ] = "concat-last-four"
    #: Of each direction of the BiLSTM; the paper's is 768.
    width: Positive = 768
    dropout: Probability = 0.1
    frozen: bool = True


def size_preset(name: str) -> dict[str, int]:
    """Return layers, width, heads and feed-forward width of a named size; KeyError if unknown."""
    layers, width, heads = SIZES[name]
    return {"layers": layers, "width": width, "heads": heads, "feed_forward": 4 * width}
