"""Losses between the outputs of a student and those of its teacher.

Each returns a value per text or example, so that the caller can average over a batch.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import TaskKind
from bertsmith.errors import SettingsError


def embedding_losses(student: Tensor, teacher: Tensor, kind: Literal["cosine", "mse"]) -> Tensor:
    """Return the loss of each text.

    cosine: 1 - cos(s, t); mse: mean over the dimensions of (s - t)².

    Args:
        student: Vectors, float32 [B, W].
        teacher: Vectors of the same texts, float32 [B, W].
        kind: The loss.

    Returns:
        float32 [B].
    """
    if kind == "cosine":
        return 1 - F.cosine_similarity(student, teacher, dim=-1)
    return (student - teacher).square().mean(-1)


def output_losses(student: Tensor, teacher: Tensor, kind: TaskKind, temperature: float) -> Tensor:
    """Return the loss of each row of outputs of a fine-tuned model.

    With z = student / τ and t = teacher / τ, the loss is τ² KL(softmax(t) || softmax(z)) for one
    label, and the mean over the labels of τ² KL(Bernoulli(t) || Bernoulli(z)) for several labels,
    whose probabilities are sigmoid(t) and sigmoid(z). For regression it is (student - teacher)².
    The factor τ² keeps the size of the gradient (Hinton et al. 2015, arXiv:1503.02531).

    Args:
        student: float32 [M, C].
        teacher: float32 [M, C].
        kind: Kind of task.
        temperature: τ; not used for regression.

    Returns:
        float32 [M].

    Raises:
        SettingsError: If the kind of task is not supported.
    """
    if kind == "regression":
        return (student - teacher).square().mean(-1)
    student, teacher = student / temperature, teacher / temperature
    if kind == "multi":
        losses = bernoulli_divergence(student, teacher).mean(-1)
    elif kind in ("single", "entities", "tags"):
        losses = softmax_divergence(student, teacher)
    else:
        raise SettingsError(
            f"the teacher predicts {kind!r}, which cannot be distilled; use a teacher that "
            "predicts labels, numbers, entities or tags, or distill before fine-tuning"
        )
    return losses * temperature**2


def softmax_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) over the last axis: [..., C] -> [...]."""
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def bernoulli_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(Bernoulli(teacher) || Bernoulli(student)) of each logit, in any shape."""
    probability = torch.sigmoid(teacher)
    positive = probability * (F.logsigmoid(teacher) - F.logsigmoid(student))
    negative = (1 - probability) * (F.logsigmoid(-teacher) - F.logsigmoid(-student))
    return positive + negative
