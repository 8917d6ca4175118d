"""The encoder with one output layer, as it is fine-tuned (section 3.2 and figure 4 of the paper).

It never knows what the outputs mean. The three models are called alike: packed ids, and the places
of the tokens that are asked about; what a model asks by itself needs no places.
"""

from torch import Tensor, nn

from bertsmith.model.attention import Kernel
from bertsmith.model.bert import BertModel, initialize_weights
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import DROPOUTS_PER_LAYER
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.heads import Pooler
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.packed import PackedBatch


def _last_dropout(config: ModelConfig) -> Dropout:
    """Return the dropout before the output layer: its site comes after those of the layers."""
    return Dropout(config.dropout, 1 + config.layers * DROPOUTS_PER_LAYER)


class BertForSequenceClassification(nn.Module):
    """Encoder, pooler, dropout and one Linear: C outputs a sequence."""

    def __init__(self, config: ModelConfig, num_outputs: int, kernel: Kernel = "padded") -> None:
        """``num_outputs`` is C. Weights are drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.pooler = Pooler(config)
        self.dropout = _last_dropout(config)
        self.output = nn.Linear(config.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self, packed: PackedBatch, places: Tensor | None = None, noise: DropoutSeed | None = None
    ) -> Tensor:
        """Return [B, C] from packed ids; ``places``, int64 [B], stand in for the first tokens."""
        if places is None:
            # Under a causal mask [CLS] sees itself only, and the last token sees all.
            causal = self.config.attention == "causal"
            places = packed.cu_seqlens[1:].long() - 1 if causal else packed.first_token_indices
        pooled = self.pooler(self.bert(packed, noise, places))
        outputs: Tensor = self.output(self.dropout(pooled, noise))
        return outputs


class BertForTokenClassification(nn.Module):
    """Encoder, dropout and one Linear: C outputs for each token that is asked about."""

    def __init__(self, config: ModelConfig, num_outputs: int, kernel: Kernel = "padded") -> None:
        """``num_outputs`` is C. Weights are drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.dropout = _last_dropout(config)
        self.output = nn.Linear(config.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self, packed: PackedBatch, places: Tensor | None = None, noise: DropoutSeed | None = None
    ) -> Tensor:
        """Return [M, C] for ``places``, int64 [M] of the T tokens; else for all T."""
        asked = self.bert(packed, noise, places)
        outputs: Tensor = self.output(self.dropout(asked, noise))
        return outputs


class BertForQuestionAnswering(nn.Module):
    """Encoder and one Linear: for each token how well an answer starts, and ends, there.

    No dropout stands before the Linear, as in the original's run_squad.py.
    """

    def __init__(
        self, config: ModelConfig, num_outputs: int = 2, kernel: Kernel = "padded"
    ) -> None:
        """``num_outputs`` is 2. Weights are drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.spans = nn.Linear(config.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self, packed: PackedBatch, places: Tensor | None = None, noise: DropoutSeed | None = None
    ) -> Tensor:
        """Return [M, 2] for ``places``, int64 [M] of the T tokens; else for all T."""
        outputs: Tensor = self.spans(self.bert(packed, noise, places))
        return outputs


TaskModel = (
    BertForSequenceClassification
    | BertForTokenClassification
    | BertForQuestionAnswering
    | BertWithBiLSTM
)
