"""From the packed row to a padded one and back, with gradients that only copy.

It never knows what the rows hold.
"""

from typing import Any

import torch
from torch import Tensor


class _Pad(torch.autograd.Function):
    """Written out because autograd's gradient of a gather adds, which is slow and unordered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return rows.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = rows.shape[0]
        return rows.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        padded = gradient.new_zeros(ctx.size, *gradient.shape[1:])
        return padded.index_copy_(0, slots, gradient), None


def pad(rows: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
    """Take for each padded row the one at ``sources``: [T, ...] -> [size, ...].

    slots: int64 [T], where each row comes to lie, all different. The other padded rows are copies,
    which is quicker than to write zeros first; what is made of them must get no gradient.
    """
    # PyTorch's ``apply`` has no types, here and below.
    padded: Tensor = _Pad.apply(rows, sources, slots)  # type: ignore[no-untyped-call]
    return padded


def unpad(rows: Tensor, slots: Tensor) -> Tensor:
    """Take the rows at ``slots`` (int64 [T], all different): [size, ...] -> [T, ...]."""
    taken: Tensor = _Unpad.apply(rows, slots)  # type: ignore[no-untyped-call]
    return taken
