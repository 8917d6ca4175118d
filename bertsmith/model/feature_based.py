"""An encoder whose hidden states feed a BiLSTM, frozen (section 5.3) or learning with it.

It never knows what the outputs mean.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from bertsmith.model.attention import Kernel
from bertsmith.model.bert import BertModel, initialize_weights
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.encoder import DROPOUTS_PER_LAYER
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.packed import PackedBatch


def hidden_state_indices(features: FeatureSettings, layers: int) -> range:
    """Return which hidden states are used: 0 are the embeddings, ``layers`` the last layer's.

    Raises ValueError if the model has fewer than four layers where four are asked for.
    """
    last = layers + 1
    if features.layers.endswith("last-four") and layers < 4:
        raise ValueError(f"features.layers is {features.layers!r}, but the model has {layers}")
    return {
        "embeddings": range(1),
        "second-to-last": range(layers - 1, layers),
        "last": range(layers, last),
        "weighted-sum-last-four": range(layers - 3, last),
        "concat-last-four": range(layers - 3, last),
        "weighted-sum-all": range(1, last),
    }[features.layers]


class BertWithBiLSTM(nn.Module):
    """Encoder, chosen layers, a two-layer BiLSTM and one Linear.

    A weighted sum has a learnt weight for each layer, by softmax, and a learnt scale (Peters et al.
    2018, equation 1). Whole sequences are read off the last states of both directions.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_outputs: int,
        features: FeatureSettings,
        *,
        is_sequence_level: bool,
        kernel: Kernel = "padded",
    ) -> None:
        """``num_outputs`` is C; ``is_sequence_level``: one answer a sequence, else one for each place."""
        super().__init__()
        self.config, self.features, self.whole = config, features, is_sequence_level
        self.states = hidden_state_indices(features, config.layers)
        self.bert = BertModel(config, kernel)
        self.bert.requires_grad_(not features.frozen)
        # What nobody reads learns nothing.
        for layer in list(self.bert.encoder.layers)[self.states[-1] :]:
            layer.requires_grad_(False)
        if self.states[-1] < config.layers:
            self.bert.encoder.norm.requires_grad_(False)
        summed = features.layers.startswith("weighted-sum")
        self.layer_weights = nn.Parameter(torch.zeros(len(self.states))) if summed else None
        self.layer_scale = nn.Parameter(torch.ones(1)) if summed else None
        size = config.width * (1 if summed else len(self.states))
        # After those of the embeddings (0) and the layers.
        site = 1 + config.layers * DROPOUTS_PER_LAYER
        self.dropout = Dropout(features.dropout, site)
        self.lstm = nn.LSTM(size, features.width, num_layers=2, bidirectional=True)
        self.last_dropout = Dropout(features.dropout, site + 1)
        self.output = nn.Linear(2 * features.width, num_outputs)
        initialize_weights(self, config.init_range)

    def forward(
        self, packed: PackedBatch, places: Tensor | None = None, noise: DropoutSeed | None = None
    ) -> Tensor:
        """Return [B, C] for whole sequences, else [M, C] for ``places``, int64 [M] of T tokens."""
        mixed = self.dropout(self._mixed(packed, noise), noise)
        lengths = packed.cu_seqlens.diff().tolist()
        found, (last, _) = self.lstm(pack_sequence(mixed.split(lengths), enforce_sorted=False))
        if self.whole:
            asked = torch.cat([last[-2], last[-1]], -1)
        else:
            asked = torch.cat(unpack_sequence(found))
            asked = asked if places is None else asked.index_select(0, places)
        outputs: Tensor = self.output(self.last_dropout(asked, noise))
        return outputs

    def _mixed(self, packed: PackedBatch, noise: DropoutSeed | None = None) -> Tensor:
        """Return what the BiLSTM reads, [T, D] or [T, 4 D]. No layer above the last is computed."""
        learns = torch.is_grad_enabled() and not self.features.frozen
        # A frozen encoder gives the same features every time: nothing is dropped in it.
        own = None if self.features.frozen else noise
        with torch.set_grad_enabled(learns):
            found = []
            for number, state in enumerate(self.bert.hidden_states(packed, own)):
                if number in self.states:
                    found.append(state)
                if number == self.states[-1]:
                    break
        if self.layer_weights is None or self.layer_scale is None:
            return torch.cat(found, -1)
        shares = self.layer_weights.softmax(-1)
        return self.layer_scale * (torch.stack(found, -1) @ shares)
