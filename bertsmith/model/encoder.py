"""The Transformer encoder: one layer, and the stack of layers."""

from collections.abc import Iterator

from torch import Tensor, nn

from bertsmith.model.attention import SelfAttention
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.activations import ACTIVATIONS
from bertsmith.model.ops.attention_layout import AttentionLayout
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.linear import Linear
from bertsmith.model.ops.norms import build_norm

#: Dropouts of a layer: on attention probabilities, attention output and feed-forward output.
DROPOUTS_PER_LAYER = 3


def output_dropout_index(config: ModelConfig) -> int:
    """Return the first dropout index after those of the embeddings (0) and the layers."""
    return 1 + config.layers * DROPOUTS_PER_LAYER


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection and a norm.

    Post-norm: x = norm(x + dropout(f(x))); the norm may be LayerNorm, batch norm or the identity.
    Pre-norm: x = x + dropout(f(norm(x))).
    """

    def __init__(self, config: ModelConfig, first_dropout_index: int) -> None:
        """Create the layer, whose dropouts have consecutive indices."""
        super().__init__()
        self.is_post_norm = config.norm != "pre"
        self.attention = SelfAttention(config, first_dropout_index)
        self.attention_dropout = Dropout(config.dropout, first_dropout_index + 1)
        self.attention_norm = build_norm(config)
        self.up = Linear(config.width, config.feed_forward)
        self.activation = ACTIVATIONS[config.activation]
        self.down = Linear(config.feed_forward, config.width)
        self.feed_forward_dropout = Dropout(config.dropout, first_dropout_index + 2)
        self.feed_forward_norm = build_norm(config)

    def forward(
        self,
        x: Tensor,
        layout: AttentionLayout,
        dropout_seed: DropoutSeed | None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        Attention keys and values are always computed for all T tokens, everything else only for
        the tokens in ``token_indices``.

        Args:
            x: [T, D].
            layout: AttentionLayout of the batch.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to compute the output for; None for all T.

        Returns:
            [T, D] or [M, D].
        """
        normed = x if self.is_post_norm else self.attention_norm(x)
        attended = self.attention_dropout(
            self.attention(normed, layout, dropout_seed, token_indices), dropout_seed
        )
        x = (x if token_indices is None else x.index_select(0, token_indices)) + attended
        if self.is_post_norm:
            x = self.attention_norm(x)
            output: Tensor = self.feed_forward_norm(x + self._feed_forward(x, dropout_seed))
            return output
        return x + self._feed_forward(self.feed_forward_norm(x), dropout_seed)

    def compute_probabilities(self, x: Tensor, layout: AttentionLayout) -> list[Tensor]:
        """Return each sequence's attention probabilities [N, S_b, S_b] for layer input [T, D]."""
        normed = x if self.is_post_norm else self.attention_norm(x)
        probabilities: list[Tensor] = self.attention.compute_probabilities(normed, layout)
        return probabilities

    def _feed_forward(self, x: Tensor, dropout_seed: DropoutSeed | None) -> Tensor:
        down = self.down(self.activation(self.up(x)))
        output: Tensor = self.feed_forward_dropout(down, dropout_seed)
        return output


class Encoder(nn.Module):
    """Stack of L layers; pre-norm models have a final LayerNorm."""

    def __init__(self, config: ModelConfig, first_dropout_index: int) -> None:
        """Create the layers, whose dropouts have consecutive indices."""
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(config, first_dropout_index + index * DROPOUTS_PER_LAYER)
            for index in range(config.layers)
        )
        is_pre_norm = config.norm == "pre"
        self.norm = build_norm(config) if is_pre_norm else nn.Identity()
        # Batch statistics must cover all tokens, also those whose output is not needed.
        self._needs_all_tokens = config.norm == "batch"

    def iter_layer_outputs(
        self,
        x: Tensor,
        layout: AttentionLayout,
        dropout_seed: DropoutSeed | None,
        token_indices: Tensor | None = None,
        num_layers: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield each layer's output, [T, D], computed lazily.

        Args:
            x: Embeddings, [T, D].
            layout: AttentionLayout of the batch.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens whose last yielded output is needed. The last output
                is then [M, D].
            num_layers: Number of layers to compute; None for all.
        """
        last_layer, layers = self.layers[-1], list(self.layers)[:num_layers]
        for number, layer in enumerate(layers, 1):
            needed_indices = token_indices if number == len(layers) else None
            if self._needs_all_tokens and needed_indices is not None:
                x = layer(x, layout, dropout_seed).index_select(0, needed_indices)
            else:
                x = layer(x, layout, dropout_seed, needed_indices)
            yield self.norm(x) if layer is last_layer else x
