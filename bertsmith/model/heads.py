"""What stands on the encoder while it is pre-trained: masked LM, pooler, next sentence.

It never knows how the encoder made its hidden states.
"""

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.activations import ACTIVATIONS
from bertsmith.model.ops.linear import Linear


class MLMHead(nn.Module):
    """Predict words from hidden states: [P, D] -> [P, V].

    A transform (Linear, activation, LayerNorm), then the word embeddings themselves as output
    weights, with a bias of their own (section 3.1, task 1; the original's get_masked_lm_output).
    """

    def __init__(self, config: ModelConfig, words: nn.Embedding) -> None:
        """``words`` is the embedding table whose weight is the decoder's too."""
        super().__init__()
        self.transform = Linear(config.width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.decoder = Linear(config.width, config.vocab_size)
        self.decoder.weight = words.weight

    @torch.no_grad()
    def start_at(self, counts: Tensor) -> None:
        """Set the output bias to the log of the words' shares, from how often each occurs [V].

        A head that has learnt nothing else then starts at the unigram entropy, not at log V.
        Words that never occur count as half a one.
        """
        shares = counts.to(self.decoder.bias).clamp(min=0.5)
        self.decoder.bias.copy_((shares / shares.sum()).log())

    def features(self, hidden: Tensor) -> Tensor:
        """Return what the decoder multiplies: [P, D] -> [P, D]."""
        normed: Tensor = self.norm(self.activation(self.transform(hidden)))
        return normed

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [P, V]."""
        logits: Tensor = self.decoder(self.features(hidden))
        return logits


class Pooler(nn.Module):
    """tanh(Linear) of each sequence's first token: [B, D] -> [B, D]."""

    def __init__(self, config: ModelConfig) -> None:
        """One D x D Linear."""
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, first: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return torch.tanh(self.dense(first))


class NSPHead(nn.Module):
    """Tell whether B follows A: pooled [B, D] -> [B, 2]; label 0 says that it does."""

    def __init__(self, config: ModelConfig) -> None:
        """One D x 2 Linear."""
        super().__init__()
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        """[B, D] -> [B, 2]."""
        logits: Tensor = self.classifier(pooled)
        return logits
