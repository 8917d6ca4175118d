"""BERT with pooling: one vector per text, for training sentence embeddings.

Pooling modes and the modules after pooling are those of sentence-transformers. W is the width of
the vectors.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.bert import BertModel
from bertsmith.model.denoising_decoder import DenoisingDecoder
from bertsmith.model.ops.cross_entropy import to_full_precision
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch
from bertsmith.model.pooling import pool_tokens

#: Name of an activation function of a Dense module in sentence-transformers -> the function.
DENSE_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}


class DenseLayer(nn.Module):
    """A linear layer with an activation function, after pooling."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        """Create the layer.

        Args:
            weight: float32 [out, in].
            bias: float32 [out], or None.
            activation: A key of ``DENSE_ACTIVATIONS``.
        """
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [B, in] -> [B, out]."""
        return DENSE_ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


class BertForSentenceEmbedding(nn.Module):
    """Encoder, pooling, and optional linear layers and normalization: a vector for each text."""

    def __init__(
        self,
        bert: BertModel,
        modes: Sequence[str],
        post_modules: Sequence[DenseLayer | Literal["normalize"]],
    ) -> None:
        """Create the model.

        Args:
            bert: The encoder.
            modes: Pooling modes. The pooled vectors of all modes are concatenated.
            post_modules: Modules after pooling, in order.
        """
        super().__init__()
        self.config = bert.config
        self.bert = bert
        self.modes = tuple(modes)
        self.dense = nn.ModuleList(
            module for module in post_modules if isinstance(module, DenseLayer)
        )
        #: Reconstructs texts in training with TSDAE; None otherwise.
        self.decoder: DenoisingDecoder | None = None
        self._post_modules = [
            module if isinstance(module, str) else "dense" for module in post_modules
        ]

    @property
    def reads_single_token(self) -> bool:
        """Whether pooling reads a single token of each text."""
        return self.modes in {("cls",), ("lasttoken",)}

    def forward(
        self,
        batch: PackedBatch,
        dropout_seed: DropoutSeed | None = None,
        *,
        normalize: bool = True,
    ) -> Tensor:
        """Return the vectors, [B, W]: float32, or float64 if the weights are float64.

        Args:
            batch: Packed texts.
            dropout_seed: Seed of this forward pass; None for no dropout.
            normalize: Whether to apply normalization, if the model has it.
        """
        token_indices = None
        if self.reads_single_token:
            is_first = self.modes == ("cls",)
            token_indices = batch.first_token_indices if is_first else batch.last_token_indices
        states = to_full_precision(self.bert(batch, dropout_seed, token_indices))
        if token_indices is None:
            states = pool_tokens(states, batch, self.modes)
        dense_layers = iter(self.dense)
        for module in self._post_modules:
            if module == "dense":
                states = next(dense_layers)(states)
            elif normalize:
                states = F.normalize(states, dim=-1)
        return states
