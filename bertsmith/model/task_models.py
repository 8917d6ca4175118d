"""BERT with one output layer, for fine-tuning (section 3.2 and figure 4 of the paper).

All models are called with the same arguments: a packed batch, the indices of the tokens to compute
outputs for, and a dropout seed.
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
    rate = config.dropout if config.classifier_dropout is None else config.classifier_dropout
    return Dropout(rate, output_dropout_index(config))


def get_pooled_token_indices(config: ModelConfig, batch: PackedBatch) -> Tensor:
    """Return the index of the token of each sequence that the pooler reads, int64 [B]."""
    # With causal attention, only the last token attends to the full sequence.
    is_causal = config.attention == "causal"
    return batch.last_token_indices if is_causal else batch.first_token_indices


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
            token_indices: int64 [B], the index of the token to pool in each sequence. None for the
                first token, or for the last one if attention is causal.
            dropout_seed: Seed of this forward pass; None for no dropout.
        """
        if token_indices is None:
            token_indices = get_pooled_token_indices(self.config, batch)
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
        """Return the outputs.

        Args:
            batch: Packed sequences.
            token_indices: int64 [M], tokens to compute outputs for; None for all T.
            dropout_seed: Seed of this forward pass; None for no dropout.

        Returns:
            [M, C] or [T, C].
        """
        hidden = self.bert(batch, dropout_seed, token_indices)
        outputs: Tensor = self.output(self.dropout(hidden, dropout_seed))
        return outputs


class BertForQuestionAnswering(nn.Module):
    """Encoder and a linear layer with two outputs per token: start and end logits of the answer.

    As in the original run_squad.py, there is no dropout before the linear layer.
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
        """Return the start and end logits.

        Args:
            batch: Packed sequences.
            token_indices: int64 [M], tokens to compute logits for; None for all T.
            dropout_seed: Seed of this forward pass; None for no dropout.

        Returns:
            [M, 2] or [T, 2].
        """
        outputs: Tensor = self.spans(self.bert(batch, dropout_seed, token_indices))
        return outputs


TaskModel = (
    BertForSequenceClassification
    | BertForTokenClassification
    | BertForQuestionAnswering
    | BertWithBiLSTM
)
