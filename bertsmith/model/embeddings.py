"""The sum of word, position and segment embeddings (figure 2 of the paper).

It never knows which words the ids stand for.
"""

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.norms import build_norm
from bertsmith.model.packed import PackedBatch


def sinusoidal_positions(positions: int, width: int) -> Tensor:
    """Return the table of section 3.5 of Vaswani et al. 2017: float32 [positions, width].

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same.
    """
    # In float64: an angle of some hundreds has only four correct digits after the point in float32.
    place = torch.arange(positions, dtype=torch.float64)[:, None]
    even = torch.arange(0, width, 2, dtype=torch.float64)
    angle = place / 10000.0 ** (even / width)
    table = torch.zeros(positions, width)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : width // 2]
    return table


class Embeddings(nn.Module):
    """Look up and add the three embeddings, normalize and drop: packed ids -> [T, D]."""

    def __init__(self, config: ModelConfig, dropout_index: int) -> None:
        """``dropout_index`` numbers the dropout."""
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = build_norm(config)
        self.normed = config.norm != "none"
        self.dropout = Dropout(config.dropout, dropout_index)
        self.fixed_positions = config.positions == "sinusoidal"
        if self.fixed_positions:
            self.positions.weight.requires_grad_(False)

    def forward(self, packed: PackedBatch, noise: DropoutSeed | None) -> Tensor:
        """Return float [T, D]."""
        total = self.words(packed.ids) + self.positions(packed.positions)
        dropped: Tensor = self.dropout(self.norm(total + self.segments(packed.segments)), noise)
        return dropped
