"""Losses of distillation, compared with direct formulas in float64."""

import math

import pytest
import torch
from torch import Tensor

from bertsmith.bundle import TaskKind
from bertsmith.errors import SettingsError
from bertsmith.train.distillation.losses import embedding_losses, output_losses


def draw_pair(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return random outputs of a student and of a teacher."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(rows, columns, generator=generator) * 3 for _ in range(2))
    return student, teacher


def softmax(values: list[float]) -> list[float]:
    """Return the softmax in float64."""
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def sigmoid(value: float) -> float:
    """Return the sigmoid in float64."""
    return 1 / (1 + math.exp(-value))


def divergence(p: list[float], q: list[float]) -> float:
    """Return KL(p || q) in float64."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("kind", ["single", "multi", "regression", "tags"])
def test_output_losses_are_the_formulas(kind: TaskKind) -> None:
    """The loss is τ² KL with softened probabilities, or the squared error for regression."""
    temperature = 3.0
    student, teacher = draw_pair(7, 1 if kind == "regression" else 5)
    losses = output_losses(student, teacher, kind, temperature)
    for row, loss in enumerate(losses.tolist()):
        s, t = (x[row].double().tolist() for x in (student, teacher))
        if kind == "regression":
            expected = (s[0] - t[0]) ** 2
        else:
            z, y = ([value / temperature for value in x] for x in (s, t))
            if kind == "multi":
                pairs = zip(map(sigmoid, y), map(sigmoid, z), strict=True)
                terms = [divergence([p, 1 - p], [q, 1 - q]) for p, q in pairs]
                expected = temperature**2 * sum(terms) / len(terms)
            else:
                expected = temperature**2 * divergence(softmax(y), softmax(z))
        assert loss == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_a_soft_label_is_the_difference_of_probabilities() -> None:
    """The gradient of τ² KL with respect to the student's logits is τ (q - p)."""
    student, teacher = draw_pair(7, 5)
    student.requires_grad_()
    output_losses(student, teacher, "single", 2.0).sum().backward()  # type: ignore[no-untyped-call]
    expected = 2 * ((student.detach() / 2).softmax(-1) - (teacher / 2).softmax(-1))
    torch.testing.assert_close(student.grad, expected)


def test_embedding_losses_are_the_formulas() -> None:
    """The loss is 1 - cosine similarity, or the mean squared error over the dimensions."""
    student, teacher = draw_pair(7, 5)
    cosine, mse = (embedding_losses(student, teacher, kind) for kind in ("cosine", "mse"))
    for row in range(7):
        s, t = (x[row].double().tolist() for x in (student, teacher))
        product = sum(a * b for a, b in zip(s, t, strict=True))
        norms = math.sqrt(sum(a * a for a in s) * sum(b * b for b in t))
        assert float(cosine[row]) == pytest.approx(1 - product / norms, rel=1e-5)
        squares = [(a - b) ** 2 for a, b in zip(s, t, strict=True)]
        assert float(mse[row]) == pytest.approx(sum(squares) / 5, rel=1e-5)


def test_outputs_without_classes_are_rejected() -> None:
    """Answers and choices have no loss."""
    with pytest.raises(SettingsError, match="predicts 'span', which cannot be distilled"):
        output_losses(*draw_pair(2, 2), "span", 1.0)
