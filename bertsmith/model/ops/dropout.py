"""Reproducible dropout: a mask is a pure function of a seed and the index of the layer."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith import splitmix64

#: Number of random bits that decide whether an element is dropped; the rate is exact to 2^-16.
BITS_PER_ELEMENT = 16


@dataclass(frozen=True)
class DropoutSeed:
    """Seed of all dropout masks of one forward pass.

    Attributes:
        seed: int64 [], on the CPU. On CUDA, only the `reference` kernel uses it. Other dropout
            there uses the device's generator, which training seeds before each micro-batch.
    """

    seed: Tensor

    @classmethod
    def random(cls) -> "DropoutSeed":
        """Draw a seed from PyTorch's default generator."""
        return cls(torch.randint(2**62, ()))


def _mix_seed(seed: int, index: int) -> int:
    """Hash a seed and a layer index to 63 bits, with SplitMix64.

    PyTorch's CPU generator uses only the low 32 bits of its seed. Without a hash, seeds that differ
    only in the high bits would give the same mask.
    """
    counter = (seed + index * splitmix64.INCREMENT) % 2**64
    return int(splitmix64.mix(np.array([counter], np.uint64))[0]) % 2**63


@torch.library.custom_op("bertsmith::random_bits", mutates_args=(), device_types="cpu")
def random_bits(seed: Tensor, index: int, count: int) -> Tensor:
    """Return uniform random bits, int16 [count], as a pure function of ``seed`` and ``index``.

    This is a custom operator so that eager and compiled models draw the same bits.
    """
    generator = torch.Generator()
    generator.manual_seed(_mix_seed(int(seed), index))
    int64_values = torch.empty((count + 3) // 4, dtype=torch.int64)
    # With None as upper bound, all 64 bits are random.
    int64_values.random_(-(2**63), None, generator=generator)
    bits = int64_values.view(torch.int16)
    return bits if len(bits) == count else bits[:count].clone()


@random_bits.register_fake
def _(seed: Tensor, index: int, count: int) -> Tensor:  # noqa: ARG001 - must match the operator
    return torch.empty(count, dtype=torch.int16, device=seed.device)


class Dropout(nn.Module):
    """In training, set elements to zero with probability ``rate`` and scale the others.

    On the CPU this is about five times as fast as nn.Dropout, because each 64-bit random number is
    used for four elements.
    """

    def __init__(self, rate: float, index: int) -> None:
        """Create the layer.

        Args:
            rate: Probability of zeroing an element.
            index: Index of this dropout layer in the model. Layers with different indices draw
                independent masks.
        """
        super().__init__()
        self.rate = rate
        self.index = index

    def is_active(self, dropout_seed: DropoutSeed | None) -> bool:
        """Return whether ``forward`` drops elements.

        It does in train mode, with a seed and a rate above 0.
        """
        return self.training and self.rate > 0.0 and dropout_seed is not None

    def draw_mask(self, x: Tensor, dropout_seed: DropoutSeed) -> Tensor:
        """Return the mask: 0 or 1 / (1 - rate), with the shape, dtype and device of x.

        The bits are drawn on the CPU, so that the mask is the same on every device.
        """
        bits = random_bits(dropout_seed.seed, self.index, x.numel()).view(x.shape).to(x.device)
        # The random bits are signed integers from -2^15 to 2^15 - 1.
        threshold = round(self.rate * 2**BITS_PER_ELEMENT) - 2 ** (BITS_PER_ELEMENT - 1)
        mask: Tensor = (bits >= threshold).to(x.dtype).mul_(1.0 / (1.0 - self.rate))
        return mask

    def forward(self, x: Tensor, dropout_seed: DropoutSeed | None) -> Tensor:
        """Apply dropout to x, a tensor of any shape; returns x itself if dropout is not active."""
        if dropout_seed is None or not self.is_active(dropout_seed):
            return x
        if x.is_cpu:
            return x * self.draw_mask(x, dropout_seed)
        return F.dropout(x, self.rate)

    def extra_repr(self) -> str:
        """Return the part of the module's repr in parentheses."""
        return f"rate={self.rate}"


def set_dropout_rate(model: nn.Module, rate: float) -> None:
    """Set the rate of all dropout layers of a model, of attention probabilities too."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.rate = rate
