"""BERT with one output layer, for fine-tuning (section 3.2 and figure 4 of the paper).

All models take the same arguments: a packed batch, the indices of the tokens to return outputs
for, and a dropout seed.
"""

from torch import Tensor, nn

from bertsmith.model.bert import BertModel, initialize_weights
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import output_dropout_index
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.heads import Pooler
from bertsmith.model.ops.attention_layout import Kernel
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.packed import PackedBatch


def _output_dropout(config: ModelConfig) -> Dropout:
    """Return the dropout before the output layer."""
    return Dropout(config.dropout, output_dropout_index(config))


class BertForSequenceClassification(nn.Module):
    """Encoder, pooler, dropout and a linear layer with C outputs per sequence."""

    def __init__(self, config: ModelConfig, num_outputs: int, kernel: Kernel = "padded") -> None:
        """Create the model with weights drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.pooler = Pooler(config)
        self.dropout = _output_dropout(config)
        self.output = nn.Linear(config.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self,
        batch: PackedBatch,
        token_indices: Tensor | None = None,
        dropout_seed: DropoutSeed | None = None,
    ) -> Tensor:
        """Return the outputs [B, C].

        Args:
            batch: Packed sequences.
            token_indices: int64 [B], the token to pool of each sequence. None for the first token,
                or the last if attention is causal.
            dropout_seed: Seed of this forward pass; None for no dropout.
        """
        if token_indices is None:
            # With causal attention only the last token sees the whole sequence.
            causal = self.config.attention == "causal"
            token_indices = batch.cu_seqlens[1:].long() - 1 if causal else batch.first_token_indices
        pooled = self.pooler(self.bert(batch, dropout_seed, token_indices))
        outputs: Tensor = self.output(self.dropout(pooled, dropout_seed))
        return outputs


class BertForTokenClassification(nn.Module):
    """Encoder, dropout and a linear layer with C outputs per token."""

    def __init__(self, config: ModelConfig, num_outputs: int, kernel: Kernel = "padded") -> None:
        """Create the model with weights drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.dropout = _output_dropout(config)
        self.output = nn.Linear(config.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self,
        batch: PackedBatch,
        token_indices: Tensor | None = None,
        dropout_seed: DropoutSeed | None = None,
    ) -> Tensor:
        """Return outputs [M, C] for ``token_indices`` (int64 [M]), or [T, C] for all tokens."""
        hidden = self.bert(batch, dropout_seed, token_indices)
        outputs: Tensor = self.output(self.dropout(hidden, dropout_seed))
        return outputs


class BertForQuestionAnswering(nn.Module):
    """Encoder and a linear layer: start and end logits of the answer span for each token.

    There is no dropout before the linear layer, as in the original run_squad.py.
    """

    def __init__(
        self, config: ModelConfig, num_outputs: int = 2, kernel: Kernel = "padded"
    ) -> None:
        """Create the model with weights drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.spans = nn.Linear(config.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self,
        batch: PackedBatch,
        token_indices: Tensor | None = None,
        dropout_seed: DropoutSeed | None = None,
    ) -> Tensor:
        """Return logits [M, 2] for ``token_indices`` (int64 [M]), or [T, 2] for all tokens."""
        outputs: Tensor = self.spans(self.bert(batch, dropout_seed, token_indices))
        return outputs


TaskModel = (
    BertForSequenceClassification
    | BertForTokenClassification
    | BertForQuestionAnswering
    | BertWithBiLSTM
)
