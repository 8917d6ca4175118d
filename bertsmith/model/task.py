"""The encoder with one output layer, as it is fine-tuned (section 3.2 and figure 4 of the paper).

It never knows what the outputs mean.
"""

from torch import Tensor, nn

from bertsmith.model.attention import Kernel
from bertsmith.model.bert import BertModel, draw_weights
from bertsmith.model.config import ModelConfig
from bertsmith.model.dropout import Dropout, Noise
from bertsmith.model.encoder import SITES_PER_LAYER
from bertsmith.model.heads import Pooler
from bertsmith.model.packed import Packed


class SequenceModel(nn.Module):
    """Encoder, pooler, dropout and one Linear: C outputs a sequence."""

    def __init__(self, config: ModelConfig, outputs: int, kernel: Kernel = "padded") -> None:
        """``outputs`` is C. Weights are drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.pooler = Pooler(config)
        # After those of the embeddings (0) and the layers.
        self.dropout = Dropout(config.dropout, 1 + config.layers * SITES_PER_LAYER)
        self.output = nn.Linear(config.width, outputs)
        draw_weights(self, config.init_range)

    def forward(self, packed: Packed, noise: Noise | None = None) -> Tensor:
        """Return [B, C] from packed ids."""
        hidden = self.bert(packed, noise)
        # Under a causal mask [CLS] sees itself only, and the last token sees all.
        causal = self.config.attention == "causal"
        places = packed.boundaries[1:].long() - 1 if causal else packed.starts
        pooled = self.pooler(hidden.index_select(0, places))
        outputs: Tensor = self.output(self.dropout(pooled, noise))
        return outputs
