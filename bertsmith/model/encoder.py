"""The Transformer encoder: a layer, and the stack of all layers."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from bertsmith.model.attention import SelfAttention
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.activations import ACTIVATIONS
from bertsmith.model.ops.attention_layout import AttentionLayout
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.linear import Linear, append_filler_rows
from bertsmith.model.ops.norms import build_norm

#: Number of dropout modules in a layer: for the attention probabilities, the attention output and
#: the feed-forward output.
DROPOUTS_PER_LAYER = 3


def output_dropout_index(config: ModelConfig) -> int:
    """Return the index of the dropout before a task's output layer.

    Index 0 belongs to the embeddings, and the next ones to the encoder layers.
    """
    return 1 + config.layers * DROPOUTS_PER_LAYER


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection and a norm.

    With f as self-attention or the feed-forward network, a post-norm layer computes
    x = norm(x + dropout(f(x))) and a pre-norm layer computes x = x + dropout(f(norm(x))).
    """

    def __init__(self, config: ModelConfig, first_dropout_index: int) -> None:
        """Create the layer, with dropout indices that start at ``first_dropout_index``."""
        super().__init__()
        self.is_post_norm = config.norm != "pre"
        self.attention = SelfAttention(config, first_dropout_index)
        self.attention_output_dropout = Dropout(config.dropout, first_dropout_index + 1)
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

        Queries, keys, values and attention are computed for all T tokens. Everything after
        attention is computed only for the tokens in ``token_indices``.

        Args:
            x: [T, D].
            layout: Sequence boundaries, padding indices and masks of the batch.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to compute the output for; None for all T.

        Returns:
            [T, D] or [M, D].
        """
        x = self.apply_attention(x, layout, dropout_seed, token_indices)
        return self.apply_feed_forward(x, dropout_seed)

    def apply_attention(
        self,
        x: Tensor,
        layout: AttentionLayout,
        dropout_seed: DropoutSeed | None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Apply self-attention with its residual connection; see ``forward``."""
        attention_input = x if self.is_post_norm else self.attention_norm(x)
        attention_output = self.attention(attention_input, layout, dropout_seed, token_indices)
        if token_indices is not None:
            x = x.index_select(0, token_indices)
        x = x + self.attention_output_dropout(attention_output, dropout_seed)
        return self.attention_norm(x) if self.is_post_norm else x

    def apply_feed_forward(self, x: Tensor, dropout_seed: DropoutSeed | None) -> Tensor:
        """Apply the feed-forward network with its residual connection; the shape of x stays."""
        if self.is_post_norm:
            output: Tensor = self.feed_forward_norm(x + self._feed_forward(x, dropout_seed))
            return output
        return x + self._feed_forward(self.feed_forward_norm(x), dropout_seed)

    def compute_probabilities(self, x: Tensor, layout: AttentionLayout) -> list[Tensor]:
        """Return the attention probabilities of each sequence, for the layer's input x [T, D].

        Their shape is [N, S_b, S_b], where S_b is the length of the sequence.
        """
        attention_input = x if self.is_post_norm else self.attention_norm(x)
        return self.attention.compute_probabilities(attention_input, layout)

    def compute_qkv(self, x: Tensor) -> Tensor:
        """Return the queries, keys and values for the layer's input x: [T, D] -> [T, 3, N, H]."""
        return self.attention.project(x if self.is_post_norm else self.attention_norm(x))

    def _feed_forward(self, x: Tensor, dropout_seed: DropoutSeed | None) -> Tensor:
        """Apply the feed-forward network and its dropout; the shape, [T, D] or [M, D], stays."""
        hidden = self.activation(self.up(x))
        output: Tensor = self.feed_forward_dropout(self.down(hidden), dropout_seed)
        return output


class Encoder(nn.Module):
    """Stack of L layers, followed by a LayerNorm in pre-norm models."""

    def __init__(self, config: ModelConfig, first_dropout_index: int) -> None:
        """Create the layers, with dropout indices that start at ``first_dropout_index``."""
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(config, first_dropout_index + index * DROPOUTS_PER_LAYER)
            for index in range(config.layers)
        )
        is_pre_norm = config.norm == "pre"
        self.norm = build_norm(config) if is_pre_norm else nn.Identity()
        # Batch statistics must include all tokens, even if only some outputs are needed, and no
        # filler rows.
        self._needs_all_tokens = config.norm == "batch"

    def iter_layer_outputs(
        self,
        x: Tensor,
        layouts: Sequence[AttentionLayout],
        dropout_seed: DropoutSeed | None,
        token_indices: Tensor | None = None,
        num_layers: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield each layer's output, [T, D], computed lazily.

        In pre-norm models, the output of the last of the L layers is normalized.

        Args:
            x: Embeddings, [T, D].
            layouts: Sequence boundaries, padding indices and masks of the batch, for each layer.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to compute the last yielded output for; its shape is
                then [M, D]. None for all T.
            num_layers: Number of layers to compute; None for all.
        """
        num_tokens = x.shape[0]
        if not self._needs_all_tokens:
            x = append_filler_rows(x)
        layers = list(self.layers)[:num_layers]
        for layer, layout in zip(layers, layouts, strict=False):
            output_indices = token_indices if layer is layers[-1] else None
            if self._needs_all_tokens and output_indices is not None:
                x = layer(x, layout, dropout_seed).index_select(0, output_indices)
            else:
                x = layer(x, layout, dropout_seed, output_indices)
            output = x if output_indices is not None else x[:num_tokens]
            yield self.norm(output) if layer is self.layers[-1] else output
