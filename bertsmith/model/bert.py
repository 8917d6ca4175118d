"""BERT's encoder, and the pre-training model with its two heads and losses."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import Embeddings
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MLMHead, NSPHead, Pooler
from bertsmith.model.ops.attention_layout import Kernel, build_attention_layout
from bertsmith.model.ops.cross_entropy import (
    MAX_CHUNK_LOGITS,
    linear_cross_entropy,
    to_full_precision,
)
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.ops.neighbor_bias import add_neighbor_bias
from bertsmith.model.ops.norms import BatchNorm
from bertsmith.model.packed import PackedBatch


class BertModel(nn.Module):
    """Embeddings and encoder: packed token ids [T] -> hidden states [T, D]."""

    def __init__(self, config: ModelConfig, kernel: Kernel = "padded") -> None:
        """Create the model.

        Args:
            config: Sizes and architecture.
            kernel: Attention kernel; the attribute ``kernel`` may be changed at any time.
        """
        super().__init__()
        self.config = config
        self.kernel: Kernel = kernel
        #: Dtype of the hidden states for heads; None for the dtype of the encoder. A 16-bit encoder
        #: can have float32 heads.
        self.output_dtype: torch.dtype | None = None
        #: Dtype of the residual stream; None for the dtype of the embeddings, which is float32 in
        #: mixed precision. In 16 bits, norms still compute in float32.
        self.residual_dtype: torch.dtype | None = None
        #: Number of layers, from the first one, to which ``neighbor_bias`` does not apply.
        self.num_unbiased_layers = 0
        self.embeddings = Embeddings(config, dropout_index=0)
        self.encoder = Encoder(config, first_dropout_index=1)

    def iter_hidden_states(
        self,
        batch: PackedBatch,
        dropout_seed: DropoutSeed | None = None,
        token_indices: Tensor | None = None,
        num_layers: int | None = None,
        *,
        is_causal: bool = False,
        neighbor_bias: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the output of the embeddings and of each layer, [T, D], computed lazily.

        Args:
            batch: Packed sequences.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to compute the last yielded output for; its shape is
                then [M, D]. None for all T.
            num_layers: Number of layers to compute; None for all.
            is_causal: Whether tokens attend only to themselves and earlier tokens, even if the
                config says that attention is bidirectional.
            neighbor_bias: float32 [], strength of a bias of the attention towards neighboring
                tokens, see ``build_neighbor_bias``; None for no bias.
        """
        x = self.embeddings(batch, dropout_seed)
        if self.residual_dtype is not None:
            x = x.to(self.residual_dtype)
        is_causal = is_causal or self.config.attention == "causal"
        if self.num_unbiased_layers >= self.config.layers:
            neighbor_bias = None
        kernel = self.kernel
        if kernel == "varlen" and neighbor_bias is not None:
            # Flash attention adds no bias to the scores.
            kernel = "padded"
        layout = build_attention_layout(batch, kernel, is_causal=is_causal, dtype=x.dtype)
        layouts = [layout] * self.config.layers
        if neighbor_bias is not None:
            layout = add_neighbor_bias(layout, neighbor_bias, self.config.heads, x.dtype)
            num_biased_layers = self.config.layers - self.num_unbiased_layers
            layouts[self.num_unbiased_layers :] = [layout] * num_biased_layers
        yield x
        yield from self.encoder.iter_layer_outputs(
            x, layouts, dropout_seed, token_indices, num_layers
        )

    def forward(
        self,
        batch: PackedBatch,
        dropout_seed: DropoutSeed | None = None,
        token_indices: Tensor | None = None,
        *,
        is_causal: bool = False,
        neighbor_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the last layer's output.

        Args:
            batch: Packed sequences.
            dropout_seed: Seed of this forward pass; None for no dropout.
            token_indices: int64 [M], tokens to return the hidden states of; None for all T.
            is_causal: See ``iter_hidden_states``.
            neighbor_bias: See ``iter_hidden_states``.

        Returns:
            [T, D] or [M, D].
        """
        states = self.iter_hidden_states(
            batch, dropout_seed, token_indices, is_causal=is_causal, neighbor_bias=neighbor_bias
        )
        hidden = next(states)
        # A loop, because a list would keep the outputs of all layers in memory.
        for hidden in states:  # noqa: B007 - used after the loop
            pass
        return self.cast_output(hidden)

    def cast_output(self, hidden: Tensor) -> Tensor:
        """Convert hidden states of any shape to ``output_dtype``."""
        return hidden if self.output_dtype is None else hidden.to(self.output_dtype)


@dataclass(frozen=True)
class Losses:
    """Summed pre-training losses of a batch, and the number of correct predictions.

    For the mean losses of a step, add the losses of its micro-batches, and divide them by the total
    number of masked tokens or of sequences.

    Attributes:
        mlm_loss: float32 [], masked-LM loss summed over the P masked tokens.
        nsp_loss: float32 [], next-sentence loss summed over the B sequences; None without NSP.
        mlm_correct: int64 [], number of correctly predicted tokens. Only ``evaluate`` counts them;
            ``forward`` returns None.
        nsp_correct: int64 [], number of correctly classified pairs. Only ``evaluate`` counts them;
            ``forward`` returns None.
    """

    mlm_loss: Tensor
    nsp_loss: Tensor | None
    mlm_correct: Tensor | None = None
    nsp_correct: Tensor | None = None


class BertForPreTraining(nn.Module):
    """BERT with a masked-LM head and, if ``config.nsp``, a pooler and a next-sentence head."""

    def __init__(self, config: ModelConfig, kernel: Kernel = "padded") -> None:
        """Create the model with weights drawn from PyTorch's default generator."""
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernel)
        self.mlm = MLMHead(config, self.bert.embeddings.words)
        self.pooler = Pooler(config) if config.nsp else None
        self.nsp = NSPHead(config) if config.nsp else None
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialize all weights, drawn from PyTorch's default generator."""
        initialize_weights(self, self.config.init_range)
        if self.bert.embeddings.has_fixed_positions:
            self.bert.embeddings.set_sinusoidal_positions(self.config.init_range)

    def compute_nsp_logits(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Return next-sentence logits [B, 2] from the last hidden states [T, D].

        Raises:
            ValueError: If the model has no next-sentence head.
        """
        return self._apply_nsp_head(hidden.index_select(0, batch.first_token_indices))

    def forward(
        self,
        batch: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        nsp_labels: Tensor | None,
        dropout_seed: DropoutSeed | None = None,
        *,
        is_causal: bool = False,
        neighbor_bias: Tensor | None = None,
    ) -> Losses:
        """Compute the pre-training losses.

        Args:
            batch: Packed sequences.
            masked_positions: int64 [P], indices in 0..T-1 of the tokens that predict a token.
            masked_labels: int64 [P], ids to predict: the original ids of masked tokens, or the
                ids of the next tokens.
            nsp_labels: int64 [B], 0 if segment B follows segment A, else 1; None skips the
                next-sentence loss.
            dropout_seed: Seed of this forward pass; None for no dropout.
            is_causal: Whether attention is causal in this forward pass, even if the config says
                that it is bidirectional.
            neighbor_bias: float32 [], strength of a bias of the attention towards neighboring
                tokens in this forward pass, see ``build_neighbor_bias``; None for no bias.
        """
        masked_states, cls_states = self._compute_loss_inputs(
            batch,
            masked_positions,
            nsp_labels,
            dropout_seed,
            is_causal=is_causal,
            neighbor_bias=neighbor_bias,
        )
        decoder = self.mlm.decoder
        mlm_loss = linear_cross_entropy(
            self.mlm.apply_transform(masked_states), decoder.weight, decoder.bias, masked_labels
        )
        if nsp_labels is None:
            return Losses(mlm_loss, None)
        nsp_logits = to_full_precision(self._apply_nsp_head(cls_states))
        return Losses(mlm_loss, F.cross_entropy(nsp_logits, nsp_labels, reduction="sum"))

    def _compute_loss_inputs(
        self,
        batch: PackedBatch,
        masked_positions: Tensor,
        nsp_labels: Tensor | None,
        dropout_seed: DropoutSeed | None = None,
        *,
        is_causal: bool = False,
        neighbor_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the last hidden states of only the tokens that the losses need.

        Returns:
            Hidden states of the masked tokens, [P, D], and of the [CLS] tokens, [B, D]. The latter
            are [0, D] if ``nsp_labels`` is None.
        """
        num_predictions = masked_positions.shape[0]
        token_indices = masked_positions
        if nsp_labels is not None:
            token_indices = torch.cat([masked_positions, batch.first_token_indices])
        hidden = self.bert(
            batch, dropout_seed, token_indices, is_causal=is_causal, neighbor_bias=neighbor_bias
        )
        return hidden[:num_predictions], hidden[num_predictions:]

    def _apply_nsp_head(self, cls_states: Tensor) -> Tensor:
        """Return next-sentence logits [B, 2] from the hidden states of the [CLS] tokens, [B, D]."""
        if self.pooler is None or self.nsp is None:
            raise ValueError(
                "this model has no next-sentence head: its config has nsp = false; use a model "
                "that was pre-trained with nsp = true"
            )
        logits: Tensor = self.nsp(self.pooler(cls_states))
        return logits

    @torch.no_grad()
    def evaluate(
        self,
        batch: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        nsp_labels: Tensor | None,
    ) -> Losses:
        """Return the losses and the number of correct predictions.

        The arguments are those of ``forward`` except ``dropout_seed``: there is no dropout.
        """
        masked_states, cls_states = self._compute_loss_inputs(batch, masked_positions, nsp_labels)
        mlm_loss, mlm_correct = self._evaluate_mlm(masked_states, masked_labels)
        if nsp_labels is None:
            return Losses(mlm_loss, None, mlm_correct, None)
        nsp_logits = to_full_precision(self._apply_nsp_head(cls_states))
        nsp_loss = F.cross_entropy(nsp_logits, nsp_labels, reduction="sum")
        nsp_correct = (nsp_logits.argmax(-1) == nsp_labels).sum()
        return Losses(mlm_loss, nsp_loss, mlm_correct, nsp_correct)

    def _evaluate_mlm(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed masked-LM loss and the number of correct predictions.

        Logits are computed in chunks, because all P x V logits can take gigabytes, especially in
        left-to-right training, where P is nearly T.

        Args:
            hidden: Hidden states of the masked tokens, [P, D].
            labels: int64 [P], original ids of the masked tokens.
        """
        chunk_rows = max(1, MAX_CHUNK_LOGITS // self.config.vocab_size)
        losses, num_correct = [], []
        for hidden_chunk, label_chunk in zip(
            torch.split(hidden, chunk_rows), torch.split(labels, chunk_rows), strict=True
        ):
            logits = to_full_precision(self.mlm(hidden_chunk))
            losses.append(F.cross_entropy(logits, label_chunk, reduction="sum"))
            num_correct.append((logits.argmax(-1) == label_chunk).sum())
        return torch.stack(losses).sum(), torch.stack(num_correct).sum()


@torch.no_grad()
def initialize_weights(model: nn.Module, std: float) -> None:
    """Initialize all weights of a module as BERT's original code does (create_initializer).

    The weights of linear layers and embeddings are drawn from a normal distribution with standard
    deviation ``std``, truncated at two standard deviations. Biases become 0, and the weights of
    LayerNorm and batch norm become 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm | BatchNorm):
            module.reset_parameters()


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, counting shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
