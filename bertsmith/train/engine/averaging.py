"""A running average of the weights over the last part of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Polynomial-decay average of the trained weights (Shamir and Zhang 2013, arXiv:1212.1824).

    After step t, the average is a_t = (1 - s_t) a_{t-1} + s_t w_t, where w_t are the weights and
    s_t = (p + 1) / (t + p). The weights after step i then count in proportion to about (i / t)^p.
    Their mean age is t / (p + 2), that of a uniform average over the last 2 / (p + 2) of the steps.
    Unlike an exponential average with a fixed decay, or a uniform average of the last steps
    (Izmailov et al. 2018, arXiv:1803.05407; Kaddour 2022, arXiv:2209.14981), this average does not
    depend on the length of the run.

    Buffers, such as the statistics of batch norm, are not averaged.

    Attributes:
        weights: The averages by parameter name, on the device of the parameters.
    """

    def __init__(self, model: nn.Module, fraction: float) -> None:
        """Start the average at the current weights.

        Args:
            model: Model whose trainable parameters are averaged.
            fraction: Fraction of the completed steps that the average covers, above 0 and at
                most 1.
        """
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._power = 2 / fraction - 2
        self.weights = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the current weights, which are those after ``step`` steps."""
        share = (self._power + 1) / (step + self._power)
        for name, average in self.weights.items():
            average.lerp_(self._parameters[name], share)

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Set the averages to stored ones, given by parameter name.

        Raises:
            KeyError: If a parameter is missing.
        """
        for name, average in self.weights.items():
            average.copy_(weights[name])

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Replace the model's weights by the averages."""
        for name, average in self.weights.items():
            self._parameters[name].copy_(average)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's weights by the averages while the block runs."""
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(weights[name])
