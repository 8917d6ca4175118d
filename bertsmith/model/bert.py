"""BERT: embeddings, encoder and the pre-training heads, and the two losses.

It never knows of text, files or optimizers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.attention import Kernel, build_layout
from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import Embeddings, sinusoidal_positions
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MLMHead, NSPHead, Pooler
from bertsmith.model.ops.cross_entropy import MAX_CHUNK_LOGITS, linear_cross_entropy
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.ops.norms import BatchNorm
from bertsmith.model.packed import PackedBatch


class BertModel(nn.Module):
    """The encoder: packed ids -> hidden states [T, D]."""

    def __init__(self, config: ModelConfig, kernel: Kernel = "padded") -> None:
        """``kernel`` chooses how attention is computed; it can be changed at any time."""
        super().__init__()
        self.config = config
        self.kernel: Kernel = kernel
        self.embeddings = Embeddings(config, dropout_index=0)
        self.encoder = Encoder(config, first_site=1)

    def hidden_states(
        self,
        packed: PackedBatch,
        noise: DropoutSeed | None = None,
        places: Tensor | None = None,
        depth: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield [T, D] for the embeddings, then for layer after layer, computed as asked for.

        ``depth``: how many layers there are to be, None for all. ``places``, int64 [M]: what is
        asked of the last of those, whose output is then [M, D].
        """
        x = self.embeddings(packed, noise)
        causal = self.config.attention == "causal"
        where = build_layout(packed, self.kernel, causal=causal, dtype=x.dtype)
        yield x
        yield from self.encoder.each(x, where, noise, places, depth)

    def forward(
        self, packed: PackedBatch, noise: DropoutSeed | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Return the last layer's hidden states [T, D], or those [M, D] at ``places``."""
        states = self.hidden_states(packed, noise, places)
        hidden = next(states)
        for hidden in states:  # noqa: B007 - one at a time, so that no earlier one is kept
            pass
        return hidden


@dataclass(frozen=True)
class Losses:
    """Sums, not means, so that accumulation and ragged batches are exact.

    mlm_loss: float32 [], summed over P predictions. next_sentence: float32 [], summed over B
    sequences, or None. masked_hits, next_hits: int64 [], how many the model got right; None in
    training, where nobody asks.
    """

    mlm_loss: Tensor
    nsp_loss: Tensor | None
    mlm_correct: Tensor | None = None
    nsp_correct: Tensor | None = None


class BertForPreTraining(nn.Module):
    """BERT with the masked-LM head and, where the config says so, pooler and next-sentence head."""

    def __init__(self, config: ModelConfig, kernel: Kernel = "padded") -> None:
        """Weights are drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.mlm = MLMHead(config, self.bert.embeddings.words)
        self.pooler = Pooler(config) if config.nsp else None
        self.nsp = NSPHead(config) if config.nsp else None
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw all weights anew; see ``initialize_weights``."""
        initialize_weights(self, self.config.init_range)
        table = self.bert.embeddings
        if table.fixed_positions:
            # As large as the words beside them (Vaswani et al. scale the words up instead): a
            # sinusoid's root mean square is 1 / sqrt 2.
            own = sinusoidal_positions(*table.positions.weight.shape)
            table.positions.weight.copy_(own * self.config.init_range * 2**0.5)

    def next_sentence_logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        """Return [B, 2] from hidden states [T, D]; ValueError if the model has no such head."""
        return self._pair_logits(hidden.index_select(0, packed.first_token_indices))

    def forward(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        nsp_labels: Tensor | None,
        noise: DropoutSeed | None = None,
    ) -> Losses:
        """Return the losses of a batch.

        masked_positions, masked_labels: int64 [P], where words are predicted and which.
        nsp_labels: int64 [B], 0 where B follows A; None leaves the next sentence out.
        """
        words, first = self._asked(packed, masked_positions, nsp_labels, noise)
        decoder = self.mlm.decoder
        masked = linear_cross_entropy(
            self.mlm.features(words), decoder.weight, decoder.bias, masked_labels
        )
        if nsp_labels is None:
            return Losses(masked, None)
        logits = self._pair_logits(first).float()
        return Losses(masked, F.cross_entropy(logits, nsp_labels, reduction="sum"))

    def _asked(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        not_next: Tensor | None,
        noise: DropoutSeed | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states that a loss is asked of: [P, D] masked, and [B, D] first ones.

        The last layer is computed for no other token. Without pairs there are no first ones.
        """
        predictions = masked_positions.shape[0]
        places = masked_positions
        if not_next is not None:
            places = torch.cat([masked_positions, packed.first_token_indices])
        hidden = self.bert(packed, noise, places)
        return hidden[:predictions], hidden[predictions:]

    def _pair_logits(self, first: Tensor) -> Tensor:
        if self.pooler is None or self.nsp is None:
            raise ValueError("this model has no next-sentence head (its config says nsp = false)")
        logits: Tensor = self.nsp(self.pooler(first))
        return logits

    @torch.no_grad()
    def evaluate(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        nsp_labels: Tensor | None,
    ) -> Losses:
        """Return the losses and the hits of a batch; arguments as for ``forward``."""
        words, first = self._asked(packed, masked_positions, nsp_labels)
        masked, hits = self._judged(words, masked_labels)
        if nsp_labels is None:
            return Losses(masked, None, hits, None)
        scores = self._pair_logits(first).float()
        loss = F.cross_entropy(scores, nsp_labels, reduction="sum")
        return Losses(masked, loss, hits, (scores.argmax(-1) == nsp_labels).sum())

    def _judged(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the hits of P predictions, some rows at a time.

        All P x V logits at once can be gigabytes, with copies: left to right, P is all tokens.
        """
        rows = max(1, MAX_CHUNK_LOGITS // self.config.vocab_size)
        losses, hits = [], []
        for part, own in zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True):
            logits = self.mlm(part).float()
            losses.append(F.cross_entropy(logits, own, reduction="sum"))
            hits.append((logits.argmax(-1) == own).sum())
        return torch.stack(losses).sum(), torch.stack(hits).sum()


@torch.no_grad()
def initialize_weights(model: nn.Module, spread: float) -> None:
    """Draw all weights of a module anew, as the original does (its create_initializer).

    A normal of deviation ``spread`` cut off at two deviations; biases 0, LayerNorm 1 and 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=spread, a=-2 * spread, b=2 * spread)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm | BatchNorm):
            module.reset_parameters()


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
