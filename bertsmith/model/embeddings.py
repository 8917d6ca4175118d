"""Word, position and segment embeddings (figure 2 of the paper)."""

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.norms import build_norm
from bertsmith.model.packed import PackedBatch


def sinusoidal_positions(num_positions: int, width: int) -> Tensor:
    """Return sinusoidal position embeddings, float32 [num_positions, width].

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(pos / 10000^(2i/D)); section 3.5 of
    Vaswani et al. 2017.
    """
    # Angles are computed in float64: in float32, an angle of several hundred radians has only four
    # correct decimals.
    positions = torch.arange(num_positions, dtype=torch.float64)[:, None]
    even_columns = torch.arange(0, width, 2, dtype=torch.float64)
    angles = positions / 10000.0 ** (even_columns / width)
    table = torch.zeros(num_positions, width)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : width // 2]
    return table


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm and dropout: [T, D]."""

    def __init__(self, config: ModelConfig, dropout_index: int) -> None:
        """Create the embedding tables.

        Args:
            config: Sizes and architecture.
            dropout_index: Index of the dropout layer.
        """
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = build_norm(config)
        self.has_norm = config.norm != "none"
        self.dropout = Dropout(config.dropout, dropout_index)
        self.has_fixed_positions = config.positions == "sinusoidal"
        if self.has_fixed_positions:
            self.positions.weight.requires_grad_(False)

    @torch.no_grad()
    def set_sinusoidal_positions(self, rms: float) -> None:
        """Set the position embeddings to sinusoids, scaled to a root mean square.

        Args:
            rms: Usually that of the word embeddings, which Vaswani et al. scale up instead.
        """
        table = sinusoidal_positions(*self.positions.weight.shape)
        # A sinusoid has RMS 1/sqrt 2.
        self.positions.weight.copy_(table * rms * 2**0.5)

    def forward(self, batch: PackedBatch, dropout_seed: DropoutSeed | None) -> Tensor:
        """Return the embeddings of all tokens, float [T, D]."""
        embeddings = (
            self.words(batch.ids) + self.positions(batch.positions) + self.segments(batch.segments)
        )
        output: Tensor = self.dropout(self.norm(embeddings), dropout_seed)
        return output
