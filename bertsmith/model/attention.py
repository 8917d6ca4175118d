"""Multi-head self-attention over packed sequences, with interchangeable kernels.

It never knows of the rest of the layer; it alone knows where one sequence ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith.model.config import ModelConfig
from bertsmith.model.dropout import Dropout, Noise
from bertsmith.model.packed import Packed
from bertsmith.model.padding import pad, unpad
from bertsmith.model.varlen import variable_length_attention

Kernel = Literal["reference", "padded", "varlen"]
Drop = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a batch lie, worked out once for all layers.

    boundaries: int32 [B + 1]. longest: S. slots: int64 [T], each token's place in the padded
    [B * S] row, or None where all lengths are equal and padding is a plain view. mask: what
    `padded` adds to the scores, 0 or -inf, broadcast to [B, N, S, S], or None.
    """

    kernel: Kernel
    boundaries: Tensor
    longest: int
    causal: bool
    slots: Tensor | None = None
    mask: Tensor | None = None

    @property
    def sequences(self) -> int:
        """The number of sequences B."""
        return self.boundaries.shape[0] - 1


def layout(packed: Packed, kernel: Kernel, *, causal: bool, dtype: torch.dtype) -> Layout:
    """Prepare a batch for one of the kernels."""
    boundaries, longest = packed.boundaries, packed.longest
    base = Layout(kernel, boundaries, longest, causal)
    if kernel != "padded":
        return base
    sequences = base.sequences
    mask = None
    if causal:
        ones = torch.ones(longest, longest, dtype=torch.bool, device=boundaries.device)
        mask = torch.zeros_like(ones, dtype=dtype).masked_fill(ones.triu(1), -math.inf)
    # A compiled graph takes the same way for all batches: whether they are equal in length would
    # be asked of each, and answered by a graph of its own.
    if not torch.compiler.is_compiling() and packed.ids.shape[0] == sequences * longest:
        return Layout(kernel, boundaries, longest, causal, None, mask)
    lengths = boundaries.diff()
    first_slots = torch.arange(sequences, device=boundaries.device) * longest
    slots = packed.positions + first_slots.repeat_interleave(
        lengths, output_size=packed.ids.shape[0]
    )
    beyond = torch.arange(longest, device=boundaries.device) >= lengths[:, None]
    keys = torch.zeros(sequences, longest, dtype=dtype, device=boundaries.device)
    keys = keys.masked_fill(beyond, -math.inf)[:, None, None, :]
    # A filler query of a causal row still sees its first token, so no row is all -inf.
    return Layout(kernel, boundaries, longest, causal, slots, keys if mask is None else keys + mask)


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, where: Layout, drop: Drop | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Attend as equation 1 of Vaswani et al. 2017 says, one sequence after another.

    query, key, value: [T, N, H]. Returns [T, N, H] and the probabilities of each sequence
    [N, S_b, S_b], before dropout.
    """
    outputs, probabilities = [], []
    ends = where.boundaries.tolist()
    # Drawn once for [B, N, S, S], as `padded` does: drawn for each sequence anew, all sequences
    # would get the same decisions.
    shape = (where.sequences, query.shape[1], where.longest, where.longest)
    kept = None if drop is None else drop(query.new_ones(shape))
    for index, (first, last) in enumerate(pairwise(ends)):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if where.causal:
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        p = scores.softmax(-1)
        probabilities.append(p)
        if kept is not None:
            p = p * kept[index, :, : last - first, : last - first]
        outputs.append((p @ v).transpose(0, 1))
    return torch.cat(outputs), probabilities


def padded_attention(qkv: Tensor, where: Layout, drop: Drop | None, rate: float) -> Tensor:
    """Attend in [B, N, S, H], every sequence padded to the longest.

    qkv: [T, 3, N, H]. ``drop`` draws the decisions of dropout on the CPU; on CUDA, PyTorch's
    kernels draw their own at ``rate``. Returns [T, N, H].
    """
    heads, head_width = qkv.shape[2:]
    shape = (where.sequences, where.longest, 3, heads, head_width)
    full = qkv if where.slots is None else pad(qkv, where.slots, shape[0] * shape[1])
    q, k, v = full.view(shape).permute(2, 0, 3, 1, 4).unbind(0)
    if drop is None:
        mixed = F.scaled_dot_product_attention(q, k, v, where.mask, dropout_p=rate)
    else:
        scores = (q * head_width**-0.5) @ k.transpose(-1, -2)
        if where.mask is not None:
            scores = scores + where.mask
        mixed = drop(scores.softmax(-1)) @ v
    mixed = mixed.transpose(1, 2).reshape(-1, heads, head_width)
    return mixed if where.slots is None else unpad(mixed, where.slots)


class SelfAttention(nn.Module):
    """Multi-head self-attention, section 3.2 of Vaswani et al. 2017, written with nn.Linear.

    One Linear makes queries, keys and values together: [T, D] -> [T, 3 D], in that order.
    """

    def __init__(self, config: ModelConfig, site: int) -> None:
        """``site`` numbers the dropout on the probabilities."""
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)
        self.dropout = Dropout(config.attention_dropout, site)

    def forward(
        self, hidden: Tensor, where: Layout, noise: Noise | None, places: Tensor | None = None
    ) -> Tensor:
        """[T, D] -> [T, D], or [M, D] for ``places``, int64 [M] of the T tokens."""
        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_width)
        active = self.dropout.active(noise)
        if where.kernel == "varlen":
            if active:
                raise ValueError("the varlen kernel has no dropout; set attention_dropout to 0")
            mixed = variable_length_attention(
                qkv, where.boundaries, where.longest, causal=where.causal
            )
        elif where.kernel == "padded":
            own = active and hidden.is_cpu
            rate = self.dropout.rate if active and not own else 0.0
            mixed = padded_attention(qkv, where, self._drop(noise) if own else None, rate)
        else:
            drop = self._drop(noise) if active else None
            query, key, value = qkv.unbind(1)
            mixed, _ = reference_attention(query, key, value, where, drop)
        mixed = mixed.flatten(1)
        projected: Tensor = self.output(mixed if places is None else mixed.index_select(0, places))
        return projected

    def probabilities(self, hidden: Tensor, where: Layout) -> list[Tensor]:
        """Return how much each token looks at each, [N, S_b, S_b] of each sequence."""
        qkv = self.query_key_value(hidden).view(-1, 3, self.heads, self.head_width)
        query, key, value = qkv.unbind(1)
        return reference_attention(query, key, value, where)[1]

    def _drop(self, noise: Noise | None) -> Drop:
        return lambda probabilities: self.dropout(probabilities, noise)
