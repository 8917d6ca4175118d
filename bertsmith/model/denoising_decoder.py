"""The decoder of TSDAE, which reconstructs a text from its vector alone.

TSDAE (Wang et al. 2021, arXiv:2104.06979) trains a sentence embedding as the bottleneck of a
denoising autoencoder. The decoder shares the weights of the encoder; its attention is causal, and
each layer has an additional attention to the vector. W is the width of the vectors.
"""

from torch import Tensor, nn

from bertsmith.model.bert import BertModel, initialize_weights
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import EncoderLayer, output_dropout_index
from bertsmith.model.heads import MLMHead
from bertsmith.model.ops.attention_layout import build_attention_layout
from bertsmith.model.ops.cross_entropy import linear_cross_entropy
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.linear import Linear
from bertsmith.model.ops.norms import build_norm
from bertsmith.model.packed import PackedBatch

#: Added to the seed of the encoder, so that the decoder has other dropout masks.
_SEED_OFFSET = 2**62


class VectorAttention(nn.Module):
    """Attention to one vector per sequence, with a residual connection and a norm.

    The softmax over a single vector is 1, so there are no queries and keys.
    """

    def __init__(self, config: ModelConfig, vector_width: int, dropout_index: int) -> None:
        """Create the layer.

        Args:
            config: Sizes and architecture.
            vector_width: W.
            dropout_index: Index of the first of two dropout modules.
        """
        super().__init__()
        self.num_heads = config.heads
        self.value = Linear(vector_width, config.width)
        self.probability_dropout = Dropout(config.attention_dropout, dropout_index)
        self.output = Linear(config.width, config.width)
        self.output_dropout = Dropout(config.dropout, dropout_index + 1)
        self.norm = build_norm(config)

    def forward(
        self,
        x: Tensor,
        vectors: Tensor,
        sequence_indices: Tensor,
        dropout_seed: DropoutSeed | None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: [T, D].
            vectors: [B, W].
            sequence_indices: int64 [T], the sequence of each token.
            dropout_seed: Seed of this forward pass; None for no dropout.

        Returns:
            [T, D].
        """
        values = self.value(vectors).index_select(0, sequence_indices)
        heads = values.view(len(values), self.num_heads, -1)
        probabilities = heads.new_ones(len(values), self.num_heads, 1)
        context = (heads * self.probability_dropout(probabilities, dropout_seed)).flatten(1)
        output: Tensor = self.norm(x + self.output_dropout(self.output(context), dropout_seed))
        return output


class DenoisingDecoder(nn.Module):
    """Predicts the tokens of texts from left to right, given the vectors of the noisy texts."""

    def __init__(self, config: ModelConfig, vector_width: int, mlm: MLMHead) -> None:
        """Create the decoder; new weights are drawn from PyTorch's default generator.

        Args:
            config: Sizes and architecture of a post-norm encoder.
            vector_width: W.
            mlm: Predicts tokens from the last hidden states.
        """
        super().__init__()
        first_index = output_dropout_index(config) + 1
        self.vector_attentions = nn.ModuleList(
            VectorAttention(config, vector_width, first_index + 2 * layer)
            for layer in range(config.layers)
        )
        initialize_weights(self.vector_attentions, config.init_range)
        self.mlm = mlm

    def forward(
        self,
        bert: BertModel,
        batch: PackedBatch,
        labels: Tensor,
        vectors: Tensor,
        dropout_seed: DropoutSeed | None = None,
    ) -> Tensor:
        """Return the cross-entropy of the next tokens, summed over all tokens, float32 [].

        Args:
            bert: The encoder, whose weights the decoder shares.
            batch: The texts without their last tokens.
            labels: int64 [T], the next token of each token.
            vectors: [B, W], the vectors of the noisy texts.
            dropout_seed: Seed of the forward pass of the encoder; None for no dropout.
        """
        if dropout_seed is not None:
            dropout_seed = DropoutSeed(dropout_seed.seed + _SEED_OFFSET)
        sequence_indices = batch.sequence_indices
        x = bert.embeddings(batch, dropout_seed)
        layout = build_attention_layout(batch, bert.kernel, is_causal=True, dtype=x.dtype)
        for layer, vector_attention in zip(
            bert.encoder.layers, self.vector_attentions, strict=True
        ):
            assert isinstance(layer, EncoderLayer)
            x = layer.apply_attention(x, layout, dropout_seed)
            x = vector_attention(x, vectors, sequence_indices, dropout_seed)
            x = layer.apply_feed_forward(x, dropout_seed)
        decoder = self.mlm.decoder
        return linear_cross_entropy(
            self.mlm.apply_transform(x), decoder.weight, decoder.bias, labels
        )
