"""BERT with a BiLSTM on its hidden states; BERT is frozen (section 5.3 of the paper) or trained."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from bertsmith.model.bert import BertModel, initialize_weights
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.encoder import output_dropout_index
from bertsmith.model.ops.attention_layout import Kernel
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.packed import PackedBatch
from bertsmith.plurals import count_noun


def hidden_state_indices(features: BiLSTMSettings, num_layers: int) -> range:
    """Return the indices of the hidden states that the BiLSTM reads.

    Index 0 is the output of the embeddings, and index i the output of layer i, counted from 1.

    Raises:
        ValueError: If the last four layers are requested, but the model has fewer than four.
    """
    end = num_layers + 1
    if features.layers.endswith("last-four") and num_layers < 4:
        raise ValueError(
            f"features.layers is {features.layers!r}, but the model has "
            f"{count_noun(num_layers, 'layer')}; choose 'last' or a model with at least 4 layers"
        )
    return {
        "embeddings": range(1),
        "second-to-last": range(num_layers - 1, num_layers),
        "last": range(num_layers, end),
        "weighted-sum-last-four": range(num_layers - 3, end),
        "concat-last-four": range(num_layers - 3, end),
        "weighted-sum-all": range(1, end),
    }[features.layers]


class BertWithBiLSTM(nn.Module):
    """BERT, a two-layer BiLSTM that reads its hidden states, and a linear output layer.

    A weighted sum of hidden states has learned weights: a softmax, multiplied by a scale (Peters et
    al. 2018, equation 1). Sequence-level outputs use the final LSTM states of both directions.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_outputs: int,
        features: BiLSTMSettings,
        *,
        is_sequence_level: bool,
        kernel: Kernel = "padded",
    ) -> None:
        """Create the model.

        Args:
            config: Sizes and architecture of the encoder.
            num_outputs: C.
            features: Settings of the BiLSTM, including the hidden states that it reads.
            is_sequence_level: Whether the model returns C outputs for each sequence; otherwise it
                returns C outputs for each token.
            kernel: Attention kernel.
        """
        super().__init__()
        self.config = config
        self.features = features
        self.is_sequence_level = is_sequence_level
        self.state_indices = hidden_state_indices(features, config.layers)
        self.bert = BertModel(config, kernel)
        if features.frozen:
            self.bert.requires_grad_(False)
        # The layers after the last one that the BiLSTM reads are never computed.
        num_computed_layers = self.state_indices[-1]
        for layer in list(self.bert.encoder.layers)[num_computed_layers:]:
            layer.requires_grad_(False)
        if num_computed_layers < config.layers:
            self.bert.encoder.norm.requires_grad_(False)
        is_weighted_sum = features.layers.startswith("weighted-sum")
        self.layer_weights = (
            nn.Parameter(torch.zeros(len(self.state_indices))) if is_weighted_sum else None
        )
        self.layer_scale = nn.Parameter(torch.ones(1)) if is_weighted_sum else None
        input_width = config.width * (1 if is_weighted_sum else len(self.state_indices))
        dropout_index = output_dropout_index(config)
        self.dropout = Dropout(features.dropout, dropout_index)
        self.lstm = nn.LSTM(input_width, features.width, num_layers=2, bidirectional=True)
        self.last_dropout = Dropout(features.dropout, dropout_index + 1)
        self.output = nn.Linear(2 * features.width, num_outputs)
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
            token_indices: int64 [M], tokens to compute outputs for; None for all T. Ignored by
                sequence-level models.
            dropout_seed: Seed of this forward pass; None for no dropout.

        Returns:
            [B, C] for a sequence-level model, otherwise [M, C] or [T, C].
        """
        inputs = self.dropout(self._compute_lstm_inputs(batch, dropout_seed), dropout_seed)
        sequences = inputs.split(batch.cu_seqlens.diff().tolist())
        states, (final_states, _) = self.lstm(pack_sequence(sequences, enforce_sorted=False))
        if self.is_sequence_level:
            # The last LSTM layer's final states of the forward and the backward direction.
            hidden = torch.cat([final_states[-2], final_states[-1]], -1)
        else:
            hidden = torch.cat(unpack_sequence(states))
            if token_indices is not None:
                hidden = hidden.index_select(0, token_indices)
        outputs: Tensor = self.output(self.last_dropout(hidden, dropout_seed))
        return outputs

    def _compute_lstm_inputs(
        self, batch: PackedBatch, dropout_seed: DropoutSeed | None = None
    ) -> Tensor:
        """Return the inputs of the BiLSTM: [T, 4 D] for "concat-last-four", otherwise [T, D]."""
        trains_encoder = torch.is_grad_enabled() and not self.features.frozen
        # A frozen encoder runs without dropout, so that its outputs are the same in each epoch.
        encoder_seed = None if self.features.frozen else dropout_seed
        with torch.set_grad_enabled(trains_encoder):
            states = []
            for index, state in enumerate(self.bert.iter_hidden_states(batch, encoder_seed)):
                if index in self.state_indices:
                    states.append(self.bert.cast_output(state))
                # Hidden states are computed lazily, so the layers after this one are not computed.
                if index == self.state_indices[-1]:
                    break
        if self.layer_weights is None or self.layer_scale is None:
            return torch.cat(states, -1)
        weights = self.layer_weights.softmax(-1)
        return self.layer_scale * (torch.stack(states, -1) @ weights)
