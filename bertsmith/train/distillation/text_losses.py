"""Losses of students that read text: masked-LM targets, self-attention relations, hidden states."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch
from bertsmith.train.distillation.losses import softmax_divergence

#: Named sums of losses, each with the number of terms that the mean is over.
LossSums = dict[str, tuple[Tensor, int]]


class TextLoss(Protocol):
    """The loss of a student on packed texts."""

    def compute(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        dropout_seed: DropoutSeed | None,
    ) -> LossSums:
        """Return the summed losses of a micro-batch and their numbers of terms.

        Args:
            packed: The texts.
            masked_positions: int64 [P], the masked tokens; empty if no token is masked.
            masked_labels: int64 [P], their original ids.
            dropout_seed: Seed of the student's dropout masks; None for no dropout.
        """


class MaskedLMLoss:
    """Soft targets from the masked-LM head of the teacher (Hinton et al. 2015; DistilBERT)."""

    def __init__(
        self,
        student: BertForPreTraining,
        teacher: BertForPreTraining,
        vocab_size: int,
        temperature: float,
        hard_weight: float,
    ) -> None:
        """Create the loss.

        Args:
            student: The student.
            teacher: The teacher, in eval mode.
            vocab_size: Number of tokens of the tokenizer; further embeddings are not used.
            temperature: Divides the logits of both models.
            hard_weight: Weight of the loss on the original tokens, from 0 to 1.
        """
        self._student = student
        self._teacher = teacher
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._hard_weight = hard_weight

    def compute(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        dropout_seed: DropoutSeed | None,
    ) -> LossSums:
        """Return ``soft_loss`` and ``hard_loss``, each multiplied by its weight."""
        logits = self._compute_logits(self._student, packed, masked_positions, dropout_seed)
        count = len(masked_labels)
        losses: LossSums = {}
        if self._hard_weight < 1:
            with torch.no_grad():
                targets = self._compute_logits(self._teacher, packed, masked_positions, None)
            divergence = softmax_divergence(logits / self._temperature, targets / self._temperature)
            weight = (1 - self._hard_weight) * self._temperature**2
            losses["soft_loss"] = weight * divergence.sum(), count
        if self._hard_weight > 0:
            hard = F.cross_entropy(logits, masked_labels, reduction="sum")
            losses["hard_loss"] = self._hard_weight * hard, count
        return losses

    def _compute_logits(
        self,
        model: BertForPreTraining,
        packed: PackedBatch,
        positions: Tensor,
        dropout_seed: DropoutSeed | None,
    ) -> Tensor:
        """Return the logits at some positions, float32 [P, vocabulary of the tokenizer]."""
        logits: Tensor = model.mlm(model.bert(packed, dropout_seed, positions))
        return logits[:, : self._vocab_size].float()


class EncoderStudent(nn.Module):
    """An encoder and, if its width is not that of the teacher, a projection to that width."""

    def __init__(self, bert: BertModel, projection_width: int | None = None) -> None:
        """Create the module.

        Args:
            bert: The encoder.
            projection_width: Output width of a linear layer for hidden states; None for no layer.
        """
        super().__init__()
        self.config = bert.config
        self.bert = bert
        self.projection = None
        if projection_width is not None:
            self.projection = nn.Linear(bert.config.width, projection_width)

    def project(self, hidden: Tensor) -> Tensor:
        """Apply the projection, if there is one: [T, D] -> [T, width of the teacher]."""
        return hidden if self.projection is None else self.projection(hidden)


class HiddenStateLoss:
    """Squared error of hidden states (TinyBERT, Jiao et al. 2020, arXiv:1909.10351)."""

    def __init__(self, student: EncoderStudent, teacher: BertModel) -> None:
        """Create the loss; layer i of the student learns layer ceil(i L / l) of the teacher."""
        self._student = student
        self._teacher = teacher
        num_layers, num_teacher_layers = student.config.layers, teacher.config.layers
        self._teacher_layers = [
            math.ceil(layer * num_teacher_layers / num_layers) for layer in range(1, num_layers + 1)
        ]

    def compute(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        dropout_seed: DropoutSeed | None,
    ) -> LossSums:
        """Return ``hidden_loss``: the sum over tokens of the mean over layers and dimensions."""
        with torch.no_grad():
            targets = list(self._teacher.iter_hidden_states(packed))
        states = list(self._student.bert.iter_hidden_states(packed, dropout_seed))[1:]
        total = torch.zeros((), device=states[0].device)
        for state, layer in zip(states, self._teacher_layers, strict=True):
            difference = self._student.project(state).float() - targets[layer].float()
            total = total + difference.square().mean(-1).sum()
        return {"hidden_loss": (total / len(states), len(packed.ids))}


class RelationLoss:
    """Self-attention relations (MiniLMv2, Wang et al. 2021, arXiv:2012.15828).

    The queries of a layer, of all its heads together, are split into relation heads. The relation
    of a head is the softmax of the scaled products between all tokens of a text. The student's last
    layer learns these relations, and those of the keys and of the values. The models may have
    different widths and numbers of attention heads.
    """

    def __init__(
        self, student: EncoderStudent, teacher: BertModel, teacher_layer: int, num_heads: int
    ) -> None:
        """Create the loss.

        Args:
            student: The student.
            teacher: The teacher, in eval mode.
            teacher_layer: Layer of the teacher, from 1.
            num_heads: Relation heads, a divisor of both widths.
        """
        # The final norm of a pre-norm student is not used. If all layers are frozen, no weights of
        # the student remain to be trained, which is reported before the first step.
        student.bert.encoder.norm.requires_grad_(False)
        self._student = student
        self._teacher = teacher
        self._teacher_layer = teacher_layer
        self._num_heads = num_heads

    def compute(
        self,
        packed: PackedBatch,
        masked_positions: Tensor,
        masked_labels: Tensor,
        dropout_seed: DropoutSeed | None,
    ) -> LossSums:
        """Return the losses of the three relations, averaged over heads, for each token."""
        with torch.no_grad():
            targets = compute_qkv(self._teacher, packed, self._teacher_layer, None)
        student = compute_qkv(self._student.bert, packed, self._student.config.layers, dropout_seed)
        lengths: list[int] = packed.cu_seqlens.diff().tolist()
        names = ("query_loss", "key_loss", "value_loss")
        return {
            name: (
                sum_relation_divergence(
                    student[:, index], targets[:, index], lengths, self._num_heads
                ),
                len(packed.ids),
            )
            for index, name in enumerate(names)
        }


def compute_qkv(
    bert: BertModel, packed: PackedBatch, layer_number: int, dropout_seed: DropoutSeed | None
) -> Tensor:
    """Return the queries, keys and values of a layer, [T, 3, D]; layers count from 1."""
    states = bert.iter_hidden_states(packed, dropout_seed, num_layers=layer_number - 1)
    hidden = next(states)
    for hidden in states:  # noqa: B007 - used after the loop
        pass
    layer = bert.encoder.layers[layer_number - 1]
    assert isinstance(layer, EncoderLayer)
    return layer.compute_qkv(hidden).flatten(2)


def sum_relation_divergence(
    student: Tensor, teacher: Tensor, lengths: list[int], num_heads: int
) -> Tensor:
    """Return the sum over all tokens of KL(teacher's relations || student's), averaged over heads.

    Args:
        student: Queries, keys or values, [T, D].
        teacher: Those of the teacher, [T, D of the teacher].
        lengths: Number of tokens of each text.
        num_heads: Relation heads, A.

    Returns:
        float32 [].
    """
    log_q, is_token = compute_log_relations(student, lengths, num_heads)
    with torch.no_grad():
        log_p, _ = compute_log_relations(teacher, lengths, num_heads)
    # Padding has probability 0 in both, and no difference.
    differences = (log_p - log_q).masked_fill(~is_token[:, None, None, :], 0)
    divergences = (log_p.exp() * differences).sum(-1)
    return divergences.masked_fill(~is_token[:, None, :], 0).sum() / num_heads


def compute_log_relations(
    vectors: Tensor, lengths: list[int], num_heads: int
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the relations of each text, and which positions are tokens.

    Args:
        vectors: [T, D].
        lengths: Number of tokens of each of the B texts.
        num_heads: Relation heads, A.

    Returns:
        float32 [B, A, S, S], -inf at padding; bool [B, S].
    """
    parts = vectors.float().split(lengths)  # type: ignore[no-untyped-call]
    padded = pad_sequence(list(parts), batch_first=True)
    heads = padded.view(*padded.shape[:2], num_heads, -1).transpose(1, 2)
    scores = heads @ heads.transpose(-1, -2) / math.sqrt(heads.shape[-1])
    positions = torch.arange(padded.shape[1], device=vectors.device)
    is_token = positions < torch.tensor(lengths, device=vectors.device)[:, None]
    scores = scores.masked_fill(~is_token[:, None, None, :], -math.inf)
    return scores.log_softmax(-1), is_token
