"""Output heads for pre-training: masked LM, pooler and next-sentence prediction."""

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.activations import ACTIVATIONS
from bertsmith.model.ops.linear import Linear


class MLMHead(nn.Module):
    """Masked-LM head: hidden states [P, D] -> vocabulary logits [P, V].

    A transform (linear layer, activation and LayerNorm) is followed by a decoder: a linear layer
    with a bias, whose weight is the word embedding table (section 3.1, task 1, of the paper;
    get_masked_lm_output in the original code).
    """

    def __init__(self, config: ModelConfig, word_embeddings: nn.Embedding) -> None:
        """Create the head.

        Args:
            config: Sizes and architecture.
            word_embeddings: The word embeddings, whose weight the decoder shares.
        """
        super().__init__()
        self.transform = Linear(config.width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.decoder = Linear(config.width, config.vocab_size)
        self.decoder.weight = word_embeddings.weight

    @torch.no_grad()
    def init_bias_from_counts(self, counts: Tensor) -> None:
        """Set the decoder bias to the log frequency of each token.

        The masked-LM loss then starts at the unigram entropy instead of log V.

        Args:
            counts: [V], number of occurrences of each token; 0 is replaced by 0.5.
        """
        smoothed_counts = counts.to(self.decoder.bias).clamp(min=0.5)
        self.decoder.bias.copy_((smoothed_counts / smoothed_counts.sum()).log())

    def apply_transform(self, hidden: Tensor) -> Tensor:
        """Apply the transform, whose output is the decoder's input: [P, D] -> [P, D]."""
        output: Tensor = self.norm(self.activation(self.transform(hidden)))
        return output

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits: [P, D] -> [P, V]."""
        logits: Tensor = self.decoder(self.apply_transform(hidden))
        return logits


class Pooler(nn.Module):
    """tanh(linear(x)) of the hidden state of one token per sequence: [B, D] -> [B, D]."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the D x D linear layer."""
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the pooled output: [B, D] -> [B, D]."""
        return torch.tanh(self.dense(hidden))


class NSPHead(nn.Module):
    """Next-sentence head: pooled output [B, D] -> logits [B, 2].

    Class 0 means that segment B follows segment A.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Create the D x 2 linear layer."""
        super().__init__()
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return the logits: [B, D] -> [B, 2]."""
        logits: Tensor = self.classifier(pooled)
        return logits
